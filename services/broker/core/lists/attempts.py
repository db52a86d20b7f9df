"""The failed attempts of messages: a cache of their records, newest last.

A message that gets an entry in another queue takes its record along: see `carry`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Protocol

from libs.storage.layout.keys import attempts_key
from libs.storage.layout.primitives import Row
from libs.storage.records.queues import FailedAttempt, encode_attempts
from services.broker.core.waiting.scan import AttemptsKey

ATTEMPTS_CACHED = 20_000
"""Attempts records in memory: those of the messages that failed last, likely to fail again."""

ATTEMPTS_KEPT = 1000
"""Attempts in one record at most, the newest: redrives go on without end, and records must not."""


class QueueIdentity(Protocol):
    """What tells a queue from all others, its predecessors of the same name included."""

    queue_id: str
    created_revision: int


def attempts_at(queue: QueueIdentity, message_id: int) -> AttemptsKey:
    """Under what the attempts at a message in a queue are known here."""
    return queue.queue_id, queue.created_revision, message_id


class Attempts:
    """Records that are not here are in the database, or there is none yet."""

    def __init__(self) -> None:
        self._records: OrderedDict[AttemptsKey, list[FailedAttempt]] = OrderedDict()
        self._changed: set[AttemptsKey] = set()
        self._reading: Counter[AttemptsKey] = Counter()

    def __contains__(self, key: AttemptsKey) -> bool:
        return key in self._records

    def get(self, key: AttemptsKey) -> Sequence[FailedAttempt] | None:
        """The record, if it is here: newer then than what the database has."""
        return self._records.get(key)

    def begin_read(self, keys: Iterable[AttemptsKey]) -> None:
        """Notes that these are being read: if they come here meanwhile, they must stay."""
        self._reading.update(keys)

    def end_read(self, keys: Iterable[AttemptsKey]) -> None:
        """Ends what `begin_read` began."""
        self._reading.subtract(keys)
        self._reading = +self._reading

    def offer(self, key: AttemptsKey, record: list[FailedAttempt]) -> None:
        """Takes in a record as it was read; one that is here already is newer."""
        self._records.setdefault(key, record)

    def add(self, key: AttemptsKey, attempt: FailedAttempt) -> None:
        """Adds an attempt to a record that is here, or to none."""
        self._put(key, [*self._records.get(key, ()), attempt])

    def needed(
        self, message_ids: Iterable[int], source: QueueIdentity, target: QueueIdentity
    ) -> list[AttemptsKey]:
        """The records that `carry` must find here, and that are not."""
        if source is target:
            return []
        keys = [attempts_at(queue, one) for one in message_ids for queue in (source, target)]
        return [key for key in keys if key not in self._records]

    def carry(self, message_id: int, source: QueueIdentity, target: QueueIdentity) -> None:
        """Adds the attempts at a message in one queue to those in another: see `needed`.

        What the other has already, since the message comes back to it, is not added again.
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
        """Forgets the attempts at a message in a queue, where its entry is gone.

        Gives the row that the caller is to delete; none where the next drain does.
        """
        key = attempts_at(queue, message_id)
        if key not in self._records and key not in self._reading:
            return (attempts_key(queue.queue_id, message_id),)
        self._records[key] = []  # newer than what is stored, or being read
        self._changed.add(key)
        return ()

    def _put(self, key: AttemptsKey, record: list[FailedAttempt]) -> None:
        self._records[key] = record[-ATTEMPTS_KEPT:]
        self._records.move_to_end(key)
        self._changed.add(key)

    def drain(self) -> Iterator[tuple[AttemptsKey, Row]]:
        """The rows of the records that changed since the last drain."""
        for key in self._changed:
            queue_id, _, message_id = key
            record = self._records[key]
            value = encode_attempts(record) if record else None
            yield key, (attempts_key(queue_id, message_id), value)
        self._changed = set()

    def shrink(self, undurable: Set[AttemptsKey]) -> None:
        """Lets go of the oldest records, but for those which the database could not give back."""
        surplus = len(self._records) - ATTEMPTS_CACHED
        if surplus > 0:
            for key in list(islice(self._records, surplus)):
                if not (key in self._changed or key in undurable or key in self._reading):
                    del self._records[key]
