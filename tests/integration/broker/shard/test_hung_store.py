"""A store that hangs: whoever looks at the process sees it, and sees when it is over."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import slatemq
from libs.serving.process import store_watch
from libs.serving.process.health import REASON_KEY
from tests.integration.broker.rig import Disk, Rig, memory_root, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what waits for a moment hangs: called when something does."""
    monkeypatch.setattr(store_watch, "SLOW_MS", 50)
    monkeypatch.setattr(store_watch, "HUNG_MS", 200)


@pytest.fixture(autouse=True)
def _quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "LOOK_S", 0.01)


async def health_of(rig: Rig) -> tuple[int, str]:
    """The health, and why."""
    stub: Any = health_pb2_grpc.HealthStub(rig.channel)
    call = stub.Check(health_pb2.HealthCheckRequest())
    status = (await call).status
    said = dict(await call.trailing_metadata() or ())
    return status, said.get(REASON_KEY, "")


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the watch of the store has logged."""
    return [one.getMessage() for one in caplog.records if one.name == store_watch.__name__]


async def until(rig: Rig, status: int) -> str:
    """Waits for this health; gives the reason."""
    async with asyncio.timeout(60):
        while (found := await health_of(rig))[0] != status:
            await asyncio.sleep(0.01)
    return found[1]


async def test_the_health_and_the_log_say_that_the_store_hangs_and_that_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "libs.serving.process.store_watch")
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        assert await until(rig, SERVING) == ""

        # When a commit hangs
        disk.free.clear()
        creating = asyncio.create_task(rig.create("another"))
        impatient(monkeypatch)

        # Then the health says what is waited for, and the log does, once for each stage
        reason = await until(rig, NOT_SERVING)
        assert "the object store has not answered" in reason
        assert "a commit waits" in reason
        lines = said_in(caplog)
        assert all("the object store has not answered" in line for line in lines)
        assert len(lines) == 2

        # And so does the instance's status
        client = slatemq.connect(rig.running.address)
        (broker,) = (await client.status()).services
        assert not broker.serving
        assert "a commit waits" in broker.detail
        await client.close()

        # And when it answers, the commit is made, and the process serves
        disk.free.set()
        await creating
        assert await until(rig, SERVING) == ""
        assert any("answers again" in line for line in said_in(caplog))


async def test_an_idle_process_notices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        announcement = rig.service.announcement
        assert announcement is not None
        hanging, free = asyncio.Event(), asyncio.Event()
        read = rig.root.objects.get

        async def hang(path: str) -> bytes:
            hanging.set()
            await free.wait()
            return await read(path)

        # When nothing changes, and the look at its own entry of the topology hangs
        monkeypatch.setattr(rig.root.objects, "get", hang)
        looking = asyncio.create_task(announcement.check())
        await hanging.wait()
        impatient(monkeypatch)
        assert "a read of the topology waits" in await until(rig, NOT_SERVING)

        # Then it serves again when that is answered
        free.set()
        await looking
        assert await until(rig, SERVING) == ""
