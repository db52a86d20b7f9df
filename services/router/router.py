"""Finds logs and brokers in the topology, and joins each log with each broker shard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterator
from typing import Any, NamedTuple

from libs.serving.peers.calls import PeerFailed
from libs.serving.peers.channels import Channels, Connection
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.telemetry import Telemetry
from libs.storage.errors import StorageError
from services.router.brokers import BrokerLink
from services.router.metrics import Metrics, RouteLag, Tracing, measure_shards
from services.router.pieces import PieceLimits
from services.router.reserve import is_first
from services.router.tails import Buffer, Log
from slatemq._byte_budget import ByteBudget
from slatemq._cancelling import end_all
from slatemq.errors import Unavailable

log = logging.getLogger(__name__)

SEARCH_MS = 250
"""How often to look for processes while an instance starts: until a log and a broker are known, and
for `LOOK_AGAIN_MS` after each that is new, since others come at about the same time."""

LOOK_AGAIN_MS = 10_000
"""How often to look for new ones, which are rare, once it has started."""

REFRESH_SECONDS = 2.0
"""How long Explain waits for a broker's newest configs before it goes by the last ones known."""


class Progress(NamedTuple):
    ingest_shard: int
    broker_shard: int
    cursor: int
    durable_sequence: int
    pending_count: int
    is_current: bool


