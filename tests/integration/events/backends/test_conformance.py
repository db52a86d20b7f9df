"""What every backend must do, tried against its real server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from libs.events.backend import BackendStats, QueueBackend
from libs.events.backends import open_backend
from libs.events.tasks import ERROR_BYTES_MAX, MOVED_MAX, FailedTask, UnreadableTask, WriteTask
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable
from slatemq.events.catalogue import ObjectCreated, ObjectDeleted, QueueCreated, make_event
from slatemq.events.envelope import Event, format_timestamp
from tests.integration.events.backends.raw_tasks import enqueue_raw
from tests.integration.events.conftest import EVENTUALLY_S, Rig, eventually, next_task

pytestmark = pytest.mark.slow  # Real servers, whose redeliveries take their delays.


def created(key: str, bucket: str = "photos") -> Event:
    data = ObjectCreated(bucket=bucket, key=key, size=1, etag='"e"', content_type="text/plain")
    return make_event(data, source="ingest-0", request_id="R1", at_ms=1_771_761_600_000)


def deleted(key: str) -> Event:
    data = ObjectDeleted(bucket="photos", key=key)
    return make_event(data, source="ingest-0", request_id="R2", at_ms=1_771_761_600_001)


def a_task(**changes: Any) -> WriteTask:
    task = WriteTask(
        task_id=TaskIds(0).make(1_771_761_600_000),
        operation="Publish",
        created_at=format_timestamp(1_771_761_600_000),
        max_retries=2,
        payload={"n": 1, "text": "ü😀"},
    )
    return msgspec.structs.replace(task, **changes)


class Subscriber:
    """Writes down what it gets; acknowledges unless it is to refuse."""

    def __init__(self, backend: QueueBackend, refuse: int = 0) -> None:
        self.backend = backend
        self.got: list[Event] = []
        self.acknowledged: list[str] = []
        self.refused: Counter[str] = Counter()
        self._refuse = refuse

    async def __call__(self, event: Event) -> None:
        if self.refused[event.id] < self._refuse:
            self.refused[event.id] += 1
            raise RuntimeError(f"refused {event.id}")
        self.got.append(event)
        await self.backend.acknowledge(event.id)
        self.acknowledged.append(event.id)


# --- Events -------------------------------------------------------------------------------------


async def test_events_come_whole_and_in_order(rig: Rig) -> None:
    # Given a subscriber of everything
    publisher, consumer = await rig.backend(), await rig.backend()
    subscriber = Subscriber(consumer)
    await consumer.subscribe([], subscriber)

    # When events of one bucket are published singly and in batches
    events = [created(f"größe {n} 😀") for n in range(25)]
    await publisher.publish(events[0])
    await publisher.publish_batch(events[1:])
    await publisher.publish_batch([])

    # Then they come as they were, in order
    await eventually(lambda: len(subscriber.got) >= len(events))
    assert subscriber.got == events


async def test_a_subscriber_gets_the_types_that_it_asked_for(rig: Rig) -> None:
    types = ["object.deleted", "queue.created"]
    publisher, consumer = await rig.backend(), await rig.backend(types=types)
    subscriber = Subscriber(consumer)
    await consumer.subscribe(types, subscriber)
    queue = make_event(
        QueueCreated(queue="orders", filter="true", priority="", max_attempts=5, revision=1),
        source="broker-0",
        request_id="",
        at_ms=1_771_761_600_002,
    )
    await publisher.publish_batch([created("a"), deleted("b"), queue, created("c"), deleted("d")])
    await eventually(lambda: len(subscriber.got) >= 3)
    assert {event.type for event in subscriber.got} == {"object.deleted", "queue.created"}
    assert sorted(event.id for event in subscriber.got if event.type == "object.deleted")
    assert len(subscriber.got) == 3


async def test_an_event_that_its_handler_refuses_comes_again_with_the_same_id(rig: Rig) -> None:
    publisher, consumer = await rig.backend(), await rig.backend()
    subscriber = Subscriber(consumer, refuse=2)
    await consumer.subscribe([], subscriber)
    event = created("once more")
    await publisher.publish(event)
    await eventually(lambda: subscriber.got)
    assert subscriber.got == [event]
    assert subscriber.refused[event.id] == 2


async def test_an_event_that_is_always_refused_becomes_a_dead_letter(rig: Rig) -> None:
    # Given a subscriber that refuses one event for ever
    publisher, consumer = await rig.backend(), await rig.backend()
    poison, good = created("poison"), created("good")
    got: list[str] = []

    async def handler(event: Event) -> None:
        if event.id == poison.id:
            raise RuntimeError("poison")
        got.append(event.id)
        await consumer.acknowledge(event.id)

    await consumer.subscribe([], handler)
    await publisher.publish_batch([poison, good])

    # Then it ends among the dead letters, and what is behind it is delivered
    await eventually(lambda: got)
    await eventually_stats(publisher, lambda stats: stats.dead_letter_count == 1)
    assert got == [good.id]


async def test_an_unacknowledged_event_comes_to_another_consumer_of_the_group(rig: Rig) -> None:
    # Given a consumer that gets an event and leaves without acknowledging it
    publisher, first = await rig.backend(), await rig.backend()
    seen: list[str] = []

    async def handler(event: Event) -> None:
        seen.append(event.id)
        await asyncio.Event().wait()

    await first.subscribe([], handler)
    event = created("left behind")
    await publisher.publish(event)
    await eventually(lambda: seen)
    await first.close()

    # When another consumer of the group comes, then it gets the event
    second = await rig.backend()
    subscriber = Subscriber(second)
    await second.subscribe([], subscriber)
    await eventually(lambda: subscriber.got)
    assert subscriber.got == [event]


async def test_an_acknowledged_event_does_not_come_again(rig: Rig) -> None:
    publisher, first = await rig.backend(), await rig.backend()
    subscriber = Subscriber(first)
    await first.subscribe([], subscriber)
    done, fresh = created("done"), created("fresh")
    await publisher.publish(done)
    await eventually(lambda: subscriber.acknowledged)
    await first.acknowledge(done.id)  # again: does nothing
    await first.close()

    second = await rig.backend()
    later = Subscriber(second)
    await second.subscribe([], later)
    await publisher.publish(fresh)
    await eventually(lambda: fresh in later.got)
    assert later.got == [fresh]


async def test_consumers_of_one_group_share_and_another_group_gets_all(rig: Rig) -> None:
    # Given two consumers in one group, and one in another
    publisher = await rig.backend()
    sharing = [Subscriber(await rig.backend()) for _ in range(2)]
    alone = Subscriber(await rig.backend(group="audit"))
    for subscriber in (*sharing, alone):
        await subscriber.backend.subscribe([], subscriber)

    # When events of several buckets are published
    events = [created(f"{n}", bucket=f"bucket-{n % 7}") for n in range(60)]
    for event in events:
        await publisher.publish(event)

    # Then the group gets each of them, and so does the other
    wanted = {event.id for event in events}
    await eventually(lambda: {e.id for s in sharing for e in s.got} == wanted)
    await eventually(lambda: {event.id for event in alone.got} == wanted)
    assert len(alone.got) == len(events)


async def test_subscribers_of_one_group_with_other_types_take_nothing_from_each_other(
    rig: Rig,
) -> None:
    # Given subscribers of one group: two of one type, and others of another one, of both, of all
    publisher = await rig.backend()
    both = ["object.created", "object.deleted"]
    subscribers: list[Subscriber] = []
    for types in (both[:1], both[:1], both[1:], both, [*reversed(both)], []):
        subscribers.append(Subscriber(await rig.backend(types=types)))
        await subscribers[-1].backend.subscribe(types, subscribers[-1])

    # When events of both types are published
    events = [make(f"{n}") for n in range(10) for make in (created, deleted)]
    await publisher.publish_batch(events)

    # Then those with the same types share them, and each set of types has got all of its own
    first, second, other, one_of_both, another_of_both, of_all = (one.got for one in subscribers)
    wanted = {event.id: event.type for event in events}

    def have_all() -> bool:
        return [
            {event.id for event in got} == {one for one, kind in wanted.items() if kind in types}
            for got, types in (
                ([*first, *second], both[:1]),
                (other, both[1:]),
                ([*one_of_both, *another_of_both], both),
                (of_all, both),
            )
        ] == [True] * 4

    await eventually(have_all)


# --- Tasks --------------------------------------------------------------------------------------


async def test_a_task_is_dequeued_as_it_was_and_gone_once_complete(rig: Rig) -> None:
    # Given a task
    producer, consumer = await rig.backend(), await rig.backend()
    task = a_task()
    assert await producer.enqueue_task(task) == task.task_id
    await eventually_stats(producer, lambda stats: stats == BackendStats(1, 0))

    # When it is dequeued and completed
    assert await next_task(consumer) == task
    await consumer.complete_task(task.task_id)
    await consumer.complete_task(task.task_id)  # again: does nothing

    # Then nothing is left
    await eventually_stats(producer, lambda stats: stats == BackendStats(0, 0))
    assert await consumer.dequeue_task() is None


async def test_tasks_are_shared_by_consumers_and_none_gets_one_that_another_has(rig: Rig) -> None:
    # Given two consumers, whose group has formed
    producer, *consumers = [await rig.backend() for _ in range(3)]
    assert await asyncio.gather(*(one.dequeue_task() for one in consumers)) == [None, None]
    tasks = [a_task(task_id=TaskIds(0).make(n)) for n in range(40)]
    for task in tasks:
        await producer.enqueue_task(task)
    taken: list[list[str]] = [[], []]
    both_have_one = asyncio.Barrier(2)

    async def consume(backend: QueueBackend, own: list[str]) -> None:
        while len({one for some in taken for one in some}) < len(tasks):
            task = await backend.dequeue_task()
            if task is not None:
                own.append(task.task_id)
                if len(own) == 1:
                    await both_have_one.wait()
                await backend.complete_task(task.task_id)

    async with asyncio.timeout(60):
        await asyncio.gather(*map(consume, consumers, taken))

    # Then each has got some, and none both
    assert sorted([*taken[0], *taken[1]]) == sorted(task.task_id for task in tasks)


async def test_a_task_of_a_consumer_that_left_comes_to_another(rig: Rig) -> None:
    producer, first, second = [await rig.backend() for _ in range(3)]
    task = a_task()
    await producer.enqueue_task(task)
    assert await next_task(first) == task
    await first.close()
    assert await next_task(second) == task


async def test_a_failed_task_comes_again_with_its_attempts_counted(rig: Rig) -> None:
    producer, consumer = await rig.backend(), await rig.backend()
    await producer.enqueue_task(a_task())
    for attempts in range(3):
        task = await next_task(consumer)
        assert task.attempts == attempts
        if attempts < 2:
            await consumer.fail_task(task.task_id, "no room")
    await consumer.complete_task(task.task_id)
    await eventually_stats(producer, lambda stats: stats == BackendStats(0, 0))


async def test_a_task_without_retries_left_is_a_dead_letter_until_it_is_retried(rig: Rig) -> None:
    # Given a task that fails more often than it is retried, and one that waits
    producer, consumer = await rig.backend(), await rig.backend()
    poison = a_task(max_retries=1)
    await producer.enqueue_task(poison)
    for _ in range(2):
        task = await next_task(consumer)
        await consumer.fail_task(task.task_id, f"attempt {task.attempts}: bad filter")

    # Then it is a dead letter with its last error
    await eventually_stats(producer, lambda stats: stats == BackendStats(0, 1))
    failed = await producer.failed_tasks(10)
    (one,) = failed
    assert isinstance(one, FailedTask)
    assert (one.task.task_id, one.error) == (poison.task_id, "attempt 1: bad filter")
    assert one.task.attempts == 2
    assert not one.task.payload

    # When failed tasks are retried, then it comes as if new, once
    assert await producer.retry_failed_tasks() == 1
    assert await producer.retry_failed_tasks() == 0
    assert await next_task(consumer) == poison
    await consumer.complete_task(poison.task_id)
    await eventually_stats(producer, lambda stats: stats == BackendStats(0, 0))
    assert await producer.failed_tasks(10) == []


async def test_prefixes_share_no_tasks_and_no_dead_letters(rig: Rig) -> None:
    # Given two instances on one server, whose settings differ in the prefix alone
    shop = rig.settings
    (key,) = {"stream_prefix", "queue_prefix", "topic_prefix"} & set(shop.__struct_fields__)
    bank = replace(shop, **{key: f"{getattr(shop, key)}-bank"})
    backends = [await rig.sole_consumer(settings) for settings in (shop, bank)]
    of_shop, of_bank = backends
    assert [await backend.dequeue_task() for backend in backends] == [None, None]

    # When a task of one fails for the last time
    poison = a_task(max_retries=0)
    await of_shop.enqueue_task(poison)
    assert await next_task(of_shop) == poison
    await of_shop.fail_task(poison.task_id, "no room")
    await eventually_stats(of_shop, lambda stats: stats == BackendStats(0, 1))

    # Then the other one has no dead letter, and retries none
    assert await of_bank.stats() == BackendStats(0, 0)
    assert await of_bank.failed_tasks(10) == []
    assert await of_bank.retry_failed_tasks() == 0
    assert await of_shop.retry_failed_tasks() == 1
    assert await next_task(of_shop) == poison
    assert await of_bank.dequeue_task() is None


async def test_failed_tasks_move_back_in_pages_and_none_is_lost_where_that_breaks_off(
    rig: Rig,
) -> None:
    # Given more dead letters than move back together
    backend = await rig.backend()
    tasks = [a_task(task_id=TaskIds(0).make(n), max_retries=0) for n in range(2 * MOVED_MAX + 1)]
    for task in tasks:
        await backend.enqueue_task(task)
    for _ in tasks:
        await backend.fail_task((await next_task(backend)).task_id, "no room")
    pages: list[Collection[str]] = []

    @contextmanager
    def moving(task_ids: Collection[str]) -> Iterator[None]:
        pages.append([*task_ids])
        yield
        if len(pages) == 1:
            raise LookupError("killed between two steps")

    # When a retry breaks off between two steps, and another one ends
    with pytest.raises(LookupError, match="killed"):
        await backend.retry_failed_tasks(moving)
    assert len(tasks) - len(pages[0]) <= await backend.retry_failed_tasks(moving) <= len(tasks)
    assert len(pages) < len(tasks) // 4

    # Then all tasks come, some of them twice, in the order in which they failed
    came: dict[str, WriteTask] = {}
    async with asyncio.timeout(EVENTUALLY_S):
        while len(came) < len(tasks) or (await backend.stats()).pending_tasks:
            if (again := await backend.dequeue_task()) is not None:
                came[again.task_id] = again
                await backend.complete_task(again.task_id)
    if rig.name == "kafka":  # partitions have no order
        came = dict(sorted(came.items()))
    assert list(came.values()) == tasks
    assert await backend.failed_tasks(10) == []


async def test_a_task_whose_delivery_was_lost_has_not_failed_and_comes_again(rig: Rig) -> None:
    # Given a task without retries, and a consumer that has lost it
    producer, consumer = await rig.backend(), await rig.backend()
    poison = a_task(max_retries=0)
    await producer.enqueue_task(poison)
    assert await next_task(consumer) == poison
    await consumer.close()
    await consumer.connect(rig.settings)

    # When its attempt fails, then that is no end: it comes again, as it was
    assert await consumer.fail_task(poison.task_id, "refused") is False
    assert await next_task(consumer) == poison

    # And when this one fails, it is
    assert await consumer.fail_task(poison.task_id, "refused") is True
    await eventually_stats(producer, lambda stats: stats == BackendStats(0, 1))
    assert await consumer.dequeue_task() is None


async def test_a_task_whose_end_is_called_for_twice_at_a_time_ends_once(rig: Rig) -> None:
    producer, consumer = await rig.backend(), await rig.backend()
    good, poison = a_task(), a_task(task_id=TaskIds(0).make(1), max_retries=0)
    for task in (good, poison):
        await producer.enqueue_task(task)
        assert await next_task(consumer) == task

    # When two calls complete a task, and two count the last attempt of another one
    await asyncio.gather(*(consumer.complete_task(good.task_id) for _ in range(2)))
    ends = [consumer.fail_task(poison.task_id, "refused") for _ in range(2)]
    assert sorted(await asyncio.gather(*ends)) == [False, True]

    # Then one is gone, and the other one is a dead letter, once
    await eventually_stats(producer, lambda stats: stats == BackendStats(0, 1))
    assert await consumer.dequeue_task() is None


async def test_what_is_not_a_task_is_a_dead_letter_and_long_errors_are_cut(rig: Rig) -> None:
    # Given what other programs have sent, also with an error that quotes more than a header holds,
    # and a task behind it
    producer, consumer = await rig.backend(), await rig.backend()
    assert await consumer.dequeue_task() is None
    quoted = b'{"task_id":"%s","operation":"a","created_at":"a","payload":{}}'
    for raw in (b"not JSON", quoted % (b"A" * 200_000)):
        await enqueue_raw(rig.settings, raw)
    poison = a_task(max_retries=0)
    await producer.enqueue_task(poison)

    # When the task fails, with an error as long as that
    assert await next_task(consumer) == poison
    await consumer.fail_task(poison.task_id, "B" * 200_000)

    # Then all are dead letters, with what fits of their errors
    async with asyncio.timeout(60):
        while await producer.stats() != BackendStats(0, 3):
            assert await consumer.dequeue_task() is None  # partitions of Kafka have no order
    dead_letters = await producer.failed_tasks(10)
    (failed,) = [dead for dead in dead_letters if isinstance(dead, FailedTask)]
    assert failed.error.startswith("BBB")
    assert len([dead for dead in dead_letters if isinstance(dead, UnreadableTask)]) == 2
    for dead in dead_letters:
        assert 0 < len(dead.error) <= ERROR_BYTES_MAX

    # And the task alone is retried
    assert await producer.retry_failed_tasks() == 1
    assert await next_task(consumer) == poison


async def test_tasks_that_are_not_finished_are_listed_as_far_as_the_backend_shows_them(
    rig: Rig,
) -> None:
    # Given a task that is being applied, one that waits behind it, and what is no task
    producer, consumer = await rig.backend(), await rig.backend()
    times = (1_771_761_600_000, 1_771_761_600_001)
    tasks = [a_task(task_id=TaskIds(0).make(at), created_at=format_timestamp(at)) for at in times]
    await producer.enqueue_task(tasks[0])
    first = await next_task(consumer)
    await producer.enqueue_task(tasks[1])
    await enqueue_raw(rig.settings, b"not JSON")

    # Then both are listed, the oldest first, without payloads; RabbitMQ shows the first alone
    shown = tasks[:1] if type(consumer).NAME == "RabbitMQ" else tasks
    expected = [msgspec.structs.replace(task, payload={}) for task in shown]
    async with asyncio.timeout(60):
        while (found := await consumer.pending_tasks(10)) != expected:
            assert len(found) < len(expected), found
            await asyncio.sleep(0.05)
    assert await consumer.pending_tasks(1) in ([expected[0]], [expected[-1]])

    # And those of them that are finished are not
    await consumer.complete_task(first.task_id)
    await consumer.complete_task((await next_task(consumer)).task_id)
    async with asyncio.timeout(60):
        while await consumer.pending_tasks(10):
            await asyncio.sleep(0.05)


async def test_no_task_comes_from_an_empty_queue_within_seconds(rig: Rig) -> None:
    consumer = await rig.backend()
    assert await asyncio.wait_for(consumer.dequeue_task(), 60) is None


# --- Outages ------------------------------------------------------------------------------------


async def test_a_killed_server_keeps_what_was_answered_and_comes_back_by_itself(rig: Rig) -> None:
    # Given a subscriber, an answered event and an answered task
    producer, consumer = await rig.backend(), await rig.backend()
    subscriber = Subscriber(consumer)
    await consumer.subscribe([], subscriber)
    before, after = created("before"), created("after")
    task = a_task()
    await producer.publish(before)
    await producer.enqueue_task(task)
    await eventually(lambda: subscriber.got)
    await until_healthy(producer)

    # When the server is killed
    await asyncio.sleep(rig.server.settle_s)
    await asyncio.to_thread(rig.server.kill)

    # Then calls raise Unavailable in bounded time, and health says so
    assert not await asyncio.wait_for(producer.health_check(), 60)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(producer.publish(after), 60)

    # And once it is back, the same backends go on, with all that was answered
    await asyncio.to_thread(rig.server.start)
    await persist(lambda: producer.publish(after))
    await eventually(lambda: after in subscriber.got, 120)
    assert before in subscriber.got
    assert await persist(lambda: next_task(consumer)) == task
    await until_healthy(producer)


async def until_healthy(backend: QueueBackend) -> None:
    async with asyncio.timeout(EVENTUALLY_S):
        while not await backend.health_check():
            await asyncio.sleep(0.05)


async def persist(call: Callable[[], Any]) -> Any:
    """Repeat a call while the backend is down."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await call()
            except Unavailable:
                await asyncio.sleep(0.2)


