"""Two ingests with one backend and one consumer group: they divide the work, and one is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from libs.events.settings import QueueSettings
from libs.serving.peers.channels import open_channel
from slatemq.errors import SlateMQError
from slatemq.v1 import task_pb2
from tests.faults.shard_processes import Member
from tests.forms import proof
from tests.integration.events.backends.servers import Server
from tests.integration.events.conftest import SERVERS, served
from tests.integration.events.tasks.queued_ingest import (
    QueuedIngest,
    beside,
    eventually,
    queue_settings,
    until_connected,
    write_config,
)
from tests.integration.ingest.server import message, process
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow  # Processes, one of which is killed.

KILLED = "tests.integration.events.tasks.killed_ingest"
PUBLISHES = 20
SHARDS = (0, 1)


@pytest.fixture(
    scope="module",
    params=[name if name == "redis" else proof(name) for name in SERVERS],
)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


class Publishes:
    """What was published to the two ingests.

    Attributes:
        tasks: The IDs of the tasks that each ingest answered, by the payload.
        unanswered: What had no answer, by the ingest that it was sent to.
    """

    def __init__(self) -> None:
        self.tasks: tuple[dict[bytes, str], ...] = ({}, {})
        self.unanswered: tuple[list[bytes], ...] = ([], [])

    async def send(self, ingest: QueuedIngest, shard: int, payload: bytes) -> None:
        """Publish under a request ID of the payload's own."""
        try:
            answer = await ingest.enqueue(message(payload), request_id=payload.decode())
        except (SlateMQError, grpc.aio.AioRpcError):
            self.unanswered[shard].append(payload)
        else:
            self.tasks[shard][payload] = answer.task_id

    async def repeat(self, ingest: QueuedIngest, shard: int) -> None:
        """Publish again what had no answer, to the same ingest, as the client does.

        What was applied meanwhile is answered with its message, not with a task: the ID is empty.
        """
        for payload in self.unanswered[shard]:
            answer = await ingest.enqueue(message(payload), request_id=payload.decode())
            self.tasks[shard][payload] = answer.task_id


@asynccontextmanager
async def ingest_of(
    folder: Path, shard: int, *flags: str, module: str = "services.ingest"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, QueuedIngest]]:
    """A process of a shard, and a client of it."""
    root, ready = (folder / "data").as_uri(), folder / f"ready-{shard}"
    more = ("--shard", str(shard))
    async with (
        process(root, ready, *flags, *more, module=module) as (started, address),
        open_channel(address) as channel,
    ):
        yield started, QueuedIngest(channel)


@pytest.mark.parametrize("comes", ["again", "as a standby"])
async def test_two_ingests_of_one_group_apply_all_tasks_once_though_one_is_killed(
    backend: tuple[str, Server], comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two ingests side by side, of which the second ends when it has taken its third task
    settings = queue_settings(*backend)
    flags = ["--config", str(write_config(tmp_path, settings))]
    has_standby = comes == "as a standby"
    if has_standby:
        flags.append("--standby")
    done, numbers = Publishes(), range(PUBLISHES)
    async with AsyncExitStack() as stack:
        _, first = await stack.enter_async_context(ingest_of(tmp_path, 0, *flags))
        monkeypatch.setenv("KILL_AT", "dequeued")
        started, second = await stack.enter_async_context(
            ingest_of(tmp_path, 1, *flags, module=KILLED)
        )
        monkeypatch.delenv("KILL_AT")
        successor = Member(tmp_path, "ingest", 1, *flags)
        stack.push_async_callback(successor.close)
        if has_standby:
            ready = await successor.begin()

        await until_connected(first)

        # When both get publishes, until that one is dead
        await asyncio.gather(
            *(done.send(first, 0, b"first %d" % number) for number in numbers),
            *(done.send(second, 1, b"second %d" % number) for number in numbers),
        )
        async with asyncio.timeout(WAIT_SECONDS):
            assert await started.wait() == -9

        # Then the first one applies all that it accepted, also what comes now, and nothing else
        for number in numbers:
            await done.send(first, 0, b"later %d" % number)
        assert done.unanswered[0] == []
        for task_id in done.tasks[0].values():
            assert (await first.wait(task_id)).state == task_pb2.TASK_STATE_APPLIED
        assert Counter(await first.stored()) == Counter([*done.tasks[0]])

        # When the second one is started again after its tasks were seen in the backend, or its
        # standby takes its shard, and what had no answer comes again
        if has_standby:
            await eventually(partial(asyncio.to_thread, ready.exists))
            successor.note_ready(ready)
        else:
            await eventually(partial(tasks_wait, settings))
            await successor.start()
        again = await stack.enter_async_context(QueuedIngest.at(successor.peer_address))
        assert isinstance(again, QueuedIngest)
        await eventually(again.failed)
        await done.repeat(again, 1)

        # Then it applies all that it had answered
        for task_id in filter(None, done.tasks[1].values()):
            assert (await again.wait(task_id)).state == task_pb2.TASK_STATE_APPLIED

        # And together they have stored each publish once
        stored = Counter([*await first.stored(), *await again.stored()])
        assert stored == Counter([*done.tasks[0], *done.tasks[1]])
        assert len(stored) == 3 * PUBLISHES


async def tasks_wait(settings: QueueSettings) -> bool:
    """Whether the backend has tasks of the second ingest."""
    async with beside(settings, shard=1) as backend:
        return (await backend.stats()).pending_tasks > 0
