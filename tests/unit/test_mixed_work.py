"""What clients of mixed work wait for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.faults.mixed_work import EDITED, FRAGILE, SHIPPED, Work

HEADERS = {"kind": "plain", "class": "0", "parity": "even"}


@pytest.fixture
def work() -> Work:
    return Work(cast("Any", None), 1)


def test_a_message_is_missing_from_all_queues_that_take_it_until_they_have_finished_it(
    work: Work,
) -> None:
    work.note_answered("m1", HEADERS)
    assert work.missing() == 3

    for queue in ("all", "even", "third"):
        work.note_finished(queue, "m1")

    assert work.missing() == 0
    assert (work.answered_count, work.finished_count) == (1, 3)


def test_what_is_finished_before_its_answer_is_not_missing(work: Work) -> None:
    for queue in ("third", "all", "even"):
        work.note_finished(queue, "m1")

    work.note_answered("m1", HEADERS)

    assert work.missing() == 0


def test_a_push_is_missing_until_it_is_finished(work: Work) -> None:
    work.note_pushed(SHIPPED, "m1/a")
    assert work.missing() == 1

    work.note_finished(SHIPPED, "m1/a")

    assert work.missing() == 0


def test_what_comes_of_commands_of_unknown_outcome_finishes_their_order(work: Work) -> None:
    work.note_answered("m1", {"kind": "order", "class": "1", "parity": "odd"})
    work.note_finished("all", "m1")
    work.note_unsure("m1", "m1/a")
    assert work.missing() == 1

    work.note_finished(SHIPPED, "m1/a")

    assert work.missing() == 0


def test_what_is_finished_takes_no_room(work: Work) -> None:
    for number in range(100):
        work.note_answered(f"m{number}", {"kind": "fragile", "class": "1", "parity": "odd"})
        for queue in ("all", FRAGILE, EDITED):
            work.note_finished(queue, f"m{number}")

    assert work.kept_count() == 0
