"""Forks of programs that use the client: never a crash, never a hang."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import slatemq
import slatemq.sync
from tests.integration.client.peers import Instance

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, os, sys, time, warnings
import grpc, slatemq, slatemq.sync

warnings.simplefilter("ignore")
endpoint, parent, work = sys.argv[1:]
if parent.endswith("closed"):
    slatemq._rpc.forks.SHUTDOWN_S = 60

def child():
    if work == "idle":
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        return
    if work == "leave":
        client.__exit__(None, None, None)
        return
    try:
        with slatemq.sync.connect(endpoint, call_timeout=60) as own:
            own.publish("of the child")
        print("published", flush=True)
    except RuntimeError as error:
        print(f"refused: {error}", flush=True)

naps, waits = [], []

def fork():
    for _ in range(5):
        before = len(naps)
        pid = os.fork()
        waits.append(len(naps) > before)
        if pid == 0:
            child()
            os._exit(0)
        print("status", os.waitpid(pid, 0)[1], flush=True)

async def asynchronous():
    async with slatemq.connect(endpoint) as client:
        await client.publish("of the parent")
        if parent == "asyncio":
            fork()
            await client.publish("of the parent")
    if parent == "asyncio-closed":
        fork()

if parent.startswith("asyncio"):
    asyncio.run(asynchronous())
else:
    client = slatemq.sync.connect(endpoint)
    with client:
        client.publish("of the parent")
        if parent == "open":
            fork()
            client.publish("of the parent")
    if parent == "channel":
        channel = grpc.insecure_channel(endpoint)
        grpc.channel_ready_future(channel).result()
        sleep = time.sleep
        time.sleep = lambda seconds: (naps.append(seconds), sleep(seconds))
        fork()
        print("waits", waits, flush=True)
    if parent == "closed":
        fork()
"""


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    async with Instance() as running:
        running.ingest.gate.set()
        yield running


async def run(instance: Instance, parent: str, work: str) -> list[str]:
    """What the program and its five children printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", PROGRAM, instance.endpoint, parent, work),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()


@pytest.mark.parametrize("parent", ["open", "asyncio"])
async def test_a_child_of_a_program_with_an_open_client_is_refused_with_what_to_do(
    instance: Instance, parent: str
) -> None:
    lines = await run(instance, parent, "connect")
    assert lines[1::2] == ["status 0"] * 5
    for line in lines[::2]:
        assert line.startswith("refused: ")
        assert "close every client and channel before the fork" in line
        assert "spawn" in line
    # The parent goes on unharmed
    assert instance.ingest.stored == [b"of the parent"] * 2


@pytest.mark.parametrize("parent", ["open", "asyncio"])
async def test_a_child_that_never_connects_is_not_harmed(instance: Instance, parent: str) -> None:
    assert await run(instance, parent, "idle") == ["status 0"] * 5


async def test_a_child_leaves_the_block_of_its_parents_client_without_an_error(
    instance: Instance,
) -> None:
    assert await run(instance, "open", "leave") == ["status 0"] * 5
    assert instance.ingest.stored == [b"of the parent"] * 2


@pytest.mark.parametrize("parent", ["closed", "asyncio-closed"])
async def test_a_child_connects_when_its_parent_has_closed_its_client(
    instance: Instance, parent: str
) -> None:
    assert await run(instance, parent, "connect") == ["published", "status 0"] * 5
    assert instance.ingest.stored == [b"of the parent"] + [b"of the child"] * 5


async def test_another_channel_of_the_program_is_named_and_waited_for_once(
    instance: Instance,
) -> None:
    *lines, waits = await run(instance, "channel", "connect")
    assert waits == "waits [True, False, False, False, False]"
    assert lines[1::2] == ["status 0"] * 5
    for line in lines[::2]:
        assert line.startswith("refused: ")
        assert "another gRPC channel" in line


async def test_a_client_that_is_pickled_says_what_to_do_instead(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client, client.consume("q") as messages:
        for thing in (client, messages):
            with pytest.raises(TypeError, match=r"cannot be pickled.*Pass the address"):
                pickle.dumps(thing)
        instance.broker.available.append((b"x", 0))
        (message,) = await client.claim("q")
        with pytest.raises(TypeError, match=r"Received cannot be pickled.*Pass its payload"):
            pickle.dumps(message)
    made = slatemq.sync.connect(instance.endpoint)
    with pytest.raises(TypeError, match=r"SyncClient cannot be pickled.*Pass the address"):
        pickle.dumps(made)
    made.close()
