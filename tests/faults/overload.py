"""Five times what a stack can take: it refuses, keeps its promises, and recovers by itself.

An ingest that waits for a slow store (S3 behind a proxy that delays each request) is offered more
and more. First calls come one at a time; then as many as it can take, which is its capacity; then
five times as many, whether they are answered or not, by clients that do not wait when they are
asked to; then few again. Each request is written down, as in every history: what was answered must
come once, and what was refused never.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Final, cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status.rpc_status import from_call

import slatemq
from slatemq.errors import SlateMQError
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc
from tests.faults.faulty_store import Fault, faulty_store
from tests.faults.mixed_work import SLEWED_MS, judged
from tests.faults.recorded import RecordedClient, Recorder, key_of
from tests.faults.shard_processes import Member
from tests.faults.verified import faults_of
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url
from tests.memory_bounds import MIB, STATED

HISTORY: Final = "history.jsonl"
QUEUE: Final = "all"
TIMES: Final = 5
STORE_DELAY_S: Final = 0.5
UNCOMMITTED_BYTES: Final = 1 << 20
"""The ingest refuses beyond that; the least that the setting permits."""

MESSAGES: Final = 25
"""In a request."""

PADDING: Final = "x" * 4000

RATE_MAX: Final = UNCOMMITTED_BYTES / (MESSAGES * len(PADDING)) / STORE_DELAY_S
"""Requests in a second that are about the most that this ingest can accept: each waits for the
store at least once, and only so many bytes may wait."""

CLOSED_CALLS: Final = 24
CALL_S: Final = 30.0

LATENCY_RATIO: Final = 5.0
"""Of an accepted call under overload, the 99th percentile, to that at capacity."""

GOODPUT: Final = 0.3
"""Of its capacity, what a stack that is overloaded must still accept."""

RECOVERED_RATIO: Final = 3.0
"""Of a call afterwards, the median, to one before."""

STALLED_S: Final = 120.0


@dataclass
class Phase:
    """What became of the requests of a while.

    Attributes:
        unexplained: How many of those refused say nothing of when to come again.
        others: Codes of other failures.
    """

    name: str
    seconds: float
    offered: int = 0
    accepted: int = 0
    refused: int = 0
    unexplained: int = 0
    others: list[str] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests accepted in a second."""
        return self.accepted / self.seconds

    def percentile(self, share: int) -> float:
        """Of the latencies of what was accepted, in ms."""
        return quantiles(self.latencies_ms, n=100)[share - 1]

    def __str__(self) -> str:
        latency = "no latency"
        if len(self.latencies_ms) > 1:
            latency = f"p50 {self.percentile(50):.0f} ms, p99 {self.percentile(99):.0f} ms"
        return (
            f"{self.name}: {self.offered / self.seconds:.1f} requests/s offered, "
            f"{self.rate:.1f} accepted, {self.refused} refused, {latency}"
        )


