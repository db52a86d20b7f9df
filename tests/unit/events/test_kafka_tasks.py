"""Tasks in Kafka: what is too large to be sent again, and what brokers refuse."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import msgspec
import pytest
from aiokafka import TopicPartition, errors

from libs.events.kafka.connection import ERROR
from libs.events.kafka.tasks import Tasks
from libs.events.tasks import ERROR_BYTES_MAX, UnreadableTask, WriteTask, encode_task
from tests.integration.waiting import WAIT_SECONDS
from tests.unit.events.kafka_in_memory import RECORD_BYTES_MAX, Broker, tasks_of

TASK_ID = "task_01KJ2KH1G0J9FEYRWH6ATYF8WE"


def task(filling: str = "", max_retries: int = 0) -> WriteTask:
    return WriteTask(
        task_id=TASK_ID,
        operation="Publish",
        created_at="2026-02-22T12:00:00.000Z",
        max_retries=max_retries,
        payload={"data_ref": filling},
    )


TASKS = TopicPartition("t.tasks", 0)
DEAD = TopicPartition("t.dead-letter", 0)


async def test_what_is_not_a_task_hinders_none_behind_it_however_large_it_is() -> None:
    # Given two records whose errors quote them, one of which is too large to be sent again
    broker = Broker()
    quoted = b'{"task_id":"%s","operation":"a","created_at":"a","payload":{}}' % (b"A" * 600_000)
    broker.add("t.tasks", quoted)
    broker.add("t.tasks", b"A" * RECORD_BYTES_MAX)
    broker.add("t.tasks", encode_task(task()))

    async with tasks_of(broker) as tasks:
        # When a consumer comes to them, then it has the task behind them
        assert await tasks.dequeue() == task()

        # And they are dead letters with short errors: all of the first, the beginning of the other
        first, second = broker.topics["t.dead-letter.events"]
        assert first.value == quoted
        assert second.value
        assert (b"A" * RECORD_BYTES_MAX).startswith(second.value)
        assert all(len(dict(one.headers)[ERROR]) <= ERROR_BYTES_MAX for one in (first, second))
        said = dict(second.headers)[ERROR].decode()
        assert said.startswith(f"the first {len(second.value)} of {RECORD_BYTES_MAX} bytes: task")


async def test_a_task_that_has_no_room_for_its_error_is_a_dead_letter_that_is_cut() -> None:
    for max_retries in (0, 1):
        # Given a task that fits in a record, but not with its error or with the time of its retry
        broker = Broker()
        filled = encode_task(task("A" * (RECORD_BYTES_MAX - 240), max_retries))
        broker.add("t.tasks", filled)
        async with tasks_of(broker) as tasks:
            assert await tasks.dequeue() is not None

            # When it fails, then it is finished, and reported
            await tasks.fail(TASK_ID, "too long: " + "A" * 10_000)
            assert broker.commits
            (dead,) = await tasks.failed(10)
            assert isinstance(dead, UnreadableTask)
            assert "too long: AAA" in dead.error
            assert len(dead.error) <= ERROR_BYTES_MAX


async def test_a_task_whose_end_is_refused_is_sent_again_once() -> None:
    for max_retries, copies in ((0, "t.dead-letter"), (1, "t.tasks.retry")):
        # Given a task that fails
        broker = Broker()
        broker.add("t.tasks", encode_task(task(max_retries=max_retries)))
        async with tasks_of(broker) as tasks:
            assert await tasks.dequeue() is not None

            # When brokers refuse the commit behind its copy, and it is repeated until they do not
            broker.refusal["g.tasks"] = errors.KafkaTimeoutError()
            for _ in range(3):
                with pytest.raises(errors.KafkaTimeoutError):
                    await tasks.fail(TASK_ID, "refused")
            broker.refusal.clear()
            assert await tasks.fail(TASK_ID, "refused") is True

            # Then there is one copy
            assert len(broker.topics[copies]) == 1


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_task_whose_partition_went_to_another_consumer_has_not_failed(
    is_refused: bool,
) -> None:
    # Given a task that was given out, and a partition that goes to another consumer
    broker = Broker()
    broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        assert await tasks.dequeue() is not None
        if is_refused:  # the brokers know that first
            broker.refusal["g.tasks"] = errors.CommitFailedError()
        else:
            await tasks._offsets.on_partitions_revoked([TASKS])

        # When its last attempt fails, then that is no end
        assert await tasks.fail(TASK_ID, "refused") is False


async def test_brokers_that_answer_no_commit_hold_up_nothing_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given tasks that were given out, a dead letter, and brokers that do not answer
    monkeypatch.setattr("libs.events.kafka.offsets.OPERATION_S", 0.1)
    broker = Broker()
    for _ in range(3):
        broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        assert await tasks.dequeue() is not None
        await tasks.fail(TASK_ID, "refused")
        assert await tasks.dequeue() is not None
        broker.silent = {"g.tasks", "g.dead-letter"}
        async with asyncio.timeout(WAIT_SECONDS):
            # When a task is completed by many calls, then they wait for the brokers together
            calls = [tasks.complete(TASK_ID) for _ in range(2000)]
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(one) for one in done} == {TimeoutError}

            # And neither dead letters wait for ever, nor a partition that goes
            with pytest.raises(TimeoutError):
                await tasks.retry_all(nullcontext)
            assert await tasks.dequeue() is not None
            await tasks._offsets.on_partitions_revoked([TASKS])
        assert broker.committed["g.tasks", TASKS] == 1


async def test_a_consumer_that_only_fails_is_replaced_and_what_it_had_comes_again() -> None:
    # Given a task that was given out
    broker = Broker()
    broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        assert await tasks.dequeue() == task()

        # When the consumer's coordination has ended, as each of its fetches says from then on
        broker.consumers[-1].fault = errors.KafkaError("Unexpected error during coordination")
        with pytest.raises(errors.KafkaError):
            await tasks.dequeue()

        # Then the task comes again, from another one
        assert await tasks.complete(TASK_ID) is False
        assert await tasks.dequeue() == task()
        assert await tasks.complete(TASK_ID) is True


async def test_a_producer_that_only_fails_is_replaced() -> None:
    broker = Broker()
    async with tasks_of(broker) as tasks:
        # Given a producer whose sender has ended, as each call says from then on
        fault = errors.KafkaError("Unexpected error during batch delivery")
        broker.producers[-1].fault = fault

        # When a task is sent, then it fails as if brokers were down, and the next one is sent
        with pytest.raises(errors.KafkaConnectionError):
            await tasks.enqueue(task())
        await tasks.enqueue(task())
        assert len(broker.topics["t.tasks"]) == 1


async def test_what_is_not_a_task_is_one_dead_letter_though_its_end_is_refused() -> None:
    broker = Broker()
    broker.add("t.tasks", b"not JSON")
    broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        broker.refusal["g.tasks"] = errors.KafkaTimeoutError()
        with pytest.raises(errors.KafkaTimeoutError):
            await tasks.dequeue()
        assert await tasks.dequeue() == task()
        broker.refusal.clear()
        await tasks.complete(TASK_ID)
        assert len(broker.topics["t.dead-letter.events"]) == 1
        assert broker.committed["g.tasks", TASKS] == 2


@pytest.mark.parametrize("refusal", [errors.CommitFailedError(), errors.IllegalStateError()])
async def test_nothing_is_trimmed_where_the_commit_is_refused(refusal: errors.KafkaError) -> None:
    # Given a task that is finished
    broker = Broker()
    broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        assert await tasks.dequeue() is not None
        await tasks.complete(TASK_ID)

        # When brokers refuse to commit it again, then it is kept, and so are the records of tasks
        broker.refusal["g.tasks"] = refusal
        assert not await tasks.trim()
        assert not broker.deleted

        # And for as long as only the dead letters are refused
        broker.refusal = {"g.dead-letter": refusal}
        broker.committed["g.dead-letter", DEAD] = 1
        assert not await tasks.trim()
        broker.refusal.clear()
        assert await tasks.trim()
        assert broker.deleted[TASKS] == 1


async def test_dead_letters_that_were_retried_are_committed_again_and_removed() -> None:
    # Given a task that was retried, and failed again
    broker = Broker()
    broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        for _ in range(2):
            assert await tasks.dequeue() is not None
            await tasks.fail(TASK_ID, "refused")
            if len(broker.topics["t.dead-letter"]) == 1:
                assert await tasks.retry_all(nullcontext) == 1

        # When the hour is over
        before = len(broker.commits)
        assert await tasks.trim()

        # Then the dead letter that was retried goes, and the brokers keep that in mind
        assert ("g.dead-letter", {DEAD: 1}) in broker.commits[before:]
        assert broker.deleted == {TASKS: 2, TopicPartition("t.tasks.retry", 0): 0, DEAD: 1}
        assert len(await tasks.failed(10)) == 1


async def test_dead_letters_are_listed_and_retried_though_the_brokers_list_the_end_late() -> None:
    # Given a dead letter that another process has made, and brokers that do not list its end yet
    broker = Broker(listed_count=0)
    broker.add("t.tasks", encode_task(task()))
    async with tasks_of(broker) as tasks:
        assert await tasks.dequeue() is not None
        await tasks.fail(TASK_ID, "refused")

    # When it is asked for, then it is there, and it can be retried
    async with tasks_of(broker) as tasks:
        assert [dead.name for dead in await tasks.failed(10)] == [TASK_ID]
        assert await tasks.retry_all(nullcontext) == 1
        assert await tasks.failed(10) == []
        assert await tasks.retry_all(nullcontext) == 0


async def test_what_was_sent_or_seen_counts_though_the_brokers_list_the_end_late() -> None:
    # Given two tasks, of which the brokers list none
    broker = Broker(listed_count=0)
    async with tasks_of(broker) as tasks:
        for _ in range(2):
            await tasks.enqueue(task())
        # Then both count
        assert await tasks.counts() == (2, 0)

        # And so does the dead letter that one of them becomes
        assert await tasks.dequeue() is not None
        await tasks.fail(TASK_ID, "refused")
        assert await tasks.counts() == (1, 1)

        # And what was listed once, though another server lists less
        broker.add("t.tasks", encode_task(task()))
        broker.listed_count = None
        assert await tasks.counts() == (2, 1)
        broker.listed_count = 1
        assert await tasks.counts() == (2, 1)


async def test_all_is_counted_after_a_restart_though_the_brokers_list_the_end_late() -> None:
    # Given tasks of a process that has ended, two of them dead letters; one of each is listed
    broker = Broker(listed_count=1)
    async with tasks_of(broker) as tasks:
        for number in range(5):
            task_id = f"{TASK_ID[:-1]}{number}"
            await tasks.enqueue(msgspec.structs.replace(task(), task_id=task_id))
        for _ in range(2):
            await tasks.fail((await dequeued(tasks)).task_id, "refused")

    # When another one looks, then it counts all of them
    async with tasks_of(broker) as tasks:
        assert await tasks.counts() == (3, 2)

        # And what others have added once it has read that
        broker.add("t.dead-letter", broker.topics["t.dead-letter"][0].value)
        assert len(await tasks.failed(10)) == 2
        assert await tasks.counts() == (3, 3)


async def test_topics_that_brokers_have_lost_are_created_again() -> None:
    # Given a backend whose topics of tasks are removed
    broker = Broker()
    async with tasks_of(broker) as tasks:
        await tasks.prepare()
        before = [topic.name for topic in broker.created]
        for name in before:
            broker.remove(name)

        # When a publish misses one, then the next one finds it, and the others when they are missed
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            await tasks.enqueue(task())
        await tasks.enqueue(task())
        assert await tasks.dequeue() == task()
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            await tasks.fail(TASK_ID, "refused")
        assert await tasks.fail(TASK_ID, "refused")
        assert {topic.name for topic in broker.created[len(before) :]} == {
            "t.tasks",
            "t.dead-letter",
        }


async def test_a_topic_that_was_created_again_is_finished_and_counted_from_its_beginning() -> None:
    # Given a consumer that has finished a number of tasks
    broker = Broker()
    async with tasks_of(broker) as tasks:
        await tasks.prepare()
        for _ in range(5):
            await tasks.enqueue(task())
            assert await tasks.dequeue() == task()
            await tasks.complete(TASK_ID)

        # When the topic is replaced, and has a task that is finished and one that waits
        broker.remove("t.tasks")
        broker.committed.clear()
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            await tasks.enqueue(task())
        for _ in range(2):
            await tasks.enqueue(task())
        assert await tasks.dequeue() == task()
        await tasks.complete(TASK_ID)

        # Then these are its offsets
        assert broker.committed["g.tasks", TASKS] == 1
        assert await tasks.counts() == (1, 0)


async def test_the_end_of_a_task_of_a_lost_topic_is_none_of_the_task_in_its_place() -> None:
    # Given tasks that are worked on as their topic is replaced, and others in their places
    broker = Broker()
    async with tasks_of(broker) as tasks:
        await tasks.prepare()
        old = [task().task_id[:-1] + digit for digit in "AB"]
        new = [task().task_id[:-1] + digit for digit in "CD"]
        for task_id in old:
            await tasks.enqueue(msgspec.structs.replace(task(), task_id=task_id))
        assert [(await dequeued(tasks)).task_id for _ in old] == old
        broker.remove("t.tasks")
        broker.committed.clear()
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            await tasks.enqueue(task())
        tasks._consumer.seek(TASKS, 0)  # what a client does whose position is behind the end
        for task_id in new:
            await tasks.enqueue(msgspec.structs.replace(task(), task_id=task_id))
        assert (await dequeued(tasks)).task_id == new[0]

        # When the old ones end, then the new ones are given out, and finished by their own ends
        for task_id in old:
            await tasks.complete(task_id)
        assert broker.committed.get(("g.tasks", TASKS), 0) == 0
        assert (await dequeued(tasks)).task_id == new[1]
        for task_id in new:
            await tasks.complete(task_id)
        assert broker.committed["g.tasks", TASKS] == 2


async def dequeued(tasks: Tasks) -> WriteTask:
    found = await tasks.dequeue()
    assert found is not None
    return found