async def eventually_stats(backend: QueueBackend, wanted: Callable[[BackendStats], bool]) -> None:
    """Wait until the stats are as wanted."""
    async with asyncio.timeout(60):
        while not wanted(await backend.stats()):
            await asyncio.sleep(0.05)


# --- Odd use ------------------------------------------------------------------------------------


async def test_calls_before_it_is_connected_and_after_it_is_closed_are_refused(rig: Rig) -> None:
    backend = await rig.backend()
    await backend.enqueue_task(a_task())
    never, closed = open_backend(rig.name), backend
    await closed.close()
    await closed.close()
    await never.close()
    for one in (never, closed):
        assert await one.health_check() is False
        for calling in (
            one.publish(created("a")),
            one.subscribe([], Subscriber(one)),
            one.acknowledge(created("a").id),
            one.enqueue_task(a_task()),
            one.dequeue_task(),
            one.complete_task("any"),
            one.fail_task("any", "error"),
            one.retry_failed_tasks(),
            one.stats(),
            one.failed_tasks(1),
            one.pending_tasks(1),
        ):
            with pytest.raises(Unavailable, match="not connected, or closed"):
                await calling

    # And one that was closed can be connected again, once
    await closed.connect(rig.settings)
    with pytest.raises(FailedPrecondition) as refused:
        await closed.connect(rig.settings)
    assert refused.value.reason == "CONNECTED"
    task = await next_task(closed)
    await closed.complete_task(task.task_id)
    await closed.close()