class Publishers:
    """Calls of an ingest, each written down."""

    def __init__(self, recorder: Recorder, channel: grpc.aio.Channel) -> None:
        self._recorder = recorder
        self._stub: Any = ingest_pb2_grpc.IngestServiceStub(channel)
        self._number = 0
        self.answered: set[str] = set()

    async def publish(self, phase: Phase) -> bool:
        """One request; returns whether it was accepted."""
        self._number += 1
        process = f"publisher-{self._number}"
        keys = [f"{self._number}/{n}" for n in range(MESSAGES)]
        run = ingest_pb2.PublishRun(
            payloads=[json.dumps({"key": key, "padding": PADDING}).encode() for key in keys]
        )
        asked = {"messages": [{"key": key, "headers": {}} for key in keys]}
        phase.offered += 1
        self._recorder.line(process, "invoke", "publish", asked)
        began = time.monotonic()
        try:
            answer = await self._stub.Publish(ingest_pb2.PublishRequest(runs=[run]), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            kind = "fail" if _note(phase, error) else "info"
            self._recorder.line(process, kind, "publish", {})
            return False
        self._recorder.line(process, "ok", "publish", {"ids": list(answer.message_ids)})
        phase.accepted += 1
        phase.latencies_ms.append((time.monotonic() - began) * 1000)
        self.answered.update(keys)
        return True

    async def calm(self, name: str, seconds: float) -> Phase:
        """One call at a time."""
        phase = Phase(name, seconds)
        end = time.monotonic() + seconds
        while _goes_on(phase, end):
            await self.publish(phase)
        return phase

    async def closed(self, name: str, seconds: float) -> Phase:
        """As much as is accepted: calls that follow one another, and wait when they are refused."""
        phase = Phase(name, seconds)
        end = time.monotonic() + seconds

        async def caller() -> None:
            while _goes_on(phase, end):
                if not await self.publish(phase):
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(caller() for _ in range(CLOSED_CALLS)))
        return phase

    async def open(self, name: str, rate: float, seconds: float) -> Phase:
        """So many requests a second, whatever becomes of them."""
        phase = Phase(name, seconds)
        began = time.monotonic()
        calls: list[asyncio.Task[bool]] = []
        passed = 0.0
        while passed < seconds:
            await asyncio.sleep(0.01)
            passed = time.monotonic() - began
            due = int(min(passed, seconds) * rate)
            calls += [asyncio.create_task(self.publish(phase)) for _ in range(due - len(calls))]
        await asyncio.gather(*calls)
        return phase

    async def until_accepted(self, name: str) -> Phase:
        """One call at a time, until one is accepted; gives up where none is for long."""
        began = time.monotonic()
        phase = Phase(name, STALLED_S)
        while not await self.publish(phase) and time.monotonic() - began < STALLED_S:
            await asyncio.sleep(0.05)
        phase.seconds = time.monotonic() - began
        return phase


def _goes_on(phase: Phase, end: float) -> bool:
    """Whether a phase is not over: until its end, and until something was accepted."""
    late_s = time.monotonic() - end
    return late_s < 0 or (not phase.accepted and late_s < STALLED_S)


def _note(phase: Phase, error: grpc.aio.AioRpcError) -> bool:
    """Count a failure; returns whether the request was refused, and so did nothing."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        phase.others.append(error.code().name)
        return False
    phase.refused += 1
    status = from_call(cast("grpc.Call", error))
    kind = error_details_pb2.RetryInfo.DESCRIPTOR
    phase.unexplained += status is None or not any(one.Is(kind) for one in status.details)
    return True


async def _consume(client: RecordedClient, finished: set[str]) -> None:
    while True:
        try:
            messages = await client.claim(QUEUE, 500, lease_s=60)
            results = await client.ack([one.lease_token for one in messages]) if messages else []
        except SlateMQError:
            await asyncio.sleep(0.1)
            continue
        for one, error in zip(messages, results, strict=True):
            if error is None:
                finished.add(key_of(one.payload))


class _StoredMember(Member):
    """A member whose data are at a URL."""

    def __init__(self, folder: Path, service: str, root: str, *arguments: str) -> None:
        super().__init__(folder, service, 0, *arguments)
        self._root = root

    @property
    def root(self) -> str:
        return self._root

    @property
    def peak_bytes(self) -> int:
        """The most memory that its process has had."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise RuntimeError(f"{self.name} has no memory")


@asynccontextmanager
async def _stack(folder: Path, root: str) -> AsyncIterator[list[_StoredMember]]:
    bound = ("--uncommitted-bytes-max", str(UNCOMMITTED_BYTES))
    members = [
        _StoredMember(folder, "ingest", root, *bound),
        _StoredMember(folder, "broker", root),
        _StoredMember(folder, "router", root),
    ]
    try:
        await asyncio.gather(*(one.start() for one in members))
        yield members
    finally:
        await asyncio.gather(*(one.close() for one in members))


