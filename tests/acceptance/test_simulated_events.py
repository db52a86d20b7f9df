"""The backend of event queues in simulated worlds, and the judge of what it gets."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from libs.events.tasks import WriteTask
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from slatemq.events.catalogue import (
    EventData,
    MessagePublished,
    QueueDeleted,
    QueuePurged,
    QueueUpdated,
)
from slatemq.events.envelope import Event
from tests.simulation.event_judge import EventJudge
from tests.simulation.event_server import EventServer, SimulatedBackend
from tests.simulation.judge import Judge, Violated
from tests.simulation.loop import Machine, WorldLoop


def event(number: int, data: EventData, source: str = "ingest-0") -> Event:
    return Event(
        id=f"evt_{number:026d}",
        type=data.event_type,
        timestamp="2026-02-22T12:00:00.000Z",
        source=source,
        request_id="",
        data=msgspec.to_builtins(data),
    )


def of_message(message_id: int, size: int = 3, **headers: str) -> MessagePublished:
    return MessagePublished(message_id=message_id, headers=headers, size=size)


def updated(revision: int) -> QueueUpdated:
    return QueueUpdated(queue="red", filter="", priority="", max_attempts=1, revision=revision)


def judges(*, keeps: bool = True) -> tuple[Judge, EventJudge]:
    """Of a world in which the message 7 was published."""
    judge = Judge()
    judge.publishing(b"key", {"color": "red"}, visible_at_ms=0, now_ms=0)
    judge.published(b"key", 7)
    return judge, EventJudge(judge, keeps=keeps)


def test_an_event_that_comes_again_as_it_was_is_no_violation() -> None:
    _, events = judges()
    assert events.missing() == ["no event of b'key', the message {7}"]
    for _ in range(2):
        events.landed(event(1, of_message(7, color="red")))
    assert events.missing() == []
    assert events.repeated == 1


def test_an_event_that_comes_again_has_what_an_edit_made_of_its_message_meanwhile() -> None:
    judge, events = judges()
    events.landed(event(1, of_message(7, color="red")))
    with pytest.raises(Violated, match="comes again as another"):
        events.landed(event(1, of_message(7, size=10, color="red")))
    judge.editing(b"key", 7, b"#edit 1")
    events.landed(event(1, of_message(7, size=10, color="red")))
    with pytest.raises(Violated, match="comes again as another"):
        events.landed(event(1, of_message(7, size=10, color="blue")))


def test_an_event_that_comes_again_as_another_is_a_violation() -> None:
    _, events = judges()
    events.landed(event(1, of_message(7, color="red")))
    with pytest.raises(Violated, match="comes again as another"):
        events.landed(event(1, of_message(7, color="blue")))


def test_a_message_has_one_event() -> None:
    _, events = judges()
    events.landed(event(1, of_message(7, color="red")))
    with pytest.raises(Violated, match="the message 7 has two events"):
        events.landed(event(2, of_message(7, color="red")))


def test_events_of_one_process_keep_their_order_those_of_two_have_none() -> None:
    _, events = judges()
    events.landed(event(1, of_message(7, color="red")))
    events.landed(event(2, of_message(5), source="ingest-1"))
    with pytest.raises(Violated, match="the event of 6 comes after that of 7 of ingest-0"):
        events.landed(event(3, of_message(6)))
    events.landed(event(4, updated(2)))
    with pytest.raises(Violated, match="revision 2 of red comes after revision 2"):
        events.landed(event(5, updated(2)))


def test_an_owner_that_stood_still_is_late_in_fire_and_forget() -> None:
    _, events = judges(keeps=False)
    events.landed(event(1, of_message(7, color="red")))
    events.landed(event(2, of_message(6)))
    assert events.landed_up_to(0) == 7


def test_an_event_must_say_what_was_published() -> None:
    _, events = judges()
    events.landed(event(1, of_message(7, color="blue")))
    with pytest.raises(Violated, match="it was published as"):
        events.missing()


def test_each_change_of_a_queue_has_its_event_and_no_more() -> None:
    judge, events = judges()
    events.landed(event(1, of_message(7, color="red")))
    with judge.change("queue.deleted", "red"):
        assert events.missing() == [], "it was not answered yet"
    assert events.missing() == ["0 events queue.deleted of red, and 1 were answered"]
    events.landed(event(2, QueueDeleted(queue="red")))
    assert events.missing() == []
    events.landed(event(3, QueueDeleted(queue="red")))
    with pytest.raises(Violated, match=r"2 events queue\.deleted of red, and 1 were"):
        events.missing()


def test_a_purge_has_an_event_where_it_removed_something() -> None:
    judge, events = judges()
    purged = QueuePurged(queue="red", states=["available", "delayed"], messages=1)
    events.landed(event(1, of_message(7, color="red")))
    judge.may_change("queue.purged", "red", is_once=False)
    assert events.missing() == [], "it removed nothing, or was not answered yet"
    judge.has_changed("queue.purged", "red")
    assert events.missing() == ["0 events queue.purged of red, and 1 were answered"]
    for number in (2, 3):  # the answer of one was lost
        events.landed(event(number, purged))
        assert events.missing() == []


def test_a_dead_letter_that_was_dropped_has_an_event() -> None:
    judge, events = judges()
    events.landed(event(1, of_message(7, color="red")))
    judge.dropping("red", b"key")
    judge.dropped("red", b"key", 7)
    assert events.missing() == ["no event ('message.dead_lettered', 'red', 7)"]


def test_what_may_be_forgotten_must_not_come_twice() -> None:
    _, events = judges(keeps=False)
    assert events.missing() == []
    events.landed(event(1, of_message(7, color="red")))
    with pytest.raises(Violated, match="comes twice in fire-and-forget"):
        events.landed(event(1, of_message(7, color="red")))


# --- The backend ------------------------------------------------------------


class _Section:
    stream_prefix = "slatemq.ingest-0"


def run(scenario: Any) -> None:
    """Run a scenario, given a server and its loop, on a machine of a world."""
    loop = WorldLoop("1")
    server = EventServer(loop, "1", EventJudge(Judge(), keeps=True))
    server.faults.again = 0.0
    try:
        loop.run_until_complete(Machine(loop, "ingest-0").run(scenario(server, loop)))
    finally:
        loop.close()


def task() -> WriteTask:
    return WriteTask(
        task_id=TaskIds(0).make(1), operation="Publish", created_at="2026-02-22T12:00:00.000Z",
        max_retries=1, payload={},
    )  # fmt: skip


async def connected(server: EventServer) -> SimulatedBackend:
    backend = SimulatedBackend(server, is_sole_consumer=True)
    await backend.connect(_Section())
    return backend


def test_a_task_that_is_not_finished_comes_to_the_next_owner() -> None:
    async def scenario(server: EventServer, loop: WorldLoop) -> None:
        machine = Machine(loop, "ingest-0.1")
        first = await machine.run(connected(server))
        wanted = task()
        await first.enqueue_task(wanted)
        assert await first.dequeue_task() == wanted
        machine.crash()
        second = await connected(server)
        assert await second.dequeue_task() == wanted
        await second.complete_task(wanted.task_id)
        assert await second.dequeue_task() is None

    run(scenario)


def test_a_task_whose_answer_was_lost_comes_with_the_next_question() -> None:
    async def scenario(server: EventServer, loop: WorldLoop) -> None:
        backend = await connected(server)
        wanted = task()
        await backend.enqueue_task(wanted)
        server.faults.lost_answers = 1.0
        with pytest.raises(Unavailable):
            await backend.dequeue_task()
        server.faults.lost_answers = 0.0
        assert await backend.dequeue_task() == wanted

    run(scenario)


def test_a_task_that_fails_comes_again_and_then_is_a_dead_letter() -> None:
    async def scenario(server: EventServer, loop: WorldLoop) -> None:
        backend = await connected(server)
        await backend.enqueue_task(task())
        for attempts in (0, 1):
            found = await backend.dequeue_task()
            while found is None:
                found = await backend.dequeue_task()
            assert found.attempts == attempts
            await backend.fail_task(found.task_id, "of the test")
        [dead] = await backend.failed_tasks(10)
        assert dead.error == "of the test"
        assert await backend.retry_failed_tasks() == 1
        await asyncio.sleep(0.1)
        again = await backend.dequeue_task()
        assert again is not None
        assert again.attempts == 0

    run(scenario)


def test_finished_tasks_may_come_again() -> None:
    async def scenario(server: EventServer, loop: WorldLoop) -> None:
        server.faults.again = 1.0
        backend = await connected(server)
        wanted = task()
        await backend.enqueue_task(wanted)
        for _ in range(2):
            assert await backend.dequeue_task() == wanted
            await backend.complete_task(wanted.task_id)

    run(scenario)
