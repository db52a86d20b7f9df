"""An ingest killed at every step of a task: what was answered is stored, each once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest

from libs.events.settings import Consistency
from libs.serving.peers.channels import open_channel
from libs.storage.database.roots import open_root
from slatemq.errors import SlateMQError
from tests.forms import proof
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.conftest import SERVERS
from tests.integration.events.tasks.killed_ingest import STEPS, SYNC_STEPS
from tests.integration.events.tasks.queued_ingest import (
    LARGE,
    QueuedIngest,
    queue_settings,
    write_config,
)
from tests.integration.ingest.server import message, process
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow  # Processes are killed at seven steps, or eight.

MODULE = "tests.integration.events.tasks.killed_ingest"
PUBLISHES = 12


BACKENDS = tuple(SERVERS)

HOLD_S = 40
"""Longer than a backend holds what a dead consumer had."""


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Server]]:
    name, make = SERVERS[request.param]
    (tmp_path / "server").mkdir()
    with running(make(tmp_path / "server")) as started:
        yield name, started


def payload_of(request_id: str) -> bytes:
    """Every third body is an object of its own."""
    is_large = int(request_id.rpartition(" ")[2]) % 3 == 0
    return request_id.encode() + (LARGE if is_large else b"")


async def publish(ingest: QueuedIngest, request_id: str) -> int | None:
    """The message ID in the answer of a publish, 0 if it named a task; None if there was none."""
    with suppress(SlateMQError, grpc.aio.AioRpcError):
        answer = await ingest.enqueue(message(payload_of(request_id)), request_id=request_id)
        (message_id,) = answer.message_ids
        assert bool(message_id) is not bool(answer.task_id)
        return int(message_id)
    return None


@pytest.mark.parametrize("consistency", ["async", "sync"])
@pytest.mark.parametrize(
    ("backend", "settled_s"),
    [("redis", 3), *(proof(backend, HOLD_S) for backend in BACKENDS)],
    indirect=["backend"],
)
async def test_a_kill_at_any_step_loses_nothing_and_applies_nothing_twice(
    backend: tuple[str, Server],
    settled_s: int,
    consistency: Consistency,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = (tmp_path / "data").as_uri()
    flags = ("--config", str(write_config(tmp_path, queue_settings(*backend, consistency))))
    unanswered: list[str] = []
    answered: dict[str, int] = {}

    # Given ingests of one shard, each killed at another step while it publishes
    for step in SYNC_STEPS if consistency == "sync" else STEPS:
        monkeypatch.setenv("KILL_AT", step)
        async with process(root, tmp_path / "ready", *flags, module=MODULE) as (started, address):
            async with open_channel(address) as channel:
                ingest = QueuedIngest(channel)
                names = [f"{step} {number}" for number in range(PUBLISHES)]
                await until_published(ingest, f"{step} 0 first 1", answered, unanswered)
                done = await asyncio.gather(*(publish(ingest, name) for name in names))
            for name, message_id in zip(names, done, strict=True):
                if message_id is None:
                    unanswered.append(name)
                else:
                    answered[name] = message_id
            async with asyncio.timeout(WAIT_SECONDS):
                assert await started.wait() == -9, step
    monkeypatch.delenv("KILL_AT")
    assert answered
    assert unanswered

    # When the last one lives, and what had no answer is repeated under its request ID
    async with (
        process(root, tmp_path / "ready", *flags, module=MODULE) as (_, address),
        open_channel(address) as channel,
    ):
        ingest = QueuedIngest(channel)
        repeated: dict[str, int] = {}
        for request_id in unanswered:
            await until_published(ingest, request_id, repeated, [])
        wanted = Counter(payload_of(name) for name in [*answered, *unanswered])
        async with asyncio.timeout(WAIT_SECONDS):
            while len(await ingest.log()) < len(wanted):
                await asyncio.sleep(0.2)
        # What comes again is known
        await settled(ingest, settled_s)

        # Then each is stored exactly once, and no body is left of what was answered
        assert Counter(await ingest.stored()) == wanted
        assert await ingest.failed() == []

        # And each answer with an ID names what it stored: with `sync` every answer, else repeats
        answered |= repeated
        named = {name: message_id for name, message_id in answered.items() if message_id}
        assert named == answered or consistency == "async"
        for name, message_id in named.items():
            assert await ingest.payloads(message_id) == [payload_of(name)]
    left = await open_root(root).objects.list("tasks")
    assert len(left) <= len(unanswered)


async def until_published(
    ingest: QueuedIngest, request_id: str, answered: dict[str, int], unanswered: list[str]
) -> None:
    """Publish until it is answered, or the ingest is gone."""
    async with asyncio.timeout(WAIT_SECONDS):
        while (message_id := await publish(ingest, request_id)) is None:
            if ingest.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                unanswered.append(request_id)
                return
            await asyncio.sleep(0.05)
    answered[request_id] = message_id


async def settled(ingest: QueuedIngest, seconds: int) -> None:
    """See that nothing more comes for as long."""
    count = len(await ingest.log())
    for _ in range(seconds):
        await asyncio.sleep(1)
        assert len(await ingest.log()) == count, "something was applied twice"
