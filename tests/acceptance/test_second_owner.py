"""Two brokers on one shard: the older one stops by itself."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.serving.process.exits import EXIT_FENCED
from tests.acceptance.local_stack import REPOSITORY, LocalStack, is_running, wait_until
from tests.acceptance.stubs import Stubs
from tests.acceptance.test_launcher import launch
from tests.acceptance.workload import Run, make_lines
from tests.ready_process import popen

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,  # What the first broker handed out comes back only after its lease.
]


class SecondBroker:
    """A broker of its own on the data of a stack."""

    def __init__(self, stack: LocalStack) -> None:
        self._ready = stack.folder / "second.json"
        command = [sys.executable, "-m", "services.broker", "--root", stack.root]
        self.process = popen(
            [*command, "--ready-file", str(self._ready)], cwd=REPOSITORY, stderr=subprocess.DEVNULL
        )
        wait_until(self._ready.exists, 60)

    @property
    def address(self) -> str:
        return str(json.loads(self._ready.read_text())["peer_address"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture
def closing() -> Iterator[list[SecondBroker]]:
    started: list[SecondBroker] = []
    yield started
    for broker in started:
        broker.close()


async def test_the_first_broker_stops_as_fenced_and_no_answered_ack_is_lost(
    stack: LocalStack, stubs: Stubs, closing: list[SecondBroker]
) -> None:
    # Given a run that is half done
    run = Run(make_lines(4_000))
    await run.create_queues(stubs)
    publishing = asyncio.create_task(run.publish(stubs))
    consuming = asyncio.create_task(run.consume(stubs))
    while run.progress < 0.5:
        await asyncio.sleep(0.01)
    first = stack.pids["broker"]

    # When a second broker is started on the same data
    closing.append(await asyncio.to_thread(SecondBroker, stack))
    await asyncio.to_thread(wait_until, lambda: not is_running(first), 60)
    consuming.cancel()
    await asyncio.wait([consuming])
    await publishing

    # Then the first has stopped by itself, is not started again, and the rest of the stack serves
    await asyncio.to_thread(wait_until, lambda: "broker was fenced" in stack.said, 60)
    assert f"exit {EXIT_FENCED}" in stack.said
    assert stack.process.poll() is None

    # And the second hands out what is left, and nothing whose ack was answered
    async with Stubs() as again:
        await again.connect(closing[0].address)
        await run.repeat_acks(again)
        await run.consume(again)
        await run.find_nothing_more(again)
    assert run.faults() == []


def test_a_second_stack_on_the_same_folder_takes_over_where_its_options_say_so(
    stack: LocalStack, tmp_path: Path
) -> None:
    # When another launcher is started on the same data
    data = str(tmp_path / "data")
    with LocalStack(tmp_path / "other", "--data", data, "--take-over") as other:
        # Then it says so, and the first one ends by itself, as fenced
        assert f"another stack (process {stack.process.pid})" in other.said
        assert stack.process.wait(timeout=120) == EXIT_FENCED
        assert "no service that owns data is left" in stack.said
        assert other.process.poll() is None
        assert all(is_running(pid) for pid in other.pids.values())

        # And a third one finds it there
        third = launch("--data", data)
        assert third.returncode == 1
        assert f"already (process {other.process.pid})" in third.stderr
