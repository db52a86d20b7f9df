"""The same history for Jepsen: `total-queue.edn` for its checker of queues, `elle.edn` for Elle.

Each line is one operation, as Jepsen writes `history.edn`. Every operation is a process of its own,
since Jepsen permits a process one at a time, and a batch is many of them.

Total queue: a message of a queue is one `:enqueue` of `["queue" "key"]`, and its ack one
`:dequeue`. An enqueue is `:ok` where the message must come to the queue, and `:info` where it only
may: its outcome is not known, a purge or another filter met it, or it has a retention. A dead
letter that is left is dequeued by the drain. An ack of unknown outcome counts as ok where the
message did not come again.

Elle (`elle.rw-register`): the register `"queue/ID"` is what became of a message in a queue. A claim
reads what the attempt before it wrote and writes a value of its own, and an ack reads what its
claim wrote and writes that with a minus. Elle assumes that each value is written once. After a
redrive, attempts go on from a million; a claim that no consumer saw is an `:info` write. Two claims
of one attempt, or a claim and an ack after the same one, read one value and write two, which is a
lost update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.judge.facts import Delivery, Facts, Queue, Sent, Use
from tests.judge.histories import FAIL, INFO, NEVER, OK
from tests.judge.rules import NO, Judge

GENERATION: Final = 1_000_000
ATTEMPT: Final = 1_000
"""Claims of one attempt that have values of their own: one that is released does not count."""


class Keyword(str):
    """An EDN keyword."""


class _Call(NamedTuple):
    """An operation of Jepsen's: its value when it began, and when it ended."""

    f: str
    began: int
    ended: int
    outcome: str
    asked: Any
    result: Any


def export(facts: Facts, folder: Path) -> None:
    """Write both files into the folder, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "total-queue.edn", _total_queue(facts))
    _write(folder / "elle.edn", _registers(facts))


def edn(value: Any) -> str:
    """A value as EDN text."""
    match value:
        case None:
            return "nil"
        case bool():
            return "true" if value else "false"
        case Keyword():
            return f":{value}"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            return f'"{escaped}"'
        case int() | float():
            return str(value)
        case list() | tuple():
            return f"[{' '.join(map(edn, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{edn(k)} {edn(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"EDN has no {type(value).__name__}")


def _write(file: Path, calls: Iterator[_Call]) -> None:
    lines = []
    for process, call in enumerate(calls):
        lines.append((call.began, process, "invoke", call.f, call.asked))
        if call.ended != NEVER:
            lines.append((call.ended, process, call.outcome, call.f, call.result))
    lines.sort(key=lambda line: (line[0], line[2] != "invoke"))
    with file.open("w", encoding="utf-8") as out:
        for index, (time, process, kind, f, value) in enumerate(lines):
            operation = {"index": index, "time": time, "process": process}
            words = {"type": Keyword(kind), "f": Keyword(f), "value": value}
            out.write(edn({Keyword(k): v for k, v in (operation | words).items()}) + "\n")


def _total_queue(facts: Facts) -> Iterator[_Call]:
    judge = Judge(facts)
    keys = {one: key for key, ids in facts.ids.items() for one in ids}
    for queue in facts.queues.values():
        for key, each in facts.sent.items():
            for sent in each:
                if judge.belongs(queue, sent) != NO:
                    yield _enqueue(judge, queue, key, sent)
        for dead in sorted(queue.dead.keys() & keys.keys()):
            value = [queue.name, keys[dead]]
            yield _Call("dequeue", queue.drained_at, queue.drained_at, OK, None, value)
    for (name, message_id), each_delivery in facts.deliveries.items():
        is_dead = message_id in facts.queue(name).dead  # The drain dequeues it.
        for place, one in enumerate(each_delivery):
            is_last = place == len(each_delivery) - 1 and not is_dead
            for use in _acks(facts, one):
                yield _dequeue(one, use, is_last=is_last)


def _enqueue(judge: Judge, queue: Queue, key: str, sent: Sent) -> _Call:
    value = [queue.name, key]
    if sent.outcome == OK and not judge.must_come(queue, key, sent):
        return _Call("enqueue", sent.began, NEVER, INFO, value, value)
    return _Call("enqueue", sent.began, sent.ended, sent.outcome, value, value)


def _dequeue(one: Delivery, use: Use, *, is_last: bool) -> _Call:
    value = [one.queue, one.key]
    if use.outcome == INFO and is_last:
        return _Call("dequeue", use.began, use.began, OK, None, value)
    return _Call("dequeue", use.began, use.ended, use.outcome, None, value)


def _registers(facts: Facts) -> Iterator[_Call]:
    judge = Judge(facts)
    for copy in facts.deliveries:
        register = f"{copy[0]}/{copy[1]}"
        last: int | None = None
        for number, generation in enumerate(judge.generations(copy)):
            claims = _Claims(judge, number, last)
            for one in generation:
                for unseen in claims.unseen(one):
                    writes = [[Keyword("w"), register, unseen]]
                    yield _Call("txn", one.began, NEVER, INFO, writes, writes)
                read, last = claims.take(one)
                yield _transaction(register, read, last, one.began, one.ended, OK)
                yield from _finished(facts, register, last, one)


class _Claims:
    """The values of the claims between two redrives of a message."""

    def __init__(self, judge: Judge, number: int, last: int | None) -> None:
        """`number`: of the redrives before; `last`: the value that the last claim wrote."""
        self._judge = judge
        self._begin = number * GENERATION
        self._read_by: dict[int, int | None] = {1: last}
        """By the number of an attempt, what a claim of it reads."""
        self._counts: Counter[int] = Counter()
        self._before: tuple[Delivery, int] | None = None

    def unseen(self, one: Delivery) -> Iterator[int]:
        """What the claims wrote that no consumer saw, and that must have been before this one."""
        for attempt in range(1, one.attempt):
            if attempt + 1 not in self._read_by:
                self._read_by[attempt + 1] = self._written(attempt)
                yield self._written(attempt)

    def take(self, one: Delivery) -> tuple[int | None, int]:
        """What this claim reads, and what it writes."""
        read = self._read_by.get(one.attempt)
        if self._before is not None:
            before, value = self._before
            if before.attempt == one.attempt and self._judge.may_be_released(before, one):
                read = value
        written = self._written(one.attempt)
        self._counts[one.attempt] += 1
        self._read_by[one.attempt + 1] = written
        self._before = one, written
        return read, written

    def _written(self, attempt: int) -> int:
        return self._begin + attempt * ATTEMPT + self._counts[attempt]


def _finished(facts: Facts, register: str, value: int, one: Delivery) -> Iterator[_Call]:
    for use in _acks(facts, one):
        yield _transaction(register, value, -value, use.began, use.ended, use.outcome)


def _acks(facts: Facts, one: Delivery) -> list[Use]:
    """The first ack that may have counted, if any: one that is repeated does nothing more."""
    return [use for use in facts.uses[one.token] if use.finishes and use.outcome != FAIL][:1]


def _transaction(
    register: str, read: int | None, written: int, began: int, ended: int, outcome: str
) -> _Call:
    write = [Keyword("w"), register, written]
    asked = [[Keyword("r"), register, None], write]
    result = [[Keyword("r"), register, read], write]
    return _Call("txn", began, ended, outcome, asked, result)
