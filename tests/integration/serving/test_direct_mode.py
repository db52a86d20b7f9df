"""Direct mode costs nothing: a service that has no event queues loads nothing of them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import CoroutineType, FrameType

import pytest

from tests.integration.ingest.server import ROOT, serving

pytestmark = pytest.mark.slow
"""Each starts a process, 0.7 s."""

BACKENDS = {"aio_pika", "aiokafka", "cloudevents", "proton", "redis", "ulid"}
PROGRAM = """\
import atexit, pathlib, runpy, sys
out = pathlib.Path(sys.argv.pop(1))
atexit.register(lambda: out.write_text(" ".join(sys.modules)))
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""
WAIT_S = 60

ASKS = re.compile(r"config\.queue\b|consistency|_relay\b|libs\.events")
TASK_AND_EVENT_FILES = {
    file.relative_to(ROOT)
    for pattern in ("tasks/*.py", "events/*.py", "rpc/queued.py")
    for file in (ROOT / "services" / "ingest").glob(pattern)
}


def loaded(folder: Path, service: str, *arguments: str) -> set[str]:
    """The modules that a service loads until it serves and ends."""
    ready, modules = folder / "ready", folder / "modules"
    program = PROGRAM.replace("sys.argv[1]", repr(f"services.{service}"))
    command = [sys.executable, "-c", program, str(modules)]
    command += ["--root", (folder / "data").as_uri(), "--ready-file", str(ready)]
    command += ["--parent-pid", str(os.getpid()), *arguments]
    process = subprocess.Popen(command)
    try:
        until = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, "ended while starting"
            assert time.monotonic() < until, "does not serve"
            time.sleep(0.02)
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    found = set(modules.read_text().split())
    assert f"services.{service}.config" in found
    return found


@pytest.mark.parametrize("service", ["ingest", "broker", "router", "janitor"])
def test_a_service_without_settings_of_event_queues_loads_nothing_of_them(
    tmp_path: Path, service: str
) -> None:
    modules = loaded(tmp_path, service)

    assert {name for name in modules if name.startswith("libs.events")} == set()
    assert {name.partition(".")[0] for name in modules} & (BACKENDS | {"msgspec"}) == set()
    # Nor of HTTP
    assert {"aiohttp", "prometheus_client"} & modules == set()


def test_a_service_with_event_queues_turned_off_loads_their_settings_alone(tmp_path: Path) -> None:
    config = tmp_path / "slatemq.yaml"
    config.write_text("queue:\n  enabled: false\n  backend: redis\n")

    modules = loaded(tmp_path, "ingest", "--config", str(config))

    ours = {name for name in modules if name.startswith("libs.events")}
    assert ours == {"libs.events", "libs.events.settings"}
    assert {name.partition(".")[0] for name in modules} & BACKENDS == set()


async def test_an_ingest_in_direct_mode_has_no_task_for_events() -> None:
    async with serving():
        files = {
            coroutine.cr_code.co_filename
            for coroutine in (task.get_coro() for task in asyncio.all_tasks())
            if isinstance(coroutine, CoroutineType)
        }
    modules = {str(Path(file).relative_to(ROOT)) for file in files if file.startswith(str(ROOT))}
    assert "libs/storage/database/commits.py" in modules
    assert not {name for name in modules if name.startswith("libs/events/") or "event" in name}


async def test_a_publish_in_direct_mode_meets_nothing_that_asks_for_event_queues() -> None:
    async with serving() as ingest:
        await ingest.send(b"one that loads and caches what is loaded and cached once")
        files: set[str] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                files.add(frame.f_code.co_filename)

        sys.setprofile(note)
        try:
            await ingest.send(b"a", b"b", queue="orders")
        finally:
            sys.setprofile(None)

    ran = {Path(file).relative_to(ROOT) for file in files if file.startswith(f"{ROOT}/services")}
    assert {"ingest.py", "publishing.py"} < {file.name for file in ran}
    assert Path("services/ingest/rpc/queued.py") in TASK_AND_EVENT_FILES
    # Neither code of event queues, nor a branch on their settings
    assert not ran & TASK_AND_EVENT_FILES
    assert [file for file in ran if ASKS.search((ROOT / file).read_text())] == []
