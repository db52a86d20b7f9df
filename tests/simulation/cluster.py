"""The processes of an instance in a simulated world, each on a machine of its own.

A process runs the code that `python -m services.…` runs behind its settings: it joins the
instance, serves by `RunningService`, and is started again after it ended, unless it was fenced.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from libs.events.settings import QueueSettings
from libs.serving.process import ownership, standby
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import EXIT_FAILED, EXIT_FENCED, EXIT_STORE_DOWN
from libs.serving.process.instance import StatedSetting, join_instance
from libs.serving.server import RunningService, Signals
from libs.serving.service import Service
from libs.serving.telemetry import Telemetry
from libs.storage.errors import StorageError
from libs.storage.objects.instance_records import InstanceRecords
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from services.router.config import RouterConfig
from services.router.service import RouterProcess
from tests.simulation import servers
from tests.simulation import store as stores
from tests.simulation.loop import MACHINE, Machine, WorldLoop
from tests.simulation.network import Network
from tests.simulation.store import SimulatedRoot, SimulatedStore

log = logging.getLogger(__name__)

GRACE_S: Final = 1
"""For how long something must have been over before it is removed."""

STORE_FAILURES: Final = ("writing to ", "making a commit of ", "the database is closed: ")
"""How the message of an owner begins that could not store something, and must be started again."""

RESTART_S: Final = 0.5
"""Between the end of a process and its next life, in the mean."""

_SERVICES: Final[Mapping[str, tuple[Callable[..., ServingConfig], Callable[..., Service[Any]]]]] = {
    "ingest": (IngestConfig, IngestProcess),
    "broker": (BrokerConfig, BrokerService),
    "router": (RouterConfig, RouterProcess),
}


@dataclass(eq=False)
class Process:
    """One service of the instance through its lives.

    Attributes:
        port: Where clients reach it, in every life.
        lives: How often it was started.
        exits: The codes with which it ended by itself.
        machine: Of its present life.
        service: The object of its present life, once it has joined the instance.
        stands_by: Whether each life waits while another process has the shard.
        wall_offset_s: How far the wall clock of its machines is ahead of the world's.
    """

    kind: str
    shard: int
    port: int
    lives: int = 0
    exits: list[int] = field(default_factory=list)
    machine: Machine | None = None
    running: asyncio.Task[Any] | None = None
    service: Any = None
    wall_offset_s: float = 0.0
    stands_by: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.shard}"


class Cluster:
    """All that an instance consists of.

    Attributes:
        processes: Those that are to run.
        by_machine: Those that have a machine now.
        protection: Settings of access control; empty: there is none.
        clients: The machines of clients.
        story: What happened, a line each; with its time.
    """

    def __init__(
        self, seed: str, window_s: int = 0, event_queues: QueueSettings | None = None
    ) -> None:
        """`window_s`: how far back queues may start, and how long what none needs is kept."""
        self.window_s = window_s
        self._event_queues = event_queues
        self.loop = WorldLoop(seed)
        self.network = Network(self.loop, seed)
        self.store = SimulatedStore(self.loop, seed)
        self.processes: list[Process] = []
        self.by_machine: dict[Machine, Process] = {}
        self.protection: Mapping[str, str] = {}
        self.clients: list[Machine] = []
        self.story: list[str] = []
        self._chance = random.Random(f"{seed}/cluster")
        self._machines = 0
        self._lives: list[RunningService] = []
        _install(self.network)

    def tell(self, line: str) -> None:
        self.story.append(f"{self.loop.time():10.6f} {line}")
        log.info("%s", self.story[-1])

    def machine(self, name: str) -> Machine:
        """A new machine; its name gets a number, so that links to an earlier one are others."""
        self._machines += 1
        return Machine(self.loop, f"{name}.{self._machines}")

    def client_machine(self, name: str) -> Machine:
        self.clients.append(self.machine(name))
        return self.clients[-1]

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{process.port}" for process in self.processes]

    @property
    def takeovers(self) -> int:
        """How often a standby took the shard of an owner that was silent."""
        standbys = (life._standby for life in self._lives)
        return sum(standby is not None and standby.has_replaced for standby in standbys)

    def add(self, kind: str, shard: int, *, stands_by: bool = False) -> Process:
        process = Process(kind, shard, self.network.free_port(), stands_by=stands_by)
        self.processes.append(process)
        self.start(process)
        return process

    def start(self, process: Process) -> None:
        process.lives += 1
        process.service = None
        if process.machine is not None:
            del self.by_machine[process.machine]
        machine = process.machine = self.machine(process.name)
        self.by_machine[machine] = process
        machine.wall_offset_s = process.wall_offset_s
        self.tell(f"{machine.name} starts")
        process.running = machine.run(self._live(process), process.name)
        process.running.add_done_callback(
            lambda done: self._ended(process, machine, done), context=self.loop.world.context
        )

    async def _live(self, process: Process) -> int:
        config_type, build = _SERVICES[process.kind]
        root = SimulatedRoot(self.store)
        config: Any = config_type(root=stores.ADDRESS.url, port=process.port, shard=process.shard)
        try:
            instance = await join_instance(InstanceRecords(root.objects), self._settings())
        except StorageError as error:
            self.tell(f"{process.name} could not join: {error}")
            return EXIT_STORE_DOWN
        config = replace(
            config,
            queue=self._event_queues,
            instance=instance.settings,
            instance_number=instance.number,
            **self.protection,
            **({"standby": True} if process.stands_by else {}),
        )
        telemetry = Telemetry()
        process.service = build(config, telemetry, root)
        running = RunningService(process.service, config, telemetry)
        self._lives.append(running)
        cause = await running.run(Signals())
        self.tell(f"{process.name} ends: {cause.event}: {cause.message}")
        is_of_store = cause.code == EXIT_FAILED and cause.message.startswith(STORE_FAILURES)
        if cause.code not in (EXIT_FENCED, EXIT_STORE_DOWN) and not is_of_store:
            self.loop.faults.append(f"{process.name} ends: {cause.event}: {cause.message}")
        return cause.code

    def _settings(self) -> list[StatedSetting]:
        if not self.window_s:
            return [StatedSetting("replay_window_s", 0, "the world")]
        return [
            StatedSetting("replay_window_s", self.window_s, "the world"),
            StatedSetting("purge_grace_s", GRACE_S, "the world"),
        ]

    def _ended(self, process: Process, machine: Machine, done: asyncio.Future[int]) -> None:
        """A life has ended by itself."""
        if done.cancelled() or not machine.is_alive:
            return
        error = done.exception()
        if error is not None:
            self.loop.faults.append(f"{machine.name} raised {error!r}")
        process.exits.append(EXIT_FAILED if error is not None else done.result())
        machine.crash()
        self.network.machine_ended(machine)
        if process.exits[-1] == EXIT_FENCED and not process.stands_by and self._others(process):
            self.processes.remove(process)
            self.tell(f"{machine.name} was fenced, and stays down")
            return
        self._start_later(process)

    def crash(self, process: Process) -> None:
        """End its present life between two steps, as by SIGKILL; it starts again."""
        machine = process.machine
        if machine is None or not machine.is_alive:
            return
        self.tell(f"{machine.name} crashes")
        machine.crash()
        self.network.machine_ended(machine)
        self._start_later(process)

    def replace(self, process: Process) -> None:
        """Start another process for the same shard while this one runs, perhaps standing still.

        A shard with standbys has one already.
        """
        if not process.stands_by:
            self.tell(f"another process takes {process.name}")
            self.add(process.kind, process.shard)

    def _others(self, process: Process) -> list[Process]:
        """Other processes for its shard that run, or stand still."""
        return [
            one
            for one in self.processes
            if one is not process
            and one.name == process.name
            and one.machine is not None
            and one.machine.is_alive
        ]

    def _start_later(self, process: Process) -> None:
        self.loop.call_later(
            self._chance.uniform(0.2, 2.0) * RESTART_S,
            self._start_again,
            process,
            context=self.loop.world.context,
        )

    def _start_again(self, process: Process) -> None:
        if not process.stands_by and self._others(process):
            self.processes.remove(process)  # A supervisor for each shard, and no more.
        elif process.machine is None or not process.machine.is_alive:
            self.start(process)


def _install(network: Network) -> None:
    servers.install(network)
    stores.install()

    def probe(address: str, _: object) -> str:
        server = network.servers.get(address)
        return "" if server is not None and server.is_listening else f"{address}: refused"

    async def listens(address: str, timeout_s: float) -> bool | None:
        server = network.servers.get(address)
        if server is not None and not network.answers(MACHINE.get().name, server.machine.name):
            await asyncio.sleep(timeout_s)
            return None
        # A machine that stands still takes connections, but for its process.
        return server is not None and server.machine.is_alive and server.is_listening

    of_owners: Any = ownership
    of_owners.probe = probe
    of_standbys: Any = standby
    of_standbys.listens = listens
