"""One run of a simulated world: from its seed to its verdict."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final, TextIO

from libs.events.settings import Consistency, QueueSettings
from libs.serving.requests import guard
from libs.storage.errors import StorageError
from services.broker.delivery import dispatcher
from slatemq.errors import SlateMQError
from tests.simulation.access import Access
from tests.simulation.broker_clocks import BrokerClocks
from tests.simulation.cluster import Cluster, Process
from tests.simulation.event_judge import EventJudge
from tests.simulation.event_server import EventServer
from tests.simulation.invariants import Invariants
from tests.simulation.janitor import Janitor
from tests.simulation.judge import Apart, Judge, Violated
from tests.simulation.loop import Machine, Stalled
from tests.simulation.operators import Operators
from tests.simulation.workload import (
    BUGS,
    DELAY_MAX_S,
    INGESTS,
    Workload,
    failed,
)

DRAIN_S: Final = 180.0
"""How long all that was published may take to be consumed once nothing is at fault."""

TROUBLED_S: Final = 1800.0
"""How long clients may need for their publishes while there are mishaps."""

STEPS_MAX: Final = 100_000
"""Steps of a world for each message of a producer; twenty times as many as it takes."""

PRODUCERS: Final = 3

WINDOW_S: Final = 5
"""How far back queues may start, in worlds with a janitor."""

ACCESS_SHARE: Final = 0.3
"""Of worlds that have access control."""

STANDBYS_SHARE: Final = 0.3
"""Of worlds in which each shard has two processes, of which one stands by."""

CLOCK_APART_MS: Final = 500
"""By how much more than its steps a clock may be apart where clocks step: owners follow slowly."""

DISPATCHER: Final = dispatcher.__name__
"""It logs with its traceback whatever keeps it from serving a queue."""

GUARD: Final = guard.__name__
"""It logs what it answers as Internal or DataLoss."""

CONSISTENCIES: Final[tuple[Consistency | None, ...]] = (
    *(None, None, "write-through", "fire-and-forget"),
    *("async", "sync"),
)
"""Those of event queues; None: there are none."""


@dataclass(frozen=True)
class Verdict:
    """What a run came to.

    Attributes:
        violation: The rule that was broken; empty: none.
        trace: A hash over all steps: two runs of a seed have the same.
        events: Events that the backend of event queues got, each counted once.
        tasks: Publishes that were tasks there.
        checks: How often the state of a broker was compared with itself.
        purged: Messages that the janitor had deleted.
        queues: The kinds of queues that it had.
        partitioned: Those of them that had partitions.
        has_access: Whether it had access control.
        has_standbys: Whether each shard had a standby.
        takeovers: How often a standby took the shard of a silent owner.
        mishaps: The numbers of those that happened.
    """

    seed: str
    violation: str
    trace: str
    steps: int
    seconds: float
    published: int
    delivered: int
    redelivered: int
    events: int
    tasks: int
    checks: int
    purged: int
    queues: list[str]
    partitioned: list[str]
    has_access: bool
    has_standbys: bool
    takeovers: int
    crashes: int
    mishaps: list[int]
    faults: list[str]
    story: list[str]

    def line(self) -> str:
        """All of it as JSON, without the story of a world that broke no rule."""
        return json.dumps({**asdict(self), "story": self.story if self.violation else []})


class World:
    """One world: what it has, and what goes wrong, follows from its seed.

    Attributes:
        trace: Where each step is written; None: nowhere.
    """

    def __init__(
        self, seed: str, messages: int, mishaps: float = 1.0, without: Collection[int] = ()
    ) -> None:
        """`messages` by each producer; `mishaps` a second, in the mean.

        The mishaps numbered in `without` are left out.
        """
        shape = random.Random(f"{seed}/shape")
        self._has_janitor = shape.random() < 0.5
        self._routers = shape.choice((1, 1, 2, 3))
        # What clocks may be ahead for a while, in seconds; none of them steps in most worlds.
        self._clock_steps = shape.choice(((), (), (-0.8, -0.2, 0.3, 0.8), (-3.0, 0.5, 2.0, 15.0)))
        self._late = shape.choice((0.0, 0.01, 0.05))
        self._consistency = shape.choice(CONSISTENCIES)
        self.cluster = Cluster(
            seed,
            window_s=WINDOW_S if self._has_janitor else 0,
            event_queues=self._event_queues(),
        )
        steps_ms = [int(step_s * 1000) for step_s in self._clock_steps]
        slack_ms = max(map(abs, steps_ms)) + CLOCK_APART_MS if steps_ms else 0
        self.clocks = BrokerClocks(min(steps_ms, default=0), max(steps_ms, default=0))
        self.judge = Judge(slack_ms, self._apart)
        self.events = EventJudge(self.judge, keeps=self._consistency != "fire-and-forget")
        self.backend = EventServer(self.cluster.loop, seed, self.events)
        self.backend.install()
        keeps = self._consistency not in (None, "fire-and-forget")
        self.invariants = Invariants(self.cluster, self.events.landed_up_to if keeps else None)
        self.workload = Workload(self.cluster, self.judge, seed)
        self.operators = Operators(self.cluster, self.judge, self.workload, seed)
        self.janitor = Janitor(self.cluster, seed, self.workload.brokers)
        self.access: Access | None = None
        if random.Random(f"{seed}/has-access").random() < ACCESS_SHARE:
            self.access = Access(self.cluster, self.judge, self.workload, seed)
            self.cluster.protection = self.access.settings
        self._has_standbys = random.Random(f"{seed}/has-standbys").random() < STANDBYS_SHARE
        self.crashes = 0
        self.mishaps: list[int] = []
        self.trace: TextIO | None = None
        self._seed = seed
        self._messages = messages
        self._mishaps = mishaps
        self._without = without
        self._hash = hashlib.blake2b(digest_size=16)
        self._tasks: list[asyncio.Task[None]] = []

    def _event_queues(self) -> QueueSettings | None:
        if self._consistency is None:
            return None
        # The name of any backend: `EventServer` is there in its place.
        return QueueSettings(enabled=True, backend="redis", consistency=self._consistency)

    def run(self) -> Verdict:
        loop = self.cluster.loop
        logging.getLogger().addHandler(_Tracebacks(loop.faults))
        loop.on_step = self._note_step
        asyncio.set_event_loop(loop)
        violation = ""
        try:
            loop.run_until_complete(loop.world.run(self._run(), "world"))
        except (Violated, Stalled) as error:
            violation = str(error)
        except TimeoutError:
            violation = f"the queues are not created after {TROUBLED_S:.0f} s"
        finally:
            if self.access is not None:
                self.access.close()
        return Verdict(
            self._seed,
            violation,
            self._hash.hexdigest(),
            loop.steps,
            loop.time(),
            sum(sent.answered for sent in self.judge.sent.values()),
            self.judge.delivered,
            self.judge.redelivered,
            len(self.events.by_id),
            sum(len(queue.done) for queue in self.backend.tasks.values()),
            self.invariants.checks,
            self.janitor.purged,
            self.workload.names,
            [name for name in self.workload.partitioned if name in self.judge.queues],
            self.access is not None,
            self._has_standbys,
            self.cluster.takeovers,
            self.crashes,
            self.mishaps,
            loop.faults,
            self.cluster.story,
        )

    def _apart(self, queue: str, partition: int | None, since_ms: int) -> Apart:
        return self.clocks.apart(self.workload.places.of(queue, partition), since_ms)

    def _note_step(self, machine: Machine, handle: Any) -> None:
        loop = self.cluster.loop
        if loop.steps > STEPS_MAX * self._messages:
            raise Stalled(f"the world is not over after {loop.steps:,} steps")
        step = f"{loop.time():.9f} {machine.name}"
        self._hash.update(f"{step}\n".encode())
        if self.trace is not None:
            self.trace.write(f"{step} {_place(handle)}\n")
        if machine.name.startswith("broker"):
            self.clocks.look(machine, self.cluster.processes)
        self.invariants.look(machine)

    async def _run(self) -> None:
        cluster, workload = self.cluster, self.workload
        counts = {"ingest": INGESTS, "broker": workload.brokers, "router": self._routers}
        for kind, shards in counts.items():
            for shard in range(shards):
                stands_by = self._has_standbys and kind != "router"
                for _ in range(1 + stands_by):
                    cluster.add(kind, shard, stands_by=stands_by)
        admin = cluster.client_machine("admin")
        async with asyncio.timeout(TROUBLED_S):
            await admin.run(workload.create_queues())
        workload.begin(PRODUCERS, self._messages)
        self.operators.begin()
        if self.access is not None:
            self.access.begin()
        if self._has_janitor:
            self._tasks.append(self.janitor.begin())
        mishaps = asyncio.create_task(self._mishap())
        while not all(task.done() for task in workload.publish_tasks):
            await self._go_on()
            if cluster.loop.time() > TROUBLED_S:
                raise Violated(f"publishing is not over after {TROUBLED_S:.0f} s")
        mishaps.cancel()
        self._make_peace()
        await self._drain()
        workload.stopping = True
        self._check_faults()

    async def _drain(self) -> None:
        """Nothing is at fault any more: all that was answered must come to its end."""
        workload, loop = self.workload, self.cluster.loop
        until_s = loop.time() + DRAIN_S
        self.operators.stopping = True
        while loop.time() < until_s:
            await self._go_on()
            missing = self.judge.missing()
            if "ranked" in workload.names and all(queue == "ranked" for queue, _ in missing):
                await self._rank(len(missing))
                missing = self.judge.missing()
            unsent = self._events_missing()
            if not missing and not unsent:
                return
            workload.calm = loop.time() > until_s - DRAIN_S / 2
        missing.sort(key=lambda one: one[0] == "ranked")  # It was waiting for the others.
        if missing:
            raise Violated(f"{len(missing)} messages were lost, such as {missing[:3]}")
        raise Violated(f"{len(unsent)} events were lost, such as {unsent[:3]}")

    def _events_missing(self) -> list[str]:
        return [] if self._consistency is None else self.events.missing()

    async def _rank(self, count: int) -> None:
        """Consume what was left alone: the most urgent first, whatever else happened meanwhile."""
        workload, loop = self.workload, self.cluster.loop
        if not workload.ranks:
            await asyncio.sleep(DELAY_MAX_S + 1)  # So that none is delayed any more.
            workload.consume("ranked")
        until_s = loop.time() + DRAIN_S
        while len(self.judge.missing()) and loop.time() < until_s:
            await self._go_on()
        if workload.ranks != sorted(workload.ranks):
            raise Violated(f"ranked delivers {count} messages in this order: {workload.ranks}")

    async def _go_on(self) -> None:
        await asyncio.sleep(0.5)
        self._check_faults()

    def _check_faults(self) -> None:
        """Raise what broke a rule, or was not expected, wherever that was."""
        if self.cluster.loop.faults:
            raise Violated(self.cluster.loop.faults[0])
        workload = self.workload
        error = failed(
            [
                *workload.publish_tasks,
                *workload.consume_tasks,
                *self.operators.tasks,
                *(self.access.tasks if self.access is not None else ()),
                *self._tasks,
            ]
        )
        if isinstance(error, Violated):
            raise error
        if error is not None:
            ended = "".join(traceback.format_exception(error))
            raise Violated(f"a client ended: {ended}") from error

    # --- Mishaps ------------------------------------------------------------

    async def _mishap(self) -> None:
        mishaps = [
            *(self._crash, self._crash_after_commit, self._stop, self._cut, self._slow_down),
            *(self._take_store_down, self._lose_requests, self._hamper_store),
        ]
        if self._clock_steps:
            mishaps.append(self._step_clock)
        if self._consistency is not None:
            mishaps += [self._take_backend_down, self._lose_backend_requests]
        for number in count():
            # Of its own, so that the others stay what they are without it.
            chance = random.Random(f"{self._seed}/mishap/{number}")
            await asyncio.sleep(chance.expovariate(self._mishaps))
            mishap = chance.choice(mishaps)
            process = chance.choice(self.cluster.processes)
            if number not in self._without:
                self.mishaps.append(number)
                self.cluster.tell(f"mishap {number}")
                mishap(process, chance)

    def _crash(self, process: Process, chance: random.Random) -> None:
        self.crashes += 1
        self.cluster.crash(process)

    def _crash_after_commit(self, process: Process, chance: random.Random) -> None:
        """It crashes when its next commit has landed, before it learns of that."""
        store = self.cluster.store
        database = f"{process.kind}/{process.shard}"
        if process.kind != "router":
            store.on_append[database] = lambda: self._crash(process, chance)

    def _stop(self, process: Process, chance: random.Random) -> None:
        """It stands still for a while; another may take its shard meanwhile."""
        machine = process.machine
        if machine is None or not machine.is_alive or machine.is_still:
            return
        seconds = chance.choice((0.3, 2.0, 8.0))
        self.cluster.tell(f"{machine.name} stands still for {seconds} s")
        loop = self.cluster.loop
        loop.pause(machine)
        loop.call_later(seconds, loop.resume, machine)
        if process.kind != "router" and seconds > 1 and chance.random() < 0.5:
            self.cluster.replace(process)

    def _cut(self, process: Process, chance: random.Random) -> None:
        """From another process, or from a client, for both ways or for one of them."""
        ends = self._link(process, chance)
        if not ends:
            return
        is_half = chance.random() < 0.4
        seconds = chance.choice((0.5, 3.0, 15.0))
        ways = "is held" if is_half else "and back is held"
        self.cluster.tell(f"what goes from {ends[0]} to {ends[1]} {ways} for {seconds} s")
        self.cluster.network.cut(*ends, is_half=is_half)
        self.cluster.loop.call_later(seconds, self.cluster.network.heal, *ends)

    def _slow_down(self, process: Process, chance: random.Random) -> None:
        """What it and another, or a client, send to one another takes its time for a while."""
        ends = self._link(process, chance)
        if not ends:
            return
        seconds = chance.choice((1.0, 5.0, 15.0))
        self.cluster.tell(f"{ends[0]} and {ends[1]} are slow for {seconds} s")
        self.cluster.network.slow_down(*ends)
        self.cluster.loop.call_later(seconds, self.cluster.network.heal, *ends)

    def _link(self, process: Process, chance: random.Random) -> list[str]:
        """The machines of a process and of something else, in any order; none if one is down."""
        others = [one.machine for one in self.cluster.processes if one is not process]
        ends = [process.machine, chance.choice(chance.choice((others, self.cluster.clients)))]
        chance.shuffle(ends)
        return [end.name for end in ends if end is not None] if None not in ends else []

    def _step_clock(self, process: Process, chance: random.Random) -> None:
        """Its wall clock is wrong for a while."""
        self._set_clock(process, chance.choice(self._clock_steps))
        self.cluster.loop.call_later(chance.uniform(0.5, 20.0), self._set_clock, process, 0.0)

    def _set_clock(self, process: Process, offset_s: float) -> None:
        self.cluster.tell(f"the clock of {process.name} is {offset_s} s ahead")
        process.wall_offset_s = offset_s
        if process.machine is not None:
            process.machine.wall_offset_s = offset_s

    def _take_store_down(self, process: Process, chance: random.Random) -> None:
        # Seldom for so long that its clients give up: nothing else would happen then.
        seconds = chance.choice((0.2, 0.2, 0.5, 0.5, 1.0, 1.0, 3.0, 3.0, 20.0))
        self.cluster.tell(f"the store is down for {seconds} s")
        self.cluster.store.faults.down_until_s = self.cluster.loop.time() + seconds

    def _hamper_store(self, process: Process, chance: random.Random) -> None:
        """One process does not reach the store, or waits long for it; the others have it."""
        if process.machine is None:
            return
        name, faults = process.machine.name, self.cluster.store.faults
        is_down = chance.random() < 0.6
        seconds = chance.choice((0.5, 2.0, 6.0, 20.0))
        self.cluster.tell(f"the store is {'down' if is_down else 'slow'} for {name}, {seconds} s")
        hampered = faults.unreachable_until_s if is_down else faults.slow_until_s
        hampered[name] = self.cluster.loop.time() + seconds
        if process.kind != "router" and is_down and seconds > 1 and chance.random() < 0.5:
            self.cluster.replace(process)

    def _lose_requests(self, process: Process, chance: random.Random) -> None:
        faults = self.cluster.store.faults
        faults.lost_answers = chance.choice((0.0, 0.05, 0.2))
        faults.lost_requests = chance.choice((0.0, 0.05))
        faults.late = self._late

    def _take_backend_down(self, process: Process, chance: random.Random) -> None:
        seconds = chance.choice((0.5, 3.0, 10.0))
        self.cluster.tell(f"the backend of event queues is down for {seconds} s")
        self.backend.faults.down_until_s = self.cluster.loop.time() + seconds

    def _lose_backend_requests(self, process: Process, chance: random.Random) -> None:
        faults = self.backend.faults
        faults.lost_answers = chance.choice((0.0, 0.05, 0.2))
        faults.lost_requests = chance.choice((0.0, 0.05))
        faults.late = chance.choice((0.0, 0.05))

    def _make_peace(self) -> None:
        self.cluster.tell("no mishaps from here on")
        self.cluster.network.heal_all()
        self.cluster.store.faults.clear()
        self.backend.faults.clear()
        self.cluster.store.on_append.clear()
        for process in self.cluster.processes:
            self._set_clock(process, 0.0)
            if process.machine is not None and process.machine.is_still:
                self.cluster.loop.resume(process.machine)


def _place(handle: Any) -> str:
    """What has run: of a task, where it stands now."""
    callback = handle._callback
    work = getattr(callback, "__self__", None)
    if not isinstance(work, asyncio.Task):
        return getattr(callback, "__qualname__", type(callback).__name__)
    coroutine: Any = work.get_coro()
    frame = getattr(coroutine, "cr_frame", None)
    name = getattr(coroutine, "__qualname__", type(coroutine).__name__)
    return f"{name}:{frame.f_lineno if frame is not None else 'ended'}"


class _Tracebacks(logging.Handler):
    """Takes what a service logs of a fault of its own: a traceback, or damaged data."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            if record.name == GUARD:
                self._faults.append(record.getMessage())
            return
        if record.name == DISPATCHER and _is_expected(error):
            return
        text = "".join(traceback.format_exception(error))
        self._faults.append(f"{record.getMessage()}: {text}")


def _is_expected(error: BaseException) -> bool:
    """Whether a store that is down, or another owner, explains that a queue cannot be served."""
    return isinstance(error, StorageError | SlateMQError) and not isinstance(error, BUGS)
