"""The failed attempts of messages: a cache of their records, newest last.

A message that gets an entry in another queue takes its record along: see `carry`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

from libs.storage.keys import attempts_key
from libs.storage.queues import FailedAttempt, encode_attempts
from services.broker.leases import Row

ATTEMPTS_CACHED = 20_000
"""Attempts records in memory: those of the messages that failed last, likely to fail again."""

ATTEMPTS_KEPT = 1000
"""Attempts in one record at most, the newest: redrives go on without end, and records must not."""

Key = tuple[str, int]
"""Queue and message: two queues may hold the same message."""


class Attempts:
    """Records that are not here are in the database, or there is none yet."""

    def __init__(self) -> None:
        self._records: OrderedDict[Key, list[FailedAttempt]] = OrderedDict()
        self._changed: set[Key] = set()
        self._reading: Counter[Key] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def get(self, key: Key) -> Sequence[FailedAttempt] | None:
        """The record, if it is here: newer then than what the database has."""
        return self._records.get(key)

    def begin_read(self, keys: Iterable[Key]) -> None:
        """Notes that these are being read: if they come here meanwhile, they must stay."""
        self._reading.update(keys)

    def end_read(self, keys: Iterable[Key]) -> None:
        """Ends what `begin_read` began."""
        self._reading.subtract(keys)
        self._reading = +self._reading

    def offer(self, key: Key, record: list[FailedAttempt]) -> None:
        """Takes in a record as it was read; one that is here already is newer."""
        self._records.setdefault(key, record)

    def add(self, key: Key, attempt: FailedAttempt) -> None:
        """Adds an attempt to a record that is here, or to none."""
        self._put(key, [*self._records.get(key, ()), attempt])

    def needed(self, message_ids: Iterable[int], source: str, target: str) -> list[Key]:
        """The records that `carry` must find here, and that are not."""
        if source == target:
            return []
        keys = [(queue_id, one) for one in message_ids for queue_id in (source, target)]
        return [key for key in keys if key not in self._records]

    def carry(self, message_id: int, source: str, target: str) -> None:
        """Adds the attempts at a message in one queue to those in another: see `needed`.

        What the other has already, since the message comes back to it, is not added again.
        """
        earlier = self._records.get((source, message_id))
        if source == target or not earlier:
            return
        key = (target, message_id)
        carried = (
            one._replace(queue="" if one.queue == target else one.queue or source)
            for one in earlier
        )
        attempts = dict.fromkeys((*self._records.get(key, ()), *carried))
        self._put(key, sorted(attempts, key=lambda one: one.claimed_at_ms))

    def _put(self, key: Key, record: list[FailedAttempt]) -> None:
        self._records[key] = record[-ATTEMPTS_KEPT:]
        self._records.move_to_end(key)
        self._changed.add(key)

    def drop_queue(self, queue_id: str) -> None:
        """Forgets a queue that is deleted."""
        for key in [key for key in self._records if key[0] == queue_id]:
            del self._records[key]
            self._changed.discard(key)

    def drain(self) -> Iterator[tuple[Key, Row]]:
        """The rows of the records that changed since the last drain."""
        for key in self._changed:
            yield key, (attempts_key(*key), encode_attempts(self._records[key]))
        self._changed = set()

    def shrink(self, undurable: Set[Key]) -> None:
        """Lets go of the oldest records, but for those which the database could not give back."""
        surplus = len(self._records) - ATTEMPTS_CACHED
        if surplus > 0:
            for key in list(islice(self._records, surplus)):
                if not (key in self._changed or key in undurable or key in self._reading):
                    del self._records[key]
