"""Histories as Jepsen and Elle read them: theirs are the rules that are tried on both files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edn_format
import pytest

from tests.judge.edn import export
from tests.judge.facts import Facts
from tests.judge.histories import read
from tests.unit.test_judge import (
    FAULTLESS,
    Story,
    again_after_ack,
    attempt_twice,
    everything,
    from_nowhere,
    lost,
    push_lost,
    stale_ack_counts,
    stored_twice,
    unanswered_commands,
)


def parsed(file: Path) -> list[dict[str, Any]]:
    operations = []
    for line in file.read_text().splitlines():
        values = edn_format.loads(line)
        operations.append({key.name: value for key, value in values.items()})
    return operations


def ends(operations: list[dict[str, Any]], f: str, kind: str = "ok") -> list[Any]:
    """The values of the operations that ended so, or began (`invoke`)."""
    return [one["value"] for one in operations if (one["f"].name, one["type"].name) == (f, kind)]


def faults_of_total_queue(operations: list[dict[str, Any]]) -> list[str]:
    """What Jepsen's checker of total queues says (jepsen.checker/total-queue), and duplicates."""
    attempts, enqueued, dequeued = (
        Counter(map(tuple, ends(operations, *wanted)))
        for wanted in (("enqueue", "invoke"), ("enqueue",), ("dequeue",))
    )
    unexpected = [one for one in dequeued if one not in attempts]
    duplicated = [one for one in dequeued - attempts if one in attempts]
    lost = enqueued - dequeued
    found = {"unexpected": unexpected, "duplicated": duplicated, "lost": lost}
    return [f"{what} {one}" for what, each in found.items() for one in each]


def faults_of_registers(operations: list[dict[str, Any]]) -> list[str]:
    """What Elle needs of a history of registers, and two of the anomalies that it looks for."""
    transactions = [
        [(word.name, register, value) for word, register, value in one]
        for one in ends(operations, "txn")
    ]
    asked = [write for one in ends(operations, "txn", "invoke") for write in one[-1:]]
    writes = Counter((register, value) for _, register, value in asked)
    found = [f"written twice: {one}" for one, count in writes.items() if count > 1]
    reads = Counter(
        (register, value)
        for (word, register, value), *others in transactions
        if word == "r" and others
    )
    found += [f"lost update: {one}" for one, count in reads.items() if count > 1]
    unwritten = {one for one in reads if one[1] is not None} - writes.keys()
    return [*found, *(f"read and never written: {one}" for one in unwritten)]


def exported(story: Story, folder: Path) -> tuple[list[str], list[str]]:
    """The faults of both exports of a story."""
    assert isinstance(story.faults(folder), set)
    export(Facts(read([folder / "history.jsonl"])), folder)
    return (
        faults_of_total_queue(parsed(folder / "total-queue.edn")),
        faults_of_registers(parsed(folder / "elle.edn")),
    )


@pytest.mark.parametrize("happened", FAULTLESS)
def test_jepsen_and_elle_find_nothing_in_a_history_without_faults(
    happened: Callable[[Story], None], tmp_path: Path
) -> None:
    story = Story()
    happened(story)

    assert exported(story, tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (lost, "lost ('red', 'm1')"),
        (push_lost, "lost ('made', 'p')"),
        (from_nowhere, "unexpected ('red', 'ghost')"),
        (stored_twice, "duplicated ('red', 'm1')"),
    ],
)
def test_jepsen_finds_what_is_wrong_with_a_queue(
    fault: Callable[[Story], None], found: str, tmp_path: Path
) -> None:
    story = Story()
    fault(story)
    story.drained()

    assert found in exported(story, tmp_path)[0]


@pytest.mark.parametrize(
    ("fault", "read_twice"),
    [
        (attempt_twice, "('red/1', None)"),
        (again_after_ack, "('red/1', 1000)"),
        (stale_ack_counts, "('red/1', 1000)"),
    ],
)
def test_elle_finds_a_claim_that_another_one_did_not_know_of(
    fault: Callable[[Story], None], read_twice: str, tmp_path: Path
) -> None:
    story = Story()
    fault(story)
    story.drained()

    assert exported(story, tmp_path)[1] == [f"lost update: {read_twice}"]


def test_a_dead_letter_whose_ack_has_no_answer_is_exported_as_dequeued_once(tmp_path: Path) -> None:
    story = Story()
    unanswered_commands(story)
    assert story.faults(tmp_path) == set()

    export(Facts(read([tmp_path / "history.jsonl"])), tmp_path)

    ends = [one for one in parsed(tmp_path / "total-queue.edn") if one["type"].name == "ok"]
    values = [tuple(one["value"]) for one in ends if one["f"].name == "dequeue"]
    assert values.count(("jobs", "j4")) == 1


def test_an_export_is_a_history_as_jepsen_reads_it(tmp_path: Path) -> None:
    story = Story()
    everything(story)
    assert story.faults(tmp_path) == set()

    export(Facts(read([tmp_path / "history.jsonl"])), tmp_path)

    for name in ("total-queue.edn", "elle.edn"):
        operations = parsed(tmp_path / name)
        assert [one["index"] for one in operations] == list(range(len(operations)))
        open_: set[int] = set()
        for one in operations:
            assert one["type"].name in ("invoke", "ok", "fail", "info")
            if one["type"].name == "invoke":
                assert one["process"] not in open_
                open_.add(one["process"])
            else:
                open_.remove(one["process"])
    queue = parsed(tmp_path / "total-queue.edn")
    enqueued, dequeued = (
        [tuple(o["value"]) for o in queue if (o["f"].name, o["type"].name) == (f, "ok")]
        for f in ("enqueue", "dequeue")
    )
    # What a total queue is: all that was put in came out, once.
    assert sorted(enqueued) == sorted(dequeued)
    assert ("red", "m4") in dequeued
    registers = [o for o in parsed(tmp_path / "elle.edn") if o["type"].name == "ok"]
    values = [
        [(word.name, register, value) for word, register, value in one["value"]]
        for one in registers
    ]
    assert [("r", "red/1", None), ("w", "red/1", 1000)] in values
    assert [("r", "red/1", 1000), ("w", "red/1", -1000)] in values
    assert [("r", "red/4", 3000), ("w", "red/4", 1_001_000)] in values
    # Released, and claimed as the same attempt again.
    assert [("r", "red/5", 1000), ("w", "red/5", 1001)] in values
