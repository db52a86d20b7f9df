"""What is selected of the messages that come next in a queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting.scan import Choice, Passing, Selector
from services.broker.delivery.message_cache import CachedMessage


class ClaimSelector(Selector):
    """Selects the messages of one claim batch: as many as fit, whose payloads are here."""

    def __init__(
        self,
        count: int,
        payload_bytes: int,
        answer_bytes: int,
        held: Mapping[int, CachedMessage],
        find: Callable[[int], CachedMessage | None],
        kept_back: Mapping[int, int],
        can_give: Callable[[int], bool],
        passing: Passing | None = None,
        *,
        one_fits: bool = True,
    ) -> None:
        """Take at most `count` messages, and payload bytes, but for one message if `one_fits`.

        `answer_bytes` is how much fits into the answer, headers and all.
        Messages are in `held` or where `find` looks; of the others those that their ingest can give
        are waited for, the rest and what is kept back passed over.
        """
        self.chosen: list[CachedMessage] = []
        self.skipped_count = 0
        self.passing = passing
        self._count = count
        self._payload_bytes_left = payload_bytes
        self._answer_bytes = self._bytes_left = answer_bytes
        self._one_fits = one_fits
        self._held = held
        self._find = find
        self._kept_back = kept_back
        self._can_give = can_give

    @property
    def size_bytes(self) -> int:
        """About what the chosen messages take in an answer."""
        return self._answer_bytes - self._bytes_left

    def capacity(self) -> int:
        return self._count - len(self.chosen)

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        if self._kept_back:
            return False
        ids = list(map(_MESSAGE_ID, items))
        try:
            held = list(map(self._held.__getitem__, ids))
        except KeyError:
            held = list(filter(None, map(self._find, ids)))
            if len(held) < len(ids):
                return False
        payload_bytes = sum(map(len, map(_PAYLOAD, held)))
        size = payload_bytes + sum(map(len, map(_COMMON, held))) + len(held) * _ID_BYTES
        if payload_bytes > self._payload_bytes_left or size > self._bytes_left:
            return False
        self._payload_bytes_left -= payload_bytes
        self._bytes_left -= size
        self.chosen += held
        return True

    def choose(self, item: AvailableMessage) -> Choice:
        if len(self.chosen) >= self._count:
            return Choice.STOP
        if item.message_id in self._kept_back:
            return self._skip()
        one = self._held.get(item.message_id) or self._find(item.message_id)
        if one is None:
            return Choice.STOP if self._can_give(item.message_id) else self._skip()
        payload, common = one
        size = len(payload) + len(common) + _ID_BYTES
        is_first = self._one_fits and not self.chosen
        if not is_first and (len(payload) > self._payload_bytes_left or size > self._bytes_left):
            return Choice.STOP
        self._payload_bytes_left -= len(payload)
        self._bytes_left -= size
        self.chosen.append(one)
        return Choice.TAKE

    def _skip(self) -> Choice:
        self.skipped_count += 1
        return Choice.SKIP


_MESSAGE_ID = itemgetter(0)
_PAYLOAD, _COMMON = itemgetter(0), itemgetter(1)

_ID_BYTES = 16
"""What a message has in an answer beside its payload and what it shares with others."""


class IdSelector(Selector):
    """Selects the messages with these IDs."""

    def __init__(self, ids: set[int], passing: Passing) -> None:
        self.passing = passing
        self._left = set(ids)

    def choose(self, item: AvailableMessage) -> Choice:
        if not self._left:
            return Choice.STOP
        if item.message_id not in self._left:
            return Choice.SKIP
        self._left.discard(item.message_id)
        return Choice.TAKE
