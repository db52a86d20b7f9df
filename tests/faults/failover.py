"""Shards with a standby each, whose owners are killed, stopped and frozen while messages flow.

The gap is what a client sees: from the signal until a message that it publishes after it has been
stored, routed, claimed and acked. It is connected before; how it finds the new owner is its matter.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.serving.process.exits import EXIT_CLEAN, EXIT_FENCED
from libs.serving.process.health import REASON_KEY, STANDING_BY
from slatemq.errors import SlateMQError
from tests.faults.mixed_work import LEASE_S, Work
from tests.faults.recorded import key_of
from tests.faults.shard_processes import START_SECONDS, ZOMBIE_SECONDS, Member
from tests.faults.zombies import run_history

PROBES: Final = "probes"
PROBE: Final = {"kind": "probe", "class": "1", "parity": "odd"}
"""Headers of the messages whose way is timed."""

LOOK_S: Final = 0.02
END_S: Final = 60.0

KILLED: Final = "killed"
GAP_P99_S: Final = 5.0
"""What is promised of owners that are killed."""

TAKING: Final = b"the owner of the shard is silent: taking the shard"
"""What a standby says when it replaces an owner."""

REPLACED_SHARE_MAX: Final = 0.1
REPLACED_ALWAYS: Final = 2
"""How many owners a standby may replace that were not ended, as a share of the mishaps; and in
short runs. A busy machine keeps one waiting for seconds now and then."""

SERVING, WAITING, NEITHER = "serving", "waiting", "neither"


Gaps = dict[tuple[str, str], list[float]]


@dataclass
class Failovers:
    """What came of a run.

    Attributes:
        gaps_s: By service and what was done to its owner, in the order of the mishaps.
        replaced_count: How many owners a standby replaced that nothing had been done to.
    """

    work: Work
    gaps_s: Gaps
    replaced_count: int

    def slow(self) -> list[str]:
        """What took clients longer than is promised."""
        gaps_s = [gap for (_, what), gaps in self.gaps_s.items() for gap in gaps if what == KILLED]
        p99_s = percentile(gaps_s, 0.99)
        return [f"the p99 of kills is {p99_s:.2f} s"] if p99_s > GAP_P99_S else []

    def replaced(self) -> list[str]:
        """Whether standbys replaced more living owners than a busy machine explains."""
        mishaps_count = sum(map(len, self.gaps_s.values()))
        if self.replaced_count <= max(REPLACED_ALWAYS, REPLACED_SHARE_MAX * mishaps_count):
            return []
        return [f"{self.replaced_count} living owners were replaced in {mishaps_count} mishaps"]

    def table(self) -> str:
        """One line for each service and mishap: how many, and the gaps in seconds."""
        lines = [f"{'owner of':9} {'was':8} {'times':>5} {'p50':>6} {'p99':>6} {'max':>6}  (s)"]
        for (service, what), gaps in sorted(self.gaps_s.items()):
            p50, p99 = (percentile(gaps, share) for share in (0.5, 0.99))
            lines.append(
                f"{service:9} {what:8} {len(gaps):5} {p50:6.2f} {p99:6.2f} {max(gaps):6.2f}"
            )
        return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all is at or below."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


class Side(Member):
    """One of the two processes of a shard: its owner, or its standby.

    Attributes:
        began: What its process was, once it was started.
    """

    began = NEITHER

    def __init__(self, folder: Path, service: str, side: int, through: Sequence[str]) -> None:
        super().__init__(folder, service, 0, "--standby")
        self._side = side
        self._through = through
        self._said_before = 0

    @property
    def name(self) -> str:
        return f"{self.service}-{self.shard}-{'ab'[self._side]}"

    @property
    def program(self) -> Sequence[str]:
        return "-m", *self._through, f"services.{self.service}"

    @property
    def has_taken(self) -> bool:
        """Whether its process has found the owner silent, and replaced it."""
        return TAKING in self.log.read_bytes()[self._said_before :]

    async def start(self, ports: Sequence[int] = ()) -> None:
        """Start it, and wait until it owns the shard or waits for it."""
        self.log.touch()
        self._said_before = self.log.stat().st_size
        await self.begin(ports)
        self.address, self.peer_address = (f"127.0.0.1:{port}" for port in self.ports)
        async with asyncio.timeout(START_SECONDS):
            while (state := await self.state()) == NEITHER:
                self.check_running()
                await asyncio.sleep(LOOK_S)
        self.began = state

    async def state(self) -> str:
        """What its health says now."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            try:
                answer = await call
            except grpc.RpcError:
                return NEITHER
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return SERVING
            reasons = dict(await call.trailing_metadata())
        return WAITING if reasons.get(REASON_KEY) == STANDING_BY else NEITHER


