"""The same history for Jepsen: `total-queue.edn` for its checker of queues, `elle.edn` for Elle.

Each line is one operation, as Jepsen writes `history.edn`. Every operation is a process of its own,
since Jepsen permits a process one at a time, and a batch is many of them.

Total queue: a message that is for a queue is one `:enqueue` of `["queue" "key"]`, and its ack one
`:dequeue`. A dead letter that is left is dequeued by the drain. An ack of unknown outcome counts as
ok where the message did not come again.

Elle (`elle.rw-register`): the register `"queue/ID"` holds how often a message was claimed: a claim
reads n-1 and writes n, and an ack reads n and writes -1. Attempts after a redrive continue at a
million for each. A claim that no consumer saw is an `:info` write. Two leases at a time are a
duplicate write, and an ack of an ended lease is a cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.judge.facts import Delivery, Facts, Use
from tests.judge.histories import FAIL, INFO, NEVER, OK
from tests.judge.rules import MAYBE, YES, Judge

GENERATION: Final = 1_000_000
DONE: Final = -1


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
    for queue in facts.queues.values():
        for key, each in facts.sent.items():
            for sent in each:
                if judge.belongs(queue, sent) in (YES, MAYBE):
                    value = [queue.name, key]
                    ended, outcome = sent.ended, sent.outcome
                    yield _Call("enqueue", sent.began, ended, outcome, value, value)
        keys = {one: key for key, ids in facts.ids.items() for one in ids}
        for dead in sorted(queue.dead):
            value = [queue.name, keys.get(dead, str(dead))]
            yield _Call("dequeue", queue.drained_at, queue.drained_at, OK, None, value)
    for (name, message_id), each_delivery in facts.deliveries.items():
        is_dead = message_id in facts.queue(name).dead  # The drain dequeues it.
        for place, one in enumerate(each_delivery):
            is_last = place == len(each_delivery) - 1 and not is_dead
            for use in facts.uses[one.token]:
                if use.finishes:
                    yield _dequeue(one, use, is_last=is_last)


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
            for one in generation:
                value = number * GENERATION + one.attempt
                for unseen in range(number * GENERATION + 1, value) if one.attempt > 1 else ():
                    if last is None or unseen > last:
                        writes = [[Keyword("w"), register, unseen]]
                        yield _Call("txn", one.began, NEVER, INFO, writes, writes)
                        last = unseen
                yield _transaction(register, last, value, one.began, one.ended, OK)
                last = value
                yield from _finished(facts, register, value, one)


def _finished(facts: Facts, register: str, value: int, one: Delivery) -> Iterator[_Call]:
    for use in facts.uses[one.token]:
        if use.finishes:
            yield _transaction(register, value, DONE, use.began, use.ended, use.outcome)


def _transaction(
    register: str, read: int | None, written: int, began: int, ended: int, outcome: str
) -> _Call:
    write = [Keyword("w"), register, written]
    asked = [[Keyword("r"), register, None], write]
    result = asked if outcome == FAIL else [[Keyword("r"), register, read], write]
    return _Call("txn", began, ended, outcome, asked, result)
