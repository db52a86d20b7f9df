"""Tasks in Kafka: what is too large to be sent again."""

from __future__ import annotations

from libs.events.kafka.connection import ERROR
from libs.events.tasks import ERROR_BYTES_MAX, UnreadableTask, WriteTask, encode_task
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

            # When it fails, then it is finished, and told
            await tasks.fail(TASK_ID, "too long: " + "A" * 10_000)
            assert broker.commits
            (dead,) = await tasks.failed(10)
            assert isinstance(dead, UnreadableTask)
            assert "too long: AAA" in dead.error
            assert len(dead.error) <= ERROR_BYTES_MAX
