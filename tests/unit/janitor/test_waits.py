"""How long tasks of Spark's have waited for an executor."""

from __future__ import annotations

from services.janitor.jobs.work import Wait


def test_a_wait_begins_when_the_last_task_at_work_has_ended_and_ends_with_the_next_one() -> None:
    wait = Wait()
    looks = [(True, 10.0), (True, 25.0), (False, 30.0), (False, 50.0), (True, 600.0), (True, 601.0)]

    assert [wait.seconds(*look) for look in looks] == [0, 15, 0, 0, 0, 1]
