"""A janitor as a process that may be killed, and what it has started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers.channels import open_channel
from libs.storage.database.roots import open_root
from slatemq.v1 import janitor_pb2, janitor_pb2_grpc
from tests.integration.cli.ready_command import REACH
from tests.integration.ingest.server import ROOT
from tests.integration.janitor.runs.mark import MARK, NAME_BYTES_MAX
from tests.made_instances import make_instance
from tests.ready_process import create_subprocess

Run = janitor_pb2.Run

WAIT_S = 240.0
"""Far above what anything takes, a Spark on a loaded machine included."""

QUIET = (
    *("--retention-schedule", "", "--unreferenced-schedule", ""),
    *("--done-schedule", ""),
)
"""No schedule."""


class Janitor:
    """One janitor process. All that it starts, and they start, bears its mark.

    Attributes:
        temporary: The folder for temporary files, which all janitors of an instance share.
    """

    def __init__(self, folder: Path, *arguments: str, own_jobs: bool = True) -> None:
        self.temporary = folder / "tmp"
        self.mark = uuid.uuid4().hex
        self.log = folder / f"janitor-{self.mark[:6]}.log"
        self._ready = folder / f"janitor-{self.mark[:6]}.ready"
        module = "tests.integration.janitor.runs.own_janitor" if own_jobs else "services.janitor"
        self._url = (folder / "data").as_uri()
        self._command = [sys.executable, "-m", module, "--root", self._url]
        self._command += ["--ready-file", str(self._ready), *arguments]
        self._begin: Any = create_subprocess if own_jobs else asyncio.create_subprocess_exec
        self.process: Any = None
        self.channel: Any = None
        self.address = self.http_address = ""

    async def start(self) -> None:
        # The servers of tests make databases and no instance, without which no process starts.
        await make_instance(open_root(self._url))
        self.temporary.mkdir(exist_ok=True)
        temporary = {"TMPDIR": str(self.temporary)}
        environ = {**os.environ, **temporary, MARK: self.mark, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = await self._begin(
                *self._command, cwd=ROOT, env=environ, stdout=log, stderr=log
            )
        await until(lambda: self._ready.exists() or self.process.returncode is not None)
        assert self._ready.exists(), self.log.read_text()
        facts = json.loads(self._ready.read_text())
        self.address, self.http_address = facts["address"], facts.get("http_address", "")
        self.channel = open_channel(self.address, deadline_seconds=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await self.channel.channel_ready()

    async def refused(self) -> int:
        """Starts it where it is to end at once; gives its exit code."""
        with pytest.raises(AssertionError):
            await self.start()
        return await self.ended()

    @property
    def environ(self) -> dict[str, str]:
        """What a command finds in its environment."""
        return {**os.environ, "SLATEMQ_ENDPOINT": self.address, REACH: str(WAIT_S)}

    @property
    def stub(self) -> Any:
        return janitor_pb2_grpc.JanitorServiceStub(self.channel)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        assert self.process is not None
        return int(await asyncio.wait_for(self.process.wait(), WAIT_S))

    async def run(self, job: str, *queues: str, **rest: Any) -> str:
        """Begins a run; gives its ID."""
        request = janitor_pb2.RunJobRequest(job=job, queue_ids=queues, **rest)
        return str((await self.stub.RunJob(request)).run.run_id)

    async def get(self, run_id: str) -> Run:
        answer = await self.stub.GetRun(janitor_pb2.GetRunRequest(run_id=run_id))
        return answer.run  # type: ignore[no-any-return]

    async def cancel(self, run_id: str) -> Run:
        answer = await self.stub.CancelRun(janitor_pb2.CancelRunRequest(run_id=run_id))
        return answer.run  # type: ignore[no-any-return]

    async def watched(self, run_id: str, enough: Callable[[Run], bool]) -> Run:
        """The run once it is as wanted, or has ended."""
        request = janitor_pb2.WatchRunRequest(run_id=run_id)
        async with asyncio.timeout(WAIT_S):
            async for answer in self.stub.WatchRun(request):
                if enough(answer.run):
                    break
        return answer.run  # type: ignore[no-any-return]

    async def done(self, run_id: str) -> Run:
        return await self.watched(run_id, lambda run: run.ended_at_ms > 0)

    async def under_way(self, run_id: str) -> Run:
        run = await self.watched(run_id, lambda run: run.HasField("progress"))
        assert run.state == Run.STATE_RUNNING, run
        return run

    def started(self, name: str = "") -> list[int]:
        """Processes that bear its mark, itself aside; of one program or of all."""
        assert self.process is not None
        return [pid for pid in marked(self.mark, name) if pid != self.process.pid]

    def files(self) -> list[str]:
        """What is in its folder for temporary files."""
        return os.listdir(self.temporary)

    async def close(self) -> None:
        if self.channel is not None:
            await self.channel.close()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def janitor(folder: Path, *arguments: str, **rest: Any) -> AsyncIterator[Janitor]:
    """A janitor below this folder, without a schedule unless given; killed at the end."""
    one = Janitor(folder, *(arguments or QUIET), **rest)
    try:
        await one.start()
        yield one
    finally:
        await one.close()


def marked(mark: str, name: str = "") -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            stat = (folder / "stat").read_text()
            program, state = (
                stat[stat.index("(") + 1 : stat.rindex(")")],
                stat[stat.rindex(")") + 2],
            )
            environ = (folder / "environ").read_bytes()
            bears = f"{MARK}={mark}".encode() in environ or program == mark[:NAME_BYTES_MAX]
            if bears and state != "Z" and name in ("", program):
                found.append(int(folder.name))
    return found


async def until(come_about: Callable[[], object], seconds: float = WAIT_S) -> None:
    async with asyncio.timeout(seconds):
        while not come_about():
            await asyncio.sleep(0.02)
