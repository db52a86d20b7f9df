"""When a message may be removed permanently: its age, its event, and the shard's purge epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from libs.storage.database.slate import Database
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.own_keys import PURGE_EPOCH_KEY
from libs.storage.records.states import decode_purge_epoch, encode_purge_epoch
from services.ingest.write.publishing import Publisher
from slatemq.errors import FailedPrecondition


class Reason(Enum):
    EXPIRED = "expired"
    UNREFERENCED = "unreferenced"


@dataclass(frozen=True)
class Rules:
    """The ages from which messages may be removed; a replay window of 0 never ends."""

    grace_ms: int
    replay_window_ms: int

    def holds(self, reason: Reason, now_ms: int) -> Callable[[int, int], bool]:
        """A predicate over receipt (ms) and retention (s): whether the reason holds now."""
        if reason is Reason.EXPIRED:
            limit_ms = now_ms - self.grace_ms
            return lambda received_ms, kept_s: 0 < kept_s * 1000 <= limit_ms - received_ms
        oldest_ms = now_ms - self.grace_ms - self.replay_window_ms
        if not self.replay_window_ms:
            return lambda received_ms, kept_s: False
        # A retention of 0 keeps a message for ever, whether a queue needs it or not.
        return lambda received_ms, kept_s: kept_s > 0 and received_ms <= oldest_ms


class Unannounced(NamedTuple):
    """Messages whose events are not published yet: those behind `after_id`.

    They stay, unless they were received at `since_ms` or before.
    """

    after_id: int
    since_ms: int


ALL_ANNOUNCED: Final = Unannounced(MAX_MESSAGE_ID, 0)
"""Every event is published."""


STALE: Final = "STALE_PURGE_EPOCH"


class PurgeEpoch:
    """A number that only rises: a purge carries the epoch it was decided in, an older is refused.

    Attributes:
        durable: The last one that is durable; 0 at the beginning.
    """

    def __init__(self, number: int, publisher: Publisher) -> None:
        self.durable = number
        self._number = number
        self._publisher = publisher

    @classmethod
    async def load(cls, database: Database, publisher: Publisher) -> PurgeEpoch:
        value = await database.get(PURGE_EPOCH_KEY)
        return cls(0 if value is None else decode_purge_epoch(value), publisher)

    def check(self, number: int) -> None:
        """Raises FailedPrecondition unless this is the epoch, one that is being raised included.

        What is put into a commit without waiting since then is durable before, or together with,
        the next raise.
        """
        if number != self._number:
            raise FailedPrecondition(
                STALE,
                f"decided in purge epoch {number}, the shard is in {self._number}",
                subject="purge_epoch",
                metadata={"purge_epoch": str(self._number)},
            )

    async def raise_by_one(self) -> int:
        """Raise the epoch; durable on return. Raises the errors of the store."""
        self._number = number = self._number + 1
        records = [(PURGE_EPOCH_KEY, encode_purge_epoch(number))]
        self._publisher.put(records, partial(self._settle, number))
        await self._publisher.commits.durable()
        return number

    def _settle(self, number: int) -> None:
        self.durable = number
