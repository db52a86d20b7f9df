"""The failed attempts of messages: a cache of their records, newest last.

When a message gets an entry in another queue, its record goes along: see `carry`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Protocol

from libs.storage.layout.keys import attempts_key
from libs.storage.layout.primitives import Row
from libs.storage.records.queues import FailedAttempt, encode_attempts
from services.broker.core.waiting.scan import AttemptsKey, Needs

ATTEMPTS_CACHED = 20_000
"""Attempts records in memory: those of the messages that failed last, likely to fail again."""

ATTEMPTS_KEPT = 1000
"""Attempts in one record at most, the newest: redrives may go on forever, records must not grow."""


class QueueIdentity(Protocol):
    """Identifies a queue, also among its predecessors of the same name."""

    queue_id: str
    created_revision: int


def attempts_at(queue: QueueIdentity, message_id: int) -> AttemptsKey:
    return queue.queue_id, queue.created_revision, message_id


def carried(
    message_ids: Iterable[int], source: QueueIdentity, target: QueueIdentity
) -> list[AttemptsKey]:
    """The records that `Attempts.carry` needs for these messages."""
    queues = () if source is target else (source, target)
    return [attempts_at(queue, one) for one in message_ids for queue in queues]


class Attempts:
    """A record that is not here is in the database, or does not exist yet."""

    def __init__(self) -> None:
        self._records: OrderedDict[AttemptsKey, list[FailedAttempt]] = OrderedDict()
        self._changed: dict[AttemptsKey, None] = {}
        self._reading: Counter[AttemptsKey] = Counter()

    def __contains__(self, key: AttemptsKey) -> bool:
        return key in self._records

    def get(self, key: AttemptsKey) -> Sequence[FailedAttempt] | None:
        """The record, if it is here; it is newer than what the database has."""
        return self._records.get(key)

    def begin_read(self, keys: Iterable[AttemptsKey]) -> None:
        """Notes that these are being read: what comes here meanwhile must stay."""
        self._reading.update(keys)

    def end_read(self, keys: Iterable[AttemptsKey]) -> None:
        self._reading.subtract(keys)
        self._reading = +self._reading

    def offer(self, key: AttemptsKey, record: list[FailedAttempt]) -> None:
        """Takes in a record that was read, unless a newer one is here already."""
        self._records.setdefault(key, record)

    def add(self, key: AttemptsKey, attempt: FailedAttempt) -> None:
        self._put(key, [*self._records.get(key, ()), attempt])

    def require(self, keys: Iterable[AttemptsKey]) -> None:
        """Raises Needs for the records that are not here."""
        cold = [key for key in keys if key not in self._records]
        if cold:
            raise Needs((), cold)

    def carry(self, message_id: int, source: QueueIdentity, target: QueueIdentity) -> None:
        """Adds the attempts at a message in one queue to those in another: see `carried`.

        Attempts that the other already has, since the message comes back, are not added again.
        """
        earlier = self._records.get(attempts_at(source, message_id))
        if source is target or not earlier:
            return
        key = attempts_at(target, message_id)
        carried = (
            one._replace(queue="" if one.queue == target.queue_id else one.queue or source.queue_id)
            for one in earlier
        )
        attempts = dict.fromkeys((*self._records.get(key, ()), *carried))
        self._put(key, sorted(attempts, key=lambda one: one.claimed_at_ms))

    def forget(self, queue: QueueIdentity, message_id: int) -> Sequence[bytes]:
        """Forgets the attempts at a message whose entry in a queue is gone.

        Returns the row that the caller must delete; none if the next drain does.
        """
        key = attempts_at(queue, message_id)
        if key not in self._records and key not in self._reading:
            return (attempts_key(queue.queue_id, message_id),)
        self._records[key] = []  # newer than what is stored, or being read
        self._changed[key] = None
        return ()

    def _put(self, key: AttemptsKey, record: list[FailedAttempt]) -> None:
        self._records[key] = record[-ATTEMPTS_KEPT:]
        self._records.move_to_end(key)
        self._changed[key] = None

    def drain(self) -> Iterator[tuple[AttemptsKey, Row]]:
        # Messages that were claimed and nacked together have equal records.
        values: dict[tuple[FailedAttempt, ...], bytes | None] = {(): None}
        for key in self._changed:
            queue_id, _, message_id = key
            record = tuple(self._records[key])
            if record not in values:
                values[record] = encode_attempts(record)
            yield key, (attempts_key(queue_id, message_id), values[record])
        self._changed = {}

    def shrink(self, undurable: Set[AttemptsKey]) -> None:
        """Drops the oldest records, except those that the database could not return yet."""
        surplus = len(self._records) - ATTEMPTS_CACHED
        if surplus > 0:
            for key in list(islice(self._records, surplus)):
                if not (key in self._changed or key in undurable or key in self._reading):
                    del self._records[key]
