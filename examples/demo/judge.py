"""The judge: what was lost, routed wrongly, or delivered again without a reason.

It knows the JSONL, the filters as Python, and what the consumers wrote down; nothing that SlateMQ
says of itself. One pair of queue and line is an entry. Each must end in exactly one of two ways:

- acked once: then it is never delivered again;
- poison, so never acked: given up after the last attempt.

Every delivery of an entry carries the number of its attempt. The same number twice means that it
was routed or handed out twice; a delivery after an ack means that the ack was lost.
"""

from __future__ import annotations

import enum
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from examples.demo.queues import MAX_ATTEMPTS, DemoQueue, is_poison


class Outcome(enum.Enum):
    """What a consumer did with a delivery."""

    ACKED = "acked"
    """Acked, and the ack was answered."""

    FAILED = "failed"
    """Nacked, or left with an exception."""

    FORGOTTEN = "forgotten"
    """Neither: its lease runs out."""

    UNKNOWN = "unknown"
    """Acked without an answer: it may have happened."""


@dataclass(frozen=True)
class Delivery:
    """A consumer's note about one delivery."""

    queue_id: str
    payload: bytes
    attempt: int
    outcome: Outcome


@dataclass
class QueueVerdict:
    """The judgement of one queue. Counts are of entries, `redelivered` of deliveries."""

    queue_id: str
    routed: int = 0
    acked: int = 0
    failed: int = 0
    redelivered: int = 0
    lost: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The judgement of a run."""

    published: int
    queues: Sequence[QueueVerdict]

    @property
    def lost(self) -> int:
        """Entries that ended in neither way."""
        return sum(queue.lost for queue in self.queues)

    @property
    def faults(self) -> list[str]:
        """Everything that should not be, one sentence each."""
        return [fault for queue in self.queues for fault in queue.faults]


def judge(
    lines: Sequence[bytes], queues: Sequence[DemoQueue], deliveries: Iterable[Delivery]
) -> Verdict:
    """Hold the consumers' notes against what was published, line by line."""
    by_queue: dict[str, dict[bytes, list[Delivery]]] = {queue.queue_id: {} for queue in queues}
    for delivery in deliveries:
        entries = by_queue.setdefault(delivery.queue_id, {})
        entries.setdefault(delivery.payload, []).append(delivery)
    events = [(line, json.loads(line)) for line in lines]
    verdicts = []
    for queue in queues:
        expected = {line: is_poison(event) for line, event in events if queue.matches(event)}
        verdicts.append(_judge_queue(queue.queue_id, expected, by_queue[queue.queue_id]))
    return Verdict(len(lines), verdicts)


def _judge_queue(
    queue_id: str, expected: dict[bytes, bool], received: dict[bytes, list[Delivery]]
) -> QueueVerdict:
    verdict = QueueVerdict(queue_id, routed=len(received))
    for payload, notes in received.items():
        if payload not in expected:
            verdict.faults.append(f"{queue_id} got what its filter refuses: {_short(payload)}")
        verdict.redelivered += len(notes) - 1
        verdict.faults += [f"{queue_id}: {fault}" for fault in _faults_of_entry(payload, notes)]
    for payload, poison in expected.items():
        notes = received.get(payload, [])
        if any(note.outcome is Outcome.ACKED for note in notes):
            verdict.acked += 1
        elif poison and notes:
            verdict.failed += 1
        else:
            verdict.lost += 1
            what = "was never acked" if notes else "never arrived"
            verdict.faults.append(f"{queue_id} lost an entry, it {what}: {_short(payload)}")
    return verdict


def _faults_of_entry(payload: bytes, notes: Sequence[Delivery]) -> list[str]:
    faults = []
    attempts: dict[int, int] = defaultdict(int)
    for note in notes:
        attempts[note.attempt] += 1
    ordered = sorted(notes, key=lambda note: note.attempt)
    for attempt, times in attempts.items():
        if times > 1:
            faults.append(f"attempt {attempt} was delivered {times} times: {_short(payload)}")
        if not 1 <= attempt <= MAX_ATTEMPTS:
            faults.append(f"attempt {attempt} of {MAX_ATTEMPTS}: {_short(payload)}")
    if any(note.outcome is Outcome.ACKED for note in ordered[:-1]):
        faults.append(f"delivered again after its ack was answered: {_short(payload)}")
    return faults


def compare_dead_letters(verdict: Verdict, listed: Mapping[str, int]) -> None:
    """Add a fault where a queue lists more or fewer dead letters than entries have failed."""
    for queue in verdict.queues:
        count = listed[queue.queue_id]
        if count != queue.failed:
            queue.faults.append(
                f"{queue.queue_id} lists {count} dead letters, {queue.failed} entries have failed"
            )


def drop_one(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """The notes without one entry's ack, as if that delivery had never been: sabotage."""
    place = next(i for i, note in enumerate(deliveries) if note.outcome is Outcome.ACKED)
    return [*deliveries[:place], *deliveries[place + 1 :]]


def _short(payload: bytes) -> str:
    text = payload.decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}..."
