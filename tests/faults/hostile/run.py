"""All of it against one stack, and the verdict."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.serving import limits
from tests.faults.hostile import floods, http1, pages
from tests.faults.hostile.calls import Calls
from tests.faults.hostile.generated import generate
from tests.faults.hostile.http2 import Port
from tests.faults.hostile.raw_calls import RawCalls
from tests.faults.hostile.rpcs import KINDS
from tests.faults.hostile.state import StateRun
from tests.faults.hostile.target import Target, running
from tests.faults.hostile.witness import Witness

FULL_REQUESTS: Final = 100_000
"""Of the full form: scale 1."""

RAW_SHARE: Final = 0.05
STATE_SHARE: Final = 0.02
"""The shares of requests that are made by hand, and in compared batches."""

BEFORE: Final = 50
DURING: Final = 5
"""Messages of the witness before the attacks, and after the last of them."""

MEBIBYTE: Final = 1 << 20

GROWTH_BYTES_MAX: Final = (
    4 * limits.REQUESTS_BYTES_MAX
    + (2 * limits.ARRIVING_AT_ONCE + limits.PASSED_OVER_AT_ONCE) * limits.PAYLOAD_BYTES_MAX
    + limits.STREAMS_LASTING_BYTES_MAX
)
"""By how much a process may grow meanwhile: large requests in work, those that are arriving, and
streams, each at the limit that `libs/serving/limits.py` states."""

LEFT_BYTES_MAX: Final = 128 * MEBIBYTE
"""By how much it may be larger afterwards: caches that filled, and what malloc keeps in pieces."""

SETTLED_S: Final = 60.0

SLOWER_MAX: Final = 40
"""How much slower the witness's median message may be while the stack is attacked from the same
machine, whose processors both share."""

QUIET_MS_MIN: Final = 10.0
"""What its median message counts as before, at least: a quiet machine takes a few milliseconds."""

HEALTH_S: Final = 30.0

SHED_PAUSE_S: Final = 0.05
"""Before a check that was cancelled is made again."""


@dataclass
class Verdict:
    """What came of a run.

    Attributes:
        form: `plain` or `secured`.
        seed: With the numbers, it says what was sent.
        counts: What was done.
        codes: How often each status came.
        memory: By service in MiB: before, at the most, afterwards.
        latency_ms: Medians of the witness: before, and meanwhile; and its slowest message.
        faults: What must not be.
        repeat: How to repeat those of single requests.
    """

    form: str
    seed: int
    seconds: float = 0
    counts: dict[str, object] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    repeat: list[str] = field(default_factory=list)


class Hostile:
    """One run against one stack."""

    def __init__(self, target: Target, seed: int, requests: int, first: int, quiet: bool) -> None:
        self._target = target
        self._requests = requests
        self._first = first
        self._quiet = quiet
        self._scale = requests / FULL_REQUESTS
        self._calls = Calls(target, seed)
        self._raw = RawCalls(seed)
        self._chance = random.Random(f"floods {seed}")
        self._state = StateRun(target, self._calls, seed)
        self._pids = target.pids
        self._peak = self._before = target.memory_bytes()
        self._witness: Witness
        self._shed = 0
        form = "plain" if target.secured is None else "secured"
        self.verdict = Verdict(form, seed)

    async def run(self, *, only_requests: bool) -> Verdict:
        began = time.monotonic()
        await self._start_witness()
        await self._witness.count(BEFORE)
        quiet_ms = statistics.median(self._witness.latencies_ms)
        watching = asyncio.create_task(self._watch())
        try:
            if not only_requests:
                await self._by_hand_and_state()
            await self._calls.make(range(self._first, self._first + self._requests), self._progress)
            if not only_requests:
                await self._floods()
            await self._witness.count(DURING)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await self._witness.stop()
        await self._settle()
        self._judge(quiet_ms)
        self.verdict.seconds = round(time.monotonic() - began, 1)
        return self.verdict

    async def _start_witness(self) -> None:
        secured = self._target.secured
        self._witness = await Witness.start(
            self._target.stack.endpoint,
            f"witness-{self._chance.randrange(1 << 30):x}",
            secured.certificates / "ca.crt" if secured else None,
            secured.tokens["ops"].token if secured else "",
        )

    async def _by_hand_and_state(self) -> None:
        ports = [port for (_, door), port in self._target.ports.items() if door != "http"]
        each = max(4, int(self._requests * RAW_SHARE) // len(ports))
        self._say(f"{each * len(ports)} calls by hand")
        async with asyncio.TaskGroup() as group:
            for place, port in enumerate(ports):
                numbers = range(place * each, (place + 1) * each)
                group.create_task(self._raw.make(port, numbers))
        count = max(50, int(self._requests * STATE_SHARE))
        self._say(f"{count} requests in batches, compared")
        await self._state.run(count, FULL_REQUESTS * 10)

    async def _floods(self) -> None:
        """Each attack at a port of each door."""
        ports = self._target.ports
        for name, attack in floods.ATTACKS.items():
            for door in ("clients", "services"):
                await self._flood(name, attack, ports[self._chance.choice(KINDS), door])
            if ("scaler", "clients") in ports:
                await self._flood(name, attack, ports["scaler", "clients"])
        for name, attack in http1.ATTACKS.items():
            await self._flood(name, attack, ports[self._chance.choice(KINDS), "http"])
        for name, attack in pages.ATTACKS.items():
            await self._flood(name, attack, ports["console", "pages"])

    async def _flood(self, name: str, attack: floods.Attack, port: Port) -> None:
        began = time.monotonic()
        try:
            what = await attack(port, self._scale, self._chance)
        except (OSError, TimeoutError, AssertionError) as error:
            what = f"{type(error).__name__}: {error}"
            self._fault(f"{name} at {port.service}, {port.door}: {what}")
        served = await self._serves(name, port)
        took = time.monotonic() - began
        self._say(f"{name} at {port.service}, {port.door}: {what}; {took:.1f} s, {served}")

    async def _serves(self, name: str, port: Port) -> str:
        """Whether the process answers others, and the witness goes on."""
        door = "clients" if port.door == "http" else port.door
        began = time.monotonic()
        try:
            if door == "pages":
                assert await pages.serves(port), "no page"
            else:
                channel = self._target.channel(port.service, door)
                await self._check(health_pb2_grpc.HealthStub(channel))
            await self._witness.count(1)
        except Exception as error:
            self._fault(f"after {name} at {port.service}, {port.door}: {error!r}")
        return f"served others within {time.monotonic() - began:.1f} s"

    async def _check(self, stub: Any) -> None:
        """Check the health of a process, again where gRPC has cancelled the call, as clients do.

        Its core cancels new calls of all connections while more than a thousand wait to be taken.
        """
        request = health_pb2.HealthCheckRequest()
        async with asyncio.timeout(HEALTH_S):
            while True:
                try:
                    await stub.Check(request, timeout=HEALTH_S, wait_for_ready=True)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.CANCELLED:
                        raise
                self._shed += 1
                await asyncio.sleep(SHED_PAUSE_S)

    def _look_for_ends(self) -> None:
        for kind, pid in self._target.pids.items():
            if pid != self._pids[kind]:
                self._pids[kind] = pid
                said = (self._target.stack.folder / "launcher.err").read_text().splitlines()
                why = " | ".join(line for line in said if line.startswith(f"slatemq: {kind} "))
                self._fault(f"{kind} ended and was started again: {why}")

    async def _watch(self) -> None:
        while True:
            self._look_for_ends()
            now = self._target.memory_bytes()
            self._peak = {kind: max(self._peak[kind], now[kind]) for kind in now}
            await asyncio.sleep(0.5)

    async def _settle(self) -> None:
        """Wait until memory is given back, or it is clear that it is not."""
        end = time.monotonic() + SETTLED_S
        while time.monotonic() < end:
            now = self._target.memory_bytes()
            if all(now[kind] <= self._before[kind] + LEFT_BYTES_MAX for kind in now):
                return
            await asyncio.sleep(0.5)

    def _judge(self, quiet_ms: float) -> None:
        verdict, witness = self.verdict, self._witness
        during = witness.latencies_ms[BEFORE:]
        for number, fault in self._calls.faults:
            self._fault(fault)
            verdict.repeat.append(f"--seed {verdict.seed} --first {number} --requests 1")
        for fault in [*self._raw.faults, *self._state.faults, *witness.faults]:
            self._fault(fault)
        after = self._target.memory_bytes()
        for kind in after:
            if not after[kind]:
                self._fault(f"{kind} is gone")
            sizes = [self._before[kind], self._peak[kind], after[kind]]
            verdict.memory[kind] = [size // MEBIBYTE for size in sizes]
            if sizes[1] > sizes[0] + GROWTH_BYTES_MAX:
                self._fault(f"{kind} grew by {(sizes[1] - sizes[0]) // MEBIBYTE} MiB")
            if sizes[2] > sizes[0] + LEFT_BYTES_MAX:
                self._fault(f"{kind} keeps {(sizes[2] - sizes[0]) // MEBIBYTE} MiB")
        verdict.latency_ms = {
            "before": round(quiet_ms, 1),
            "meanwhile": round(statistics.median(during), 1),
            "slowest": round(max(during), 1),
        }
        if statistics.median(during) > SLOWER_MAX * max(quiet_ms, QUIET_MS_MIN):
            self._fault(
                f"messages take {verdict.latency_ms['meanwhile']} ms, {quiet_ms:.0f} before"
            )
        verdict.codes = dict(self._calls.codes.most_common())
        verdict.counts = {
            "requests": sum(self._calls.sorts.values()),
            "by_hand": sum(self._raw.ends.values()),
            "by_hand_ends": dict(sorted(self._raw.ends.items())),
            "sorts": dict(self._calls.sorts.most_common()),
            "batches_compared": self._state.compared,
            "batches_taken": self._state.taken,
            "witnessed": len(witness.latencies_ms),
            "checks_cancelled": self._shed,
        }

    def _fault(self, text: str) -> None:
        self.verdict.faults.append(text)
        self._say(f"FAULT {text}")

    def _progress(self, done: int) -> None:
        if done % 5_000 == 0:
            mebibytes = {
                kind: size // MEBIBYTE for kind, size in self._target.memory_bytes().items()
            }
            self._say(f"{done} requests, {len(self._calls.faults)} faults, {mebibytes} MiB")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


async def run_hostile(
    folder: Path,
    *,
    seed: int,
    requests: int,
    secured: bool,
    first: int = 0,
    quiet: bool = False,
    ready: bool = False,
) -> Verdict:
    """One run on a stack of its own. A single request is repeated alone, without floods."""
    async with running(folder, secured=secured, ready=ready) as target:
        if requests == 1:
            one = generate(seed, first, target.proofs)
            print(f"{one.rpc.path} of {one.kind}, {one.door}, {one.sort}, proof {one.proof!r}")
            print(f"{one.metadata} {[message[:200] for message in one.messages]}")
        hostile = Hostile(target, seed, requests, first, quiet)
        return await hostile.run(only_requests=requests == 1)