class Router:
    """All logs and brokers of one router process.

    Attributes:
        logs: By ingest shard.
        links: By broker shard.
        shard_counts: How many shards the topology has, by their service: serving, down or without
            a process, but neither removed nor given up. Empty until it was read.
    """

    def __init__(
        self,
        directory: TopologyDirectory,
        channels: Channels,
        telemetry: Telemetry,
        *,
        ingest_shards: frozenset[int] | None = None,
        limits: PieceLimits | None = None,
        buffer: Buffer | None = None,
        look_again_ms: int = LOOK_AGAIN_MS,
        number: int = 0,
    ) -> None:
        """Route these logs (None: all there are); nothing runs before `run`.

        `number` is this router's in the topology.
        New processes are looked for every `look_again_ms`, and more often while some come; what is
        known of them is that old.
        """
        self.logs: dict[int, Log] = {}
        self.links: dict[int, BrokerLink] = {}
        self.shard_counts: dict[str, int] = {}
        self._linked: dict[int, asyncio.Task[None]] = {}
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._directory = directory
        self._channels = channels
        self._ingest_shards = ingest_shards
        self._limits = limits or PieceLimits()
        self._buffer = buffer or Buffer()
        self._budget = ByteBudget(self._buffer.total_bytes_max)
        self._metrics = Metrics(telemetry, self._lags, self._has_queue)
        measure_shards(telemetry, lambda: self.shard_counts)
        self._tracing = Tracing(telemetry)
        self._look_again_ms = look_again_ms
        self._number = number
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Route until cancelled. Raises only what is a fault of ours."""
        self._broken = asyncio.get_running_loop().create_future()
        searching = self._start(self._search())
        try:
            await asyncio.shield(self._broken)
        finally:
            await end_all([searching, *self._tasks])

    @property
    def buffered_bytes(self) -> int:
        """About what the messages take that are not assigned yet."""
        return self._budget.used_bytes

    @property
    def is_routing(self) -> bool:
        """Whether every log and broker known is read and sent to, and there are some of both."""
        return (
            bool(self.logs and self.links)
            and all(known.is_read for known in self.logs.values())
            and all(link.is_live for link in self.links.values())
        )

    def progress(self) -> Iterator[Progress]:
        """How far each log is routed to each broker shard, in order of both."""
        for ingest_shard, known in sorted(self.logs.items()):
            for broker_shard, link in sorted(self.links.items()):
                route = link.route(ingest_shard)
                if route is not None:
                    # What a broker has assigned is durable, even if the log has not said so yet.
                    durable = max(known.durable_sequence, route.cursor)
                    yield Progress(
                        ingest_shard,
                        broker_shard,
                        route.cursor,
                        durable,
                        route.pending_count,
                        known.is_current,
                    )

    async def refresh_rules(self) -> list[int]:
        """Learn every broker's newest configs; returns the shards of those that did not answer.

        Raises:
            Unavailable: No broker's configs are known.
        """
        links = sorted(self.links.items())
        found = await asyncio.gather(
            *(link.refresh_rules(REFRESH_SECONDS) for _, link in links), return_exceptions=True
        )
        silent = []
        for (shard, _), failure in zip(links, found, strict=True):
            if isinstance(failure, PeerFailed):
                silent.append(shard)
            elif failure is not None:
                raise failure
        if not any(link.is_known for link in self.links.values()):
            raise Unavailable("no broker's queues are known yet", reason="QUEUES_UNKNOWN")
        return silent

    async def _search(self) -> None:
        now_s, started_at_s = asyncio.get_running_loop().time, 0.0
        while True:
            is_started = self.logs and self.links and now_s() >= started_at_s
            every_ms = self._look_again_ms if is_started else min(SEARCH_MS, self._look_again_ms)
            try:
                topology = await self._directory.read(every_ms)
                await self._drop_removed(topology.brokers)
                await self._drop_removed_logs(topology.ingests)
            except StorageError as error:
                log.warning("the topology cannot be read: %s", error)
            else:
                if await self._add(list(topology.ingests), list(topology.brokers)):
                    started_at_s = now_s() + self._look_again_ms / 1000
                self._share(topology.shards("router").keys())
                self.shard_counts = {
                    service: len(topology.shards(service)) for service in ("ingest", "broker")
                }
            await asyncio.sleep(every_ms / 1000)

    async def _drop_removed(self, brokers: Collection[int]) -> None:
        """Route no more to broker shards that were removed. Raises StoreUnavailable."""
        for shard in [one for one in self.links if one not in brokers]:
            # An entry may also be damaged, or gone by mistake.
            if await self._directory.is_removed("broker", shard):
                await self._drop_link(shard)
                log.info("broker shard %d was removed", shard)

    async def _drop_link(self, broker_shard: int) -> None:
        task, link = self._linked.pop(broker_shard), self.links.pop(broker_shard)
        task.cancel()
        await asyncio.wait([task])
        link.close()

    async def _drop_removed_logs(self, ingests: Collection[int]) -> None:
        """Read the logs of removed ingest shards no more. Raises StoreUnavailable.

        All links are made again, without them: that is rare, and takes what a start takes.
        """
        gone = [one for one in self.logs if one not in ingests]
        removed = [one for one in gone if await self._directory.is_removed("ingest", one)]
        if not removed:
            return
        for broker_shard in list(self.links):
            await self._drop_link(broker_shard)
        for shard in removed:
            watching = self._watching.pop(shard)
            watching.cancel()
            await asyncio.wait([watching])
            del self.logs[shard]
            log.info("ingest shard %d was removed", shard)

    async def _add(self, ingests: list[int], brokers: list[int]) -> bool:
        """Take in processes that are new; returns whether there are any.

        In steps: a thousand logs on their way to a hundred brokers take seconds.
        """
        count = len(self.logs) + len(self.links)
        for shard in ingests:
            wanted = self._ingest_shards is None or shard in self._ingest_shards
            if wanted and shard not in self.logs:
                self.logs[shard] = Log(
                    shard,
                    Connection(self._channels, "ingest", shard),
                    self._start,
                    self._buffer,
                    self._budget,
                )
                for link in self.links.values():
                    link.add_log(self.logs[shard])
                self._watching[shard] = self._start(self.logs[shard].watch())
                await asyncio.sleep(0)
        for shard in brokers:
            if shard not in self.links:
                link = BrokerLink(
                    shard,
                    Connection(self._channels, "broker", shard),
                    self._start,
                    self._limits,
                    self._metrics,
                    self._tracing,
                )
                self.links[shard] = link
                for known in self.logs.values():
                    link.add_log(known)
                self._linked[shard] = self._start(link.run())
                await asyncio.sleep(0)
        return len(self.logs) + len(self.links) > count

    def _share(self, routers: Collection[int]) -> None:
        """Leave logs to their first routers."""
        for shard, known in self.logs.items():
            known.is_first = is_first(self._number, routers, shard)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of the router; its failure, which none expects, is the router's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._broken is None or self._broken.done():
            return
        error = task.exception()
        if error is not None:
            self._broken.set_exception(error)

    def _has_queue(self, queue_id: str) -> bool:
        return any(queue_id in link.rules.queue_ids for link in list(self.links.values()))

    def _lags(self) -> Iterator[RouteLag]:
        for one in self.progress():
            link = self.links.get(one.broker_shard)  # It may be gone: metrics have a thread.
            route = None if link is None else link.route(one.ingest_shard)
            oldest_ms = None if route is None else route.oldest_received_ms
            is_behind = one.cursor < one.durable_sequence
            yield RouteLag(
                one.ingest_shard, one.broker_shard, one.pending_count, oldest_ms, is_behind
            )