async def _run(folder: Path, root: str, seconds: float) -> tuple[list[Phase], dict[str, int]]:
    recorder = Recorder(folder / HISTORY)
    async with (
        _stack(folder, root) as members,
        slatemq.connect(members[1].address) as public,
        grpc.aio.insecure_channel(members[0].address) as channel,
    ):
        client = RecordedClient(recorder, "main", public)
        await client.note_clock(SLEWED_MS)
        await client.create_queue(QUEUE, "true")
        publishers = Publishers(recorder, channel)
        finished: set[str] = set()
        consuming = asyncio.create_task(_consume(client.named("consumer"), finished))
        phases = [await publishers.calm("before", seconds / 3)]
        phases.append(await publishers.closed("at capacity", seconds / 2))
        # What is measured while the machine is busy elsewhere may be far below the capacity.
        rate = max(TIMES * phases[-1].rate, 2 * RATE_MAX)
        phases.append(await publishers.open(f"{TIMES} times as much", rate, seconds))
        phases.append(await publishers.until_accepted("recovering"))
        phases.append(await publishers.calm("afterwards", seconds / 3))
        await _drained(publishers.answered, finished)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        await client.drain(QUEUE)
        peaks = {one.service: one.peak_bytes for one in members}
    recorder.close()
    return phases, peaks


async def _drained(answered: set[str], finished: set[str]) -> None:
    """Wait until all is consumed, or nothing moves."""
    count, moved_at = len(finished), time.monotonic()
    while not answered <= finished and time.monotonic() - moved_at < STALLED_S:
        if len(finished) != count:
            count, moved_at = len(finished), time.monotonic()
        await asyncio.sleep(0.1)


def run_overload(folder: Path, seconds: float, *, timed: bool = True) -> list[str]:
    """The faults of a stack under five times of its capacity for `seconds`, and of its history.

    Unless `timed`, how long calls take is no fault: phases of seconds are no measurement where
    other work comes and goes beside them.
    """
    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with moto() as port, faulty_store(port) as store:
        store.set(Fault(delay_s=STORE_DELAY_S))
        url = root_url(store.port, "overload")
        phases, peaks = asyncio.run(_run(folder, url, seconds))
        store.set()
        found = faults_of(url)
    for phase in phases:
        print(phase, flush=True)
    for service, peak in peaks.items():
        print(f"{service}: {peak / MIB:.0f} MiB at most, of {STATED[service] / MIB:.0f} stated")
        if peak > STATED[service]:
            found.append(f"{service} took {peak / MIB:.0f} MiB")
    if timed:
        found += _slow(phases)
    return [*found, *_faults(phases), *judged(folder / HISTORY)]


def _faults(phases: list[Phase]) -> list[str]:
    """What the phases should not show."""
    *_, over, _, after = phases
    found = [f"{one.name}: {one.others[:3]}" for one in phases if one.others]
    if not over.refused:
        found.append("nothing was refused: it was no overload")
    found += [
        f"{one.name}: {one.unexplained} were refused without RetryInfo"
        for one in phases
        if one.unexplained
    ]
    found += [f"nothing was accepted: {one}" for one in phases if not one.accepted]
    if after.refused:
        found.append(f"it has not recovered: {after}")
    return found


def _slow(phases: list[Phase]) -> list[str]:
    """What took longer than it should, in comparison."""
    before, capacity, over, _, after = phases
    found = []
    if over.percentile(99) > LATENCY_RATIO * capacity.percentile(99):
        found.append(f"accepted calls took {over.percentile(99):.0f} ms under overload")
    if over.rate < GOODPUT * capacity.rate:
        found.append(f"only {over.rate:.1f} of {capacity.rate:.1f} requests/s were accepted")
    if after.percentile(50) > RECOVERED_RATIO * before.percentile(50):
        found.append(f"it is slower than before: {after}")
    return found
