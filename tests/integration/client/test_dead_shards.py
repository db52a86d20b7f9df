"""What a new client can do while one of two brokers is down: all that the living one has."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import slatemq
from slatemq._admin import instance
from slatemq.errors import AlreadyExists, NotFound, Unavailable
from tests.integration.cli.stack import COMMAND
from tests.integration.stack.processes import Service

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

CALL_S = 20.0
"""Calls that the dead broker holds up would take so long, and fail."""


class Half:
    """An ingest, a router, a janitor, and two brokers of which the first is down."""

    def __init__(self, root: Path) -> None:
        (root / "data").mkdir()
        self.ingest = Service(root, "ingest")
        self.brokers = [Service(root, "broker", "--shard", str(n)) for n in range(2)]
        self.router = Service(root, "router")
        self.janitor = Service(root, "janitor")
        self.all = [self.ingest, *self.brokers, self.router, self.janitor]

    async def start(self) -> None:
        await asyncio.gather(*(service.start() for service in self.all))
        async with self.client() as client:
            await client.create_queue("on0", shard=0)
        await self.brokers[0].kill()
        async with self.client() as client:
            await client.create_queue("on1")

    def client(self, call_timeout: float = CALL_S) -> slatemq.Client:
        return slatemq.connect(self.ingest.address, call_timeout=call_timeout)

    async def command(self, *arguments: str) -> tuple[int, str, str]:
        environ = {**os.environ, "SLATEMQ_ENDPOINT": self.ingest.address}
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, env=environ, stdout=-1, stderr=-1
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def half(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Half]:
    made = Half(tmp_path_factory.mktemp("half"))
    try:
        await made.start()
        yield made
    finally:
        await asyncio.gather(*(service.close() for service in made.all))


async def test_a_queue_of_the_living_broker_is_found_used_and_consumed(half: Half) -> None:
    async with half.client() as client:
        queue = await client.get_queue("on1")
        assert queue.broker_shard == 1
        await client.publish(b"one", {"queue": "on1"})
        (message,) = await client.claim("on1", wait=20)
        await message.ack()
        await client.publish(b"two", {"queue": "on1"})
        async with client.consume("on1") as messages, asyncio.timeout(60):
            message = await anext(messages)
            assert message.payload == b"two"
            await message.ack()


async def test_queues_are_created_on_the_living_broker(half: Half) -> None:
    async with half.client() as client:
        queue = await client.create_queue("created-now")
        assert queue.broker_shard == 1
        with pytest.raises(AlreadyExists):
            await client.create_queue("created-now")
        await client.delete_queue("created-now")


async def test_a_queue_of_the_dead_broker_is_not_said_to_be_unknown(half: Half) -> None:
    async with half.client(call_timeout=3) as client:
        with pytest.raises(Unavailable):
            await client.get_queue("on0")


async def test_a_name_that_no_queue_has_is_unknown_even_while_a_broker_is_down(
    half: Half,
) -> None:
    async with half.client() as client:
        with pytest.raises(NotFound):
            await client.claim("no-such-queue")


async def test_a_redrive_that_no_living_broker_has_is_not_said_to_be_unknown(half: Half) -> None:
    async with half.client(call_timeout=3) as client:
        with pytest.raises(Unavailable) as raised:
            await client.get_redrive("no-such-redrive")
    assert raised.value.reason == "BROKER_DOWN"
    assert raised.value.metadata["broker_shards"] == "0"


async def test_a_listing_gives_the_living_queues_then_says_which_broker_is_missing(
    half: Half,
) -> None:
    async with half.client() as client:
        queues = client.list_queues()
        assert (await anext(queues)).queue_id == "on1"
        with pytest.raises(Unavailable) as raised:
            await anext(queues)
        assert (raised.value.reason, raised.value.metadata) == (
            "INCOMPLETE",
            {"broker_shards": "0"},
        )
        with pytest.raises(Unavailable) as raised:
            [line async for line in client.outbox_lines()]
        assert raised.value.reason == "INCOMPLETE"


async def test_the_status_lists_the_living_queues_and_names_the_missing_broker(
    half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "STATUS_S", 60.0)
    async with half.client() as client:
        status = await client.status()
    assert [queue.queue_id for queue in status.queues] == ["on1"]
    assert status.unlisted_brokers == [0]
    assert status.routes
    down = [(s.service, s.shard) for s in status.services if not s.serving]
    assert ("broker", 0) in down
    assert ("broker", 1) not in down


async def test_the_command_shows_what_came_and_names_the_missing_broker(half: Half) -> None:
    code, out, err = await half.command("status")
    assert (code, "on1" in out) == (0, True)
    assert "broker shard 0 did not list its queues" in err
    _, out, _ = await half.command("status", "--json")
    assert json.loads(out)["unlisted_brokers"] == [0]
    code, out, err = await half.command("queue", "ls")
    assert (code, "on1" in out, "broker shard 0 does not answer" in err) == (3, True, True)


async def test_a_publish_to_a_queue_of_the_dead_broker_is_stored(half: Half) -> None:
    code, out, err = await half.command("publish", "--to", "on0", "for later")
    assert code == 0, err
    assert int(out) > 0


async def test_archived_dead_letters_of_the_living_broker_can_be_read(half: Half) -> None:
    async with half.client() as client:
        assert [entry async for entry in client.read_archived("on1")] == []
        # Which of the dead one's queues exist, no caller can know
        with pytest.raises(Unavailable, match="broker 0 is down"):
            [entry async for entry in client.read_archived("on0")]


async def test_a_run_that_names_a_queue_of_the_living_broker_begins(half: Half) -> None:
    async with half.client() as client:
        # Given a restore of what was never archived, which needs nothing of the dead broker
        run = await client.run_job("restore", queue_ids=["on1"])
        await client.cancel_job_run(run)  # Spark would start.
        with pytest.raises(Unavailable, match="broker 0 is down"):
            await client.run_job("restore", queue_ids=["on0"])


async def test_one_broker_that_is_frozen_holds_no_other_up(half: Half) -> None:
    # Given the first broker up again, then stopped: connections to it open and nothing answers
    await half.brokers[0].start()
    async with half.client() as client:
        assert (await client.get_queue("on0")).broker_shard == 0
    process = half.brokers[0].process
    process.send_signal(signal.SIGSTOP)
    try:
        async with half.client() as client:
            assert (await client.get_queue("on1")).broker_shard == 1
            status = await client.status()
            assert [queue.queue_id for queue in status.queues] == ["on1"]
            assert status.unlisted_brokers == [0]
    finally:
        process.send_signal(signal.SIGCONT)
    # When it goes on, all of it is back
    async with half.client() as client:
        assert [queue.queue_id async for queue in client.list_queues()] == ["on0", "on1"]
        with pytest.raises(NotFound):
            await client.get_queue("no-such-queue")