class Pair:
    """A shard with a standby.

    Attributes:
        replaced_count: How often one of them was replaced that nothing had been done to.
    """

    def __init__(self, folder: Path, service: str, through: Sequence[str]) -> None:
        self.service = service
        self.replaced_count = 0
        self.sides = [Side(folder, service, side, through) for side in range(2)]

    def other(self, side: Side) -> Side:
        """The side that is not this one."""
        (other,) = (one for one in self.sides if one is not side)
        return other

    async def owner(self) -> Side:
        """The side that serves, once one does."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                for side in self.sides:
                    if await side.state() == SERVING:
                        return side
                await asyncio.sleep(LOOK_S)

    async def restart_fenced(self) -> None:
        """Start again what was replaced meanwhile: the machine kept it waiting for seconds."""
        for side in self.sides:
            if not side.runs and await side.ended() == EXIT_FENCED:
                self.replaced_count += 1
                await self.restart(side)

    async def restart(self, side: Side) -> None:
        """Start a side that has ended; it waits then, unless the owner is silent just now.

        Raises RuntimeError where it took the shard from an owner that was not, or that goes on.
        """
        await side.start(side.ports)
        if side.began == WAITING:
            return
        if not side.has_taken:
            raise RuntimeError(f"{side.name} was started as a standby, and is {side.began}")
        owner = self.other(side)
        async with asyncio.timeout(ZOMBIE_SECONDS):
            code = await owner.ended()
        if code != EXIT_FENCED:
            raise RuntimeError(f"{owner.name} was replaced, and ended with {code}")

    async def end_owner(self, how: str) -> tuple[Side, asyncio.Task[int]]:
        """Kill, stop or freeze the owner; returns it, and what ends with its exit code."""
        owner = await self.owner()
        number = {KILLED: signal.SIGKILL, "stopped": signal.SIGTERM, "frozen": signal.SIGSTOP}
        process = owner.send(number[how])
        return owner, asyncio.create_task(_code_of(process))


async def _code_of(process: asyncio.subprocess.Process) -> int:
    return int(await process.wait())


class Probes:
    """The client whose gaps are measured."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._client = work.client.named("prober")
        self._numbers = itertools.count()

    async def begin(self) -> None:
        await self._client.create_queue(PROBES, f'headers.kind == "{PROBE["kind"]}"')

    async def end(self) -> None:
        await self._client.drain(PROBES)

    async def gap_s(self) -> float:
        """How long it takes from now until a message has gone all the way."""
        began = time.monotonic()
        while not (key := await self._published()):
            await asyncio.sleep(LOOK_S)
        while not await self._acked(key):
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - began

    async def _published(self) -> str:
        """The key of a new message; empty where its publish was not answered."""
        key = f"probe-{next(self._numbers)}"
        try:
            await self._client.publish([{"key": key, "headers": PROBE, "delay_ms": 0}])
        except SlateMQError:
            return ""
        self._work.note_answered(key, PROBE)
        return key

    async def _acked(self, key: str) -> bool:
        """Claim what is there, and ack it. Returns whether this one was among it."""
        try:
            messages = await self._client.claim(PROBES, 10, lease_s=LEASE_S)
            errors = await self._client.ack([one.lease_token for one in messages])
        except SlateMQError:
            return False
        acked = [one for one, error in zip(messages, errors, strict=True) if error is None]
        return key in {key_of(one.payload) for one in acked}


async def run_failovers(
    folder: Path, kills: int, others: int, seed: int, through: Sequence[str] = ()
) -> Failovers:
    """Owners that end `kills` times by a kill, and `others` times each by a stop and a freeze.

    A module of `through` runs that of the owners and standbys, whose name is its argument. Raises
    RuntimeError where a process ends as it should not.
    """
    pairs = [Pair(folder, service, through) for service in ("ingest", "broker")]
    members = [
        *(pair.sides[0] for pair in pairs),
        *(Member(folder, "router", shard) for shard in range(2)),
    ]
    random_ = random.Random(seed)
    hows = [KILLED] * kills + ["stopped", "frozen"] * others
    random_.shuffle(hows)
    gaps_s: Gaps = defaultdict(list)

    async def mishaps(work: Work) -> None:
        standbys = [pair.sides[1] for pair in pairs]
        try:
            await asyncio.gather(*(side.start() for side in standbys))
            probes = Probes(work)
            await probes.begin()
            await probes.gap_s()
            for number, how in enumerate(hows):
                # Each in turn, so that both get as many.
                pair = pairs[number % len(pairs)]
                gap_s = await _fail_over(pair, how, probes)
                gaps_s[pair.service, how].append(gap_s)
                print(f"{pair.service} {how}: {gap_s:.2f} s", flush=True)
                await asyncio.sleep(random_.uniform(0.2, 1.0))
            await probes.end()
            for pair in pairs:
                await pair.restart_fenced()
        finally:
            await asyncio.gather(*(side.close() for side in standbys))

    work = await run_history(folder, members, members[1], mishaps, seed=seed)
    return Failovers(work, gaps_s, sum(pair.replaced_count for pair in pairs))


async def _fail_over(pair: Pair, how: str, probes: Probes) -> float:
    """End the owner, measure the gap, and start it again; the one that it was is a standby then."""
    await pair.restart_fenced()
    former, ending = await pair.end_owner(how)
    gap_s = await probes.gap_s()
    if how == "frozen":
        former.send(signal.SIGCONT)
    async with asyncio.timeout(END_S):
        code = await ending
    expected = {KILLED: -signal.SIGKILL, "stopped": EXIT_CLEAN, "frozen": EXIT_FENCED}[how]
    if code != expected:
        # One that stood still may be replaced before the signal, or before it says that it stops.
        if code != EXIT_FENCED or not pair.other(former).has_taken:
            raise RuntimeError(f"{former.name} ended with {code}, not {expected}")
        pair.replaced_count += 1
    await pair.restart(former)
    return gap_s
