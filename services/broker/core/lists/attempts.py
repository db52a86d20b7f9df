"""The failed attempts of messages: a cache of their records, newest last.

When a message gets an entry in another queue, its record goes along: see `carry`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple, Protocol

from libs.storage.layout.keys import attempts_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.queues import FailedAttempt, encode_attempts
from services.broker.core.waiting.scan import AttemptsKey, Needs

BYTES_MAX = 16 << 20
"""Of all attempts records in memory: those of the messages that failed last, likely to fail again.
Of messages that failed once, some 30,000."""

ATTEMPTS_KEPT = 1000
"""Attempts in one record at most, the newest: redrives may go on forever, records must not grow."""

RECORD_BYTES_MAX = 32 << 10
"""Of one record at most, as stored, unless a single attempt has more: each new attempt writes all
of it again."""

STORED_BYTES = 16
"""What an attempt takes beside its texts where it is stored."""

MEMORY_BYTES = 200
"""About what an attempt takes beside that in memory; so does a record."""


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


class _Record(NamedTuple):
    attempts: list[FailedAttempt]
    stored_bytes: int

    @property
    def held_bytes(self) -> int:
        return self.stored_bytes + MEMORY_BYTES * (1 + len(self.attempts))


_NONE = _Record([], 0)


class Attempts:
    """A record that is not here is in the database, or does not exist yet."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._new_bytes = 0
        self._records: OrderedDict[AttemptsKey, _Record] = OrderedDict()
        self._changed: dict[AttemptsKey, None] = {}
        self._reading: Counter[AttemptsKey] = Counter()

    def __contains__(self, key: AttemptsKey) -> bool:
        return key in self._records

    def get(self, key: AttemptsKey) -> Sequence[FailedAttempt] | None:
        """The record, if it is here; it is newer than what the database has."""
        record = self._records.get(key)
        return None if record is None else record.attempts

    def begin_read(self, keys: Iterable[AttemptsKey]) -> None:
        """Notes that these are being read: what comes here meanwhile must stay."""
        self._reading.update(keys)

    def end_read(self, keys: Iterable[AttemptsKey]) -> None:
        self._reading.subtract(keys)
        self._reading = +self._reading

    def offer(self, key: AttemptsKey, record: list[FailedAttempt]) -> None:
        """Takes in a record that was read, unless a newer one is here already."""
        if key not in self._records:
            self._hold(key, _Record(record, sum(map(_stored_bytes, record))))

    def add(self, key: AttemptsKey, attempt: FailedAttempt) -> None:
        before = self._records.get(key, _NONE)
        stored_bytes = before.stored_bytes + _stored_bytes(attempt)
        self._put(key, _Record([*before.attempts, attempt], stored_bytes))

    def require(self, keys: Iterable[AttemptsKey]) -> None:
        """Raises Needs for the records that are not here."""
        cold = [key for key in keys if key not in self._records]
        if cold:
            raise Needs((), cold)

    def carry(self, message_id: int, source: QueueIdentity, target: QueueIdentity) -> None:
        """Adds the attempts at a message in one queue to those in another: see `carried`.

        Attempts that the other already has, since the message comes back, are not added again.
        """
        earlier = self.get(attempts_at(source, message_id))
        if source is target or not earlier:
            return
        key = attempts_at(target, message_id)
        carried = (
            one._replace(queue="" if one.queue == target.queue_id else one.queue or source.queue_id)
            for one in earlier
        )
        attempts = dict.fromkeys((*self._records.get(key, _NONE).attempts, *carried))
        in_order = sorted(attempts, key=lambda one: one.claimed_at_ms)
        self._put(key, _Record(in_order, sum(map(_stored_bytes, in_order))))

    def forget(self, queue: QueueIdentity, message_id: int) -> Sequence[bytes]:
        """Forgets the attempts at a message whose entry in a queue is gone.

        Returns the row that the caller must delete; none if the next drain does.
        """
        key = attempts_at(queue, message_id)
        if key not in self._records and key not in self._reading:
            return (attempts_key(queue.queue_id, message_id),)
        self._hold(key, _NONE)  # newer than what is stored, or being read
        self._changed[key] = None
        return ()

    def take_new_bytes(self) -> int:
        """About what changes since the last call add to the next commit."""
        taken, self._new_bytes = self._new_bytes, 0
        return taken

    def _put(self, key: AttemptsKey, record: _Record) -> None:
        record = _newest(record)
        self._hold(key, record)
        self._records.move_to_end(key)
        self._changed[key] = None
        self._new_bytes += record.stored_bytes

    def _hold(self, key: AttemptsKey, record: _Record) -> None:
        before = self._records.get(key)
        self.held_bytes += record.held_bytes - (before.held_bytes if before else 0)
        self._records[key] = record

    def drain(self) -> Iterator[tuple[AttemptsKey, RowChange]]:
        # Messages that were claimed and nacked together have equal records.
        values: dict[tuple[FailedAttempt, ...], bytes | None] = {(): None}
        for key in self._changed:
            queue_id, _, message_id = key
            record = tuple(self._records[key].attempts)
            if record not in values:
                values[record] = encode_attempts(record)
            yield key, (attempts_key(queue_id, message_id), values[record])
        self._changed = {}

    def shrink(self, undurable: Set[AttemptsKey]) -> None:
        """Drops the oldest records, except those that the database could not return yet."""
        surplus, oldest = self.held_bytes - BYTES_MAX, list[AttemptsKey]()
        for key, record in self._records.items() if surplus > 0 else ():
            if not (key in self._changed or key in undurable or key in self._reading):
                oldest.append(key)
                surplus -= record.held_bytes
                if surplus <= 0:
                    break
        for key in oldest:
            self.held_bytes -= self._records.pop(key).held_bytes


def _newest(record: _Record) -> _Record:
    """What is kept of a record: its newest attempts."""
    attempts, stored_bytes = record
    first = max(0, len(attempts) - ATTEMPTS_KEPT)
    stored_bytes -= sum(map(_stored_bytes, attempts[:first]))
    while stored_bytes > RECORD_BYTES_MAX and first < len(attempts) - 1:
        stored_bytes -= _stored_bytes(attempts[first])
        first += 1
    return _Record(attempts[first:], stored_bytes) if first else record


def _stored_bytes(attempt: FailedAttempt) -> int:
    texts = attempt.consumer, attempt.outcome, attempt.queue
    return STORED_BYTES + sum(len(one) if one.isascii() else len(one.encode()) for one in texts)
