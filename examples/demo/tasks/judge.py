"""The judge of tasks: what was answered and not stored, or stored twice.

It knows which events were answered, what was said of their tasks, and under which message IDs the
consumer got them. Each event must arrive, under one ID only, the one that its task names. The same
message may arrive again: delivery is at least once. Another ID means that it was stored again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Answer:
    """An answered publish.

    `message_ids` are known at once where the request was a repeated one that had been applied
    already: then it is no task.
    """

    phase: str
    payloads: Sequence[bytes]
    task_id: str
    message_ids: Sequence[int]
    milliseconds: float


@dataclass(frozen=True)
class Delivery:
    """A consumer's note about one delivery."""

    payload: bytes
    message_id: int


@dataclass(frozen=True)
class Outcome:
    """What became of a task: its messages if it was applied, else why not."""

    message_ids: Sequence[int] = ()
    problem: str = ""


@dataclass
class PhaseVerdict:
    """The judgement of what was published in one phase. Counts are of messages, but `tasks`."""

    phase: str
    tasks: int = 0
    published: int = 0
    applied: int = 0
    arrived: int = 0
    lost: int = 0
    doubled: int = 0
    answer_ms: float = 0.0


@dataclass
class TasksVerdict:
    """The judgement of a run; `faults` says everything that should not be."""

    phases: list[PhaseVerdict]
    faults: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A count over all phases."""
        return sum(int(getattr(phase, name)) for phase in self.phases)


def judge_tasks(
    answers: Sequence[Answer], outcomes: Mapping[str, Outcome], deliveries: Iterable[Delivery]
) -> TasksVerdict:
    """Hold the consumer's notes against what was answered."""
    arrived: dict[bytes, set[int]] = {}
    for delivery in deliveries:
        arrived.setdefault(delivery.payload, set()).add(delivery.message_id)
    by_phase: dict[str, list[Answer]] = {}
    for answer in answers:
        by_phase.setdefault(answer.phase, []).append(answer)
    verdict = TasksVerdict([])
    for phase, given in by_phase.items():
        row = PhaseVerdict(phase, answer_ms=median(answer.milliseconds for answer in given))
        verdict.phases.append(row)
        for answer in given:
            outcome = outcomes.get(answer.task_id, Outcome(problem="nothing is known of it"))
            _judge_answer(answer, outcome, arrived, row, verdict.faults)
    known = {payload for answer in answers for payload in answer.payloads}
    verdict.faults += [
        f"arrived, though its publish had no answer: {_short(payload)}"
        for payload in arrived.keys() - known
    ]
    return verdict


def _judge_answer(
    answer: Answer,
    outcome: Outcome,
    arrived: Mapping[bytes, set[int]],
    row: PhaseVerdict,
    faults: list[str],
) -> None:
    message_ids = outcome.message_ids if answer.task_id else answer.message_ids
    row.tasks += bool(answer.task_id)
    row.published += len(answer.payloads)
    row.applied += len(message_ids)
    if len(message_ids) != len(answer.payloads):
        faults.append(f"{answer.task_id} was not applied: {outcome.problem or 'too few messages'}")
    for place, payload in enumerate(answer.payloads):
        ids = arrived.get(payload, set())
        row.arrived += bool(ids)
        row.lost += not ids
        row.doubled += len(ids) > 1
        if not ids:
            faults.append(f"answered, but it never arrived: {_short(payload)}")
        elif len(ids) > 1:
            faults.append(f"stored {len(ids)} times, as {sorted(ids)}: {_short(payload)}")
        elif place < len(message_ids) and ids != {message_ids[place]}:
            faults.append(
                f"{answer.task_id} names message {message_ids[place]}, but it arrived as {min(ids)}"
            )


def drop_delivery(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """The notes without one message, as if it had never arrived: sabotage."""
    gone = deliveries[len(deliveries) // 2].payload
    return [delivery for delivery in deliveries if delivery.payload != gone]


def _short(payload: bytes) -> str:
    text = payload.decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}..."
