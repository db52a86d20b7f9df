"""The judge of the demo of tasks must find what it is there to find."""

import pytest

from examples.demo.tasks.judge import (
    Answer,
    Delivery,
    Outcome,
    TasksVerdict,
    drop_delivery,
    judge_tasks,
)

ANSWERS = (
    Answer("at first", [b"a", b"b"], "task_1", [], 2.0),
    Answer("ingest killed", [b"c"], "task_2", [], 4.0),
)
OUTCOMES = {"task_1": Outcome([1, 2]), "task_2": Outcome([3])}
ARRIVED = [Delivery(b"a", 1), Delivery(b"b", 2), Delivery(b"c", 3)]


def verdict_of(*deliveries: Delivery, **outcomes: Outcome) -> TasksVerdict:
    return judge_tasks(ANSWERS, {**OUTCOMES, **outcomes}, deliveries)


def test_each_event_arrived_once_as_its_task_shows_is_a_perfect_run() -> None:
    verdict = verdict_of(*ARRIVED)

    assert verdict.faults == []
    assert [(row.tasks, row.published, row.answer_ms) for row in verdict.phases] == [
        (1, 2, 2.0),
        (1, 1, 4.0),
    ]
    assert verdict.total("arrived") == verdict.total("applied") == 3


def test_the_same_message_again_is_no_fault() -> None:
    assert verdict_of(*ARRIVED, Delivery(b"a", 1)).faults == []


def test_a_repeated_request_that_was_applied_already_needs_no_task() -> None:
    answer = Answer("at first", [b"a"], "", [7], 2.0)

    assert judge_tasks([answer], {}, [Delivery(b"a", 7)]).faults == []


@pytest.mark.parametrize(
    ("deliveries", "outcomes", "words", "counts"),
    [
        (ARRIVED[1:], {}, "never arrived", (1, 0)),
        ([*ARRIVED, Delivery(b"a", 9)], {}, "stored 2 times", (0, 1)),
        ([*ARRIVED[:2], Delivery(b"c", 8)], {}, "names message 3", (0, 0)),
        ([*ARRIVED, Delivery(b"d", 4)], {}, "had no answer", (0, 0)),
        (ARRIVED, {"task_2": Outcome(problem="pending")}, "not applied: pending", (0, 0)),
    ],
)
def test_whatever_should_not_be_is_found(
    deliveries: list[Delivery], outcomes: dict[str, Outcome], words: str, counts: tuple[int, int]
) -> None:
    verdict = verdict_of(*deliveries, **outcomes)

    (fault,) = verdict.faults
    assert words in fault
    assert (verdict.total("lost"), verdict.total("doubled")) == counts


def test_sabotage_makes_one_event_lost() -> None:
    assert verdict_of(*drop_delivery([*ARRIVED, Delivery(b"b", 2)])).total("lost") == 1
