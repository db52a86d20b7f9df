"""docs/tour.md names functions that a message passes, in the order in which it passes them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import slatemq
from tests.integration.stack.recorded_calls import REPOSITORY, Call, CallRecorder
from tests.ready_process import create_subprocess

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

TOUR = REPOSITORY / "docs" / "tour.md"
STEP = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.MULTILINE)
FILES_MAX = 40
SERVICES = ("ingest", "router", "broker")
START_S = 200


def steps() -> list[str]:
    return [f"{file}:{function}" for file, function in STEP.findall(TOUR.read_text())]


def test_the_tour_of_a_message_needs_few_files() -> None:
    assert len({file for file, _ in STEP.findall(TOUR.read_text())}) <= FILES_MAX


async def test_a_message_passes_the_functions_of_the_tour_in_their_order(tmp_path: Path) -> None:
    recorder = CallRecorder()
    async with recorded_services(tmp_path) as address, slatemq.connect(address) as client:
        await client.create_queue("orders", filter='headers.type == "order"')
        async with client.consume("orders") as messages:
            await pass_one(client, messages)  # Connections, streams and caches are there now.
            await asyncio.sleep(0)
            recorder.start()
            began = time.monotonic()
            await pass_one(client, messages)
            ended = time.monotonic()
            recorder.stop()

    calls = [call for call in recorder.calls if began <= call[0] <= ended]
    for name in SERVICES:
        recorded = json.loads((tmp_path / f"{name}.json").read_text())
        calls += [(when, called) for when, called in recorded if began <= when <= ended]
    functions = {name for _, name in calls}
    files = {name.partition(":")[0] for name in functions}
    log.info("%d functions in %d files are called meanwhile", len(functions), len(files))
    assert first_out_of_order(steps(), sorted(calls)) is None


async def pass_one(client: slatemq.Client, messages: slatemq.Consumer) -> None:
    await client.publish(b"one lamp", {"type": "order"})
    message = await anext(messages)
    await message.ack()


def first_out_of_order(tour: list[str], calls: list[Call]) -> str | None:
    """The first step of the tour without a call at or after that of the step before it."""
    passed = 0
    times: dict[str, list[int]] = {}
    for place, (_, name) in enumerate(calls):
        times.setdefault(name, []).append(place)
    for step in tour:
        places = times.get(step, [])
        found = bisect_left(places, passed)
        if found == len(places):
            return step
        passed = places[found]
    return None


@asynccontextmanager
async def recorded_services(folder: Path) -> AsyncIterator[str]:
    """Ingest, router and broker, which write their calls to `<name>.json`. Yields an address."""
    running = []
    try:
        for name in SERVICES:
            command = [sys.executable, "-m", "tests.integration.stack.recorded_calls"]
            command += [str(folder / f"{name}.json"), f"services.{name}"]
            command += ["--root", (folder / "data").as_uri()]
            command += ["--ready-file", str(folder / f"{name}.ready")]
            running.append(await create_subprocess(*command, cwd=REPOSITORY))
        async with asyncio.timeout(START_S):
            for name, process in zip(SERVICES, running, strict=True):
                while not (folder / f"{name}.ready").exists():
                    assert process.returncode is None, f"{name} ended while starting"
                    await asyncio.sleep(0.05)
        yield json.loads((folder / "ingest.ready").read_text())["address"]
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            await process.wait()