async def test_what_cannot_be_sent_is_refused_by_field_and_hinders_nothing(rig: Rig) -> None:
    backend = await rig.backend()
    event, task = created("a"), a_task(max_retries=0)
    for field, calling in (
        ("event", backend.publish(replace(event, data={"key": "\ud800"}))),
        ("event", backend.publish(replace(event, data={"key": object()}))),
        ("task", backend.enqueue_task(replace(task, payload={"body": "\ud800"}))),
        ("event_types", backend.subscribe("object.created", Subscriber(backend))),
        ("event_types[1]", backend.subscribe(["a.b", "*"], Subscriber(backend))),
        ("event_types[0]", backend.subscribe(["a" * 101], Subscriber(backend))),
        ("limit", backend.failed_tasks(0)),
        ("limit", backend.pending_tasks(-1)),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await calling
        assert refused.value.field == field

    # And what is unknown, or finished, does nothing
    await backend.acknowledge("evt_unknown")
    for task_id in ("task_unknown", ""):
        await backend.complete_task(task_id)
        assert await backend.fail_task(task_id, "error") is False
    subscriber = Subscriber(backend)
    await backend.subscribe([], subscriber)
    await backend.publish(event)
    await eventually(lambda: subscriber.got == [event])

    # And an error of any characters is kept, as far as it is text
    await backend.enqueue_task(task)
    await next_task(backend)
    await backend.fail_task(task.task_id, "no \0 room\n \ud800")
    await eventually_stats(backend, lambda stats: stats.dead_letter_count == 1)
    (dead,) = await backend.failed_tasks(10)
    assert dead.error == "no \0 room\n ?"
