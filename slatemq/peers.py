"""Finding the processes of an instance from one address, and calling them until they answer."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from slatemq.errors import (
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.models import Topology
from slatemq.rpc_status import STATUS_DETAILS_KEY, from_rpc_error
from slatemq.v1 import queue_pb2, queue_pb2_grpc, topology_pb2, topology_pb2_grpc

T = TypeVar("T")

CALL_S = 30.0
"""How long a call is tried before it fails; a setting of the client."""

ATTEMPT_S = 10.0
"""How long one try of a call may take, its own waiting aside."""

BACKOFF_S = 0.05
BACKOFF_S_MAX = 1.0

CONNECT_S = 5.0
"""How long `connect` waits for an address that does not answer."""

REACH_S = 3.0
"""How long `connect` goes on with an address that refuses: its process may be starting again."""

WAITED_S = 1.0
"""A try that is to wait and failed later than this had reached somebody."""

REFRESH_S = 0.25
"""While somebody is away, the topology is read again this often at most."""

LOOK_UP_S = 2.0
"""How long one process may take to tell the topology, when there are others to ask."""

HOPELESS = frozenset({"MESSAGE_TOO_LARGE", "SHARD_FULL"})
"""Bounds that the same request will meet again."""

_OPTIONS = [
    # Messages may have 64 MiB of payload and 33 MiB of headers: the server bounds them.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # In truth how long one try to connect may take: a far or busy server needs a while to answer.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A stream may wait for messages for hours: it must find out when the other side is gone.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # Ours know which calls may be repeated.
    ("grpc.use_local_subchannel_pool", 1),
]


class Peers:
    """The channels of one client, on one event loop of one process."""

    def __init__(self, endpoint: str, call_s: float = CALL_S) -> None:
        """Ask `endpoint` first; try each call for at most `call_s` seconds."""
        self.call_s = call_s
        self._endpoint = endpoint
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._topology: Topology | None = None
        self._stale = True
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._broker_of: dict[str, int] = {}
        self._closed = False
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def endpoint(self) -> str:
        """The address that the client was given."""
        return self._endpoint

    def check_home(self) -> None:
        """Raises RuntimeError in a forked process or another loop, Unavailable after `close`.

        Without it a call from there would wait for ever for an answer that somebody else gets.
        """
        if self._closed:
            raise closed()
        if self._pid != os.getpid():
            raise RuntimeError(
                "this client was made before a fork; make one in each process, after the fork"
            )
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError(
                    "this client belongs to another event loop; make one in each loop, "
                    "or use slatemq.sync from threads"
                )
            self._loop = loop

    def at(self, address: str) -> grpc.aio.Channel:
        """The channel to an address."""
        if self._closed:
            raise closed()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return channel

    async def close(self) -> None:
        """Closes all channels; calls that are under way raise Unavailable (CLIENT_CLOSED)."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    # --- Topology -----------------------------------------------------------

    async def topology(self) -> Topology:
        """Where everybody is; asked once, and again after `forget`.

        Where nobody tells, the addresses known so far are the best guess. Raises Unavailable
        when there never were any.
        """
        self.check_home()
        if self._topology is not None and not self._must_ask():
            return self._topology
        async with self._asking:
            if self._topology is None or self._must_ask():
                try:
                    self._topology = await self._ask_topology()
                    self._stale = False
                except (Unavailable, DeadlineExceeded):
                    if self._topology is None or self._closed:
                        raise
                finally:
                    self._asked_at = time.monotonic()
            return self._topology

    async def reach(self) -> None:
        """Finds out where everybody is. Raises Unavailable when nobody is there for `REACH_S`."""
        until = time.monotonic() + min(REACH_S, self.call_s)
        pause = BACKOFF_S
        while True:
            try:
                await self.topology()
            except Unavailable:
                if self._closed or time.monotonic() + pause >= until:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, BACKOFF_S_MAX / 2)
            else:
                return

    def _must_ask(self) -> bool:
        return self._stale and time.monotonic() - self._asked_at >= REFRESH_S

    def forget(self) -> None:
        """Somebody is away or has moved: ask again before the next call."""
        self._stale = True

    async def fresh_topology(self) -> Topology:
        """Where everybody is, asked now. Raises Unavailable when nobody tells."""
        self.check_home()
        async with self._asking:
            self._topology = await self._ask_topology()
            self._stale = False
            return self._topology

    async def _ask_topology(self) -> Topology:
        known = [self._endpoint]
        if self._topology is not None:
            told = self._topology
            for addresses in (told.ingests, told.brokers, told.routers, told.janitors):
                known += addresses.values()
        problem: SlateMQError | None = None
        for address in dict.fromkeys(known):
            try:
                return await self._ask(address, LOOK_UP_S if len(known) > 1 else CONNECT_S)
            except SlateMQError as error:
                if self._closed:
                    raise
                problem = problem or error
        assert problem is not None, "there is at least one address to ask"
        if isinstance(problem, Unavailable | DeadlineExceeded):
            raise Unavailable(
                f"{self._endpoint} is not reachable: {problem.message}", reason="UNREACHABLE"
            ) from problem
        raise problem

    async def _ask(self, address: str, timeout: float) -> Topology:
        stub = topology_pb2_grpc.TopologyServiceStub(self.at(address))
        with errors_translated():
            told = await self.unless_closed(
                stub.GetTopology(topology_pb2.GetTopologyRequest(), timeout=timeout)
            )
        return Topology(
            {peer.shard: peer.address for peer in told.ingests},
            {peer.shard: peer.address for peer in told.brokers},
            {peer.shard: peer.address for peer in told.routers},
            {peer.shard: peer.address for peer in told.janitors},
        )

    async def ingest_shards(self) -> list[int]:
        """The ingest shards, in ascending order."""
        return sorted((await self.topology()).ingests)

    def ingests_at_hand(self) -> Sequence[int]:
        """The ingest shards known last, in ascending order, without asking; empty = none."""
        return [] if self._topology is None else sorted(self._topology.ingests)

    def ingest_at_hand(self, shard: int) -> grpc.aio.Channel | None:
        """The channel to an ingest shard; None where it would have to be asked for."""
        if self._topology is None or self._stale or self._closed:
            return None
        address = self._topology.ingests.get(shard)
        return None if address is None else self.at(address)

    async def broker_shards(self) -> list[int]:
        """The broker shards, in ascending order."""
        return sorted((await self.topology()).brokers)

    async def ingest(self, shard: int) -> grpc.aio.Channel:
        """The channel to an ingest shard; raises Unavailable when nobody knows it."""
        return self._of("ingest", (await self.topology()).ingests, shard)

    async def broker(self, shard: int) -> grpc.aio.Channel:
        """The channel to a broker shard; raises Unavailable when nobody knows it."""
        return self._of("broker", (await self.topology()).brokers, shard)

    async def router(self) -> grpc.aio.Channel:
        """The channel to any router; raises Unavailable when nobody knows one."""
        routers = (await self.topology()).routers
        return self._of("router", routers, random.choice(sorted(routers)) if routers else 0)

    async def janitor(self) -> grpc.aio.Channel:
        """The channel to a janitor; raises Unavailable when nobody knows one."""
        janitors = (await self.topology()).janitors
        return self._of("janitor", janitors, random.choice(sorted(janitors)) if janitors else 0)

    def _of(self, service: str, addresses: Any, shard: int) -> grpc.aio.Channel:
        if shard not in addresses:
            self.forget()
            raise Unavailable(f"no {service} {shard} is known", reason="PEER_UNKNOWN")
        return self.at(addresses[shard])

    # --- Queues -------------------------------------------------------------

    async def broker_of(self, queue_id: str) -> int:
        """The broker shard of a queue, found by asking; raises NotFound."""
        shards = await self.broker_shards()
        if len(shards) == 1:
            return shards[0]
        known = self._broker_of.get(queue_id)
        if known is not None:
            return known
        missing: NotFound | None = None
        for shard in shards:
            stub = queue_pb2_grpc.QueueServiceStub(await self.broker(shard))
            try:
                await stub.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue_id), timeout=ATTEMPT_S)
            except grpc.RpcError as error:
                told = from_rpc_error(error)
                if not isinstance(told, NotFound):
                    raise told from error
                missing = told
            else:
                self._broker_of[queue_id] = shard
                return shard
        raise missing or NotFound("queue", queue_id)

    def moved(self, queue_id: str) -> None:
        """A queue is not where it was: ask again."""
        self._broker_of.pop(queue_id, None)

    # --- Calls --------------------------------------------------------------

    async def ask_broker(
        self, shard: int, stub_of: Callable[[grpc.aio.Channel], Any], method: str, request: Any
    ) -> Any:
        """One call to this broker. Raises as `call`."""

        async def attempt(timeout: float) -> Any:
            stub = stub_of(await self.broker(shard))
            return await getattr(stub, method)(request, timeout=timeout)

        return await self.call(attempt)

    async def ask_whoever_has(
        self, resource: str, name: str, ask: Callable[[int], Awaitable[T]]
    ) -> tuple[T, int]:
        """The answer of the one broker that knows what is so named, and its shard.

        Raises as `ask`, and NotFound when none knows it.
        """
        for shard in await self.broker_shards():
            try:
                return await ask(shard), shard
            except NotFound as error:
                if error.resource_type != resource:
                    raise
        raise NotFound(resource, name)

    async def call(
        self,
        attempt: Callable[[float], Awaitable[T]],
        *,
        call_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
        wait_s: float = 0.0,
        repeat_unknown: bool = True,
    ) -> T:
        """Tries a call until it answers, is refused, or the time is over.

        `attempt` gets its timeout in seconds. Tries again after Unavailable and ResourceExhausted;
        with `repeat_unknown` also where the outcome is unknown, which only a call may want that
        does no harm twice. `wait_s`: how long the server itself may wait before it answers; a
        failure after some of that is a new outage, and has the whole time again.
        """
        self.check_home()
        call_s = self.call_s if call_s is None else call_s
        until = time.monotonic() + call_s
        limit = until + wait_s
        backoff = BACKOFF_S
        while True:
            began = time.monotonic()
            left = limit - began
            try:
                with errors_translated():
                    return await self.unless_closed(attempt(max(min(attempt_s, left), 0.001)))
            except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                if self._closed or error.reason in HOPELESS:
                    raise
                problem = error
            if not isinstance(problem, ResourceExhausted):
                self.forget()
                if not repeat_unknown:
                    raise problem
            if wait_s and time.monotonic() - began >= WAITED_S:
                until = min(limit, time.monotonic() + call_s)
            # Never sooner than asked, and not everybody at the same moment.
            asked = getattr(problem, "retry_after_ms", 0) / 1000
            pause = max(asked, backoff * random.uniform(0.5, 1.0)) + asked * random.uniform(0, 0.2)
            if time.monotonic() + pause >= until:
                raise problem
            await asyncio.sleep(pause)
            backoff = min(backoff * 2, BACKOFF_S_MAX)

    async def unless_closed(self, work: Awaitable[T]) -> T:
        """The result; closing the channels cancels calls, which must not look like a cancel."""
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise closed() from None
            raise


def closed() -> Unavailable:
    """What calls get after the client was closed."""
    return Unavailable("the client is closed", reason="CLIENT_CLOSED")


@contextmanager
def errors_translated() -> Iterator[None]:
    """Within it a failed call raises an error of slatemq.errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise translated(error) from error


def translated(error: grpc.RpcError) -> SlateMQError:
    """The error of a failed call.

    Where gRPC itself says INTERNAL, the connection broke under the call (a stream that ends while
    something is written gets that); a fault of the server comes with details.
    """
    problem = from_rpc_error(error)
    told: Any = error
    told_by_server = any(key == STATUS_DETAILS_KEY for key, _ in told.trailing_metadata() or ())
    if told.code() is grpc.StatusCode.INTERNAL and not told_by_server:
        return Unavailable(problem.message, reason="CONNECTION_BROKEN")
    return problem
