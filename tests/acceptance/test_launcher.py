"""`python -m services` as people and scripts use it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc.aio
import pytest

from slatemq.v1 import consumer_pb2, queue_pb2
from tests.acceptance.local_stack import REPOSITORY, LocalStack, is_running, wait_until
from tests.acceptance.stubs import Stubs

pytestmark = pytest.mark.stack


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack as people start it; the tests that have it leave it running, but for the last."""
    with LocalStack(tmp_path_factory.mktemp("own")) as running:
        yield running


def test_it_says_where_all_is_and_how_to_publish(own: LocalStack) -> None:
    # It says so once the file is there.
    wait_until(lambda: "; logs in " in own.said and "The console is at" in own.said, 60)
    line, console = (own.folder / "launcher.out").read_text().splitlines()
    ready = json.loads((own.folder / "ready.json").read_text())

    assert line.startswith(f"SlateMQ is ready at {ready['endpoint']}; ")
    assert ready["endpoints"].keys() == {"ingest", "router", "broker", "janitor"}
    places = (own.folder / "launcher.err").read_text().splitlines()[-1]
    assert all(f"{name} {at}" in places for name, at in ready["endpoints"].items())
    assert f"data in {ready['root']}; logs in {own.folder}" in places
    assert all(is_running(pid) for pid in ready["pids"].values())
    assert console == f"The console is at {ready['console']}"
    with urlopen(ready["console"]) as page:
        assert "<h1>Overview</h1>" in page.read().decode()

    commands = line.partition("publish a first message: ")[2]
    ended = subprocess.run(
        ["sh", "-c", commands], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "goes to the queue hello" in ended.stderr


async def test_sigterm_drains_and_leaves_nothing_running(stack: LocalStack, stubs: Stubs) -> None:
    # Given a claim that waits
    queue = queue_pb2.Queue(queue_id="q")
    await stubs.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))
    claim = consumer_pb2.ClaimRequest(queue_id="q", wait_ms=60_000)
    waiting = asyncio.ensure_future(stubs.consumer.Claim(claim))
    pids = stack.pids
    broker_log = stack.folder / "data" / "logs" / "broker.log"
    await asyncio.sleep(0)

    # When the launcher is asked to stop
    code = await asyncio.to_thread(stack.terminate)

    # Then the claim is answered, in words or with an error, and everything has ended cleanly
    assert code == 0, stack.said
    await asyncio.wait([waiting], timeout=60)
    assert waiting.done()
    refused = waiting.exception()
    assert refused is None or isinstance(refused, grpc.aio.AioRpcError)
    assert not any(is_running(pid) for pid in pids.values())
    assert not (stack.folder / "ready.json").exists()
    assert "stopped: SIGTERM" in broker_log.read_text()
    assert "slatemq: stopping; " in stack.said
    last = stack.said.splitlines()[-1]
    assert last.startswith(f"slatemq: all has stopped; data in {(stack.folder / 'data').as_uri()}")


def test_a_restarted_service_keeps_its_port(own: LocalStack) -> None:
    before = own.endpoints

    pid = own.signal("router", signal.SIGKILL)
    own.wait_restarted("router", pid)

    assert own.endpoints == before
    assert "router was killed by SIGKILL; starting it again" in own.said


def test_a_second_stack_on_a_folder_is_refused_and_disturbs_nothing(own: LocalStack) -> None:
    data, ready = own.folder / "data", own.folder / "ready.json"

    ended = launch("--data", str(data), "--ready-file", str(ready))

    assert ended.returncode == 1
    assert f"a stack runs on {data} already (process {own.process.pid})" in ended.stderr
    assert "--take-over" in ended.stderr
    assert all(is_running(pid) for pid in own.pids.values())


def test_a_killed_launcher_leaves_no_orphan(own: LocalStack) -> None:
    pids = own.pids

    os.kill(pids["launcher"], signal.SIGKILL)
    own.process.wait()

    wait_until(lambda: not any(is_running(pid) for pid in pids.values()), 60)


def test_data_outlive_the_stack(tmp_path: Path) -> None:
    async def create(endpoint: str) -> None:
        async with Stubs() as stubs:
            await stubs.connect(endpoint)
            queue = queue_pb2.Queue(queue_id="kept")
            await stubs.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))

    async def listed(endpoint: str) -> list[str]:
        async with Stubs() as stubs:
            await stubs.connect(endpoint)
            got = await stubs.queues.ListQueues(queue_pb2.ListQueuesRequest())
            return [queue.queue_id for queue in got.queues]

    with LocalStack(tmp_path, ready=True) as first:
        asyncio.run(create(first.endpoint))
        assert first.terminate() == 0
    with LocalStack(tmp_path, ready=True) as second:
        assert asyncio.run(listed(second.endpoint)) == ["kept"]


@pytest.mark.parametrize("flag", ["--ports", "--http-ports"])
def test_a_port_in_use_is_a_clear_error(tmp_path: Path, flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        ended = launch("--data", str(tmp_path), flag, str(port))

    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert f"give other {flag}" in ended.stderr
    assert ended.stdout == ""


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    ended = launch("--data", str(tmp_path / "file" / "data"))

    assert ended.returncode == 1
    assert "cannot write to" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_setting_that_a_service_refuses_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLATEMQ_LOG_LEVEL", "shouting")

    ended = launch("--data", str(tmp_path))

    assert ended.returncode == 2
    assert "shouting" in ended.stderr
    assert ended.stdout == ""


def test_help_teaches() -> None:
    ended = launch("--help")

    assert ended.returncode == 0
    assert "--ready-file" in ended.stdout
    assert "exit codes" in ended.stdout
