"""Finding the processes of an instance from one address, and calling them until they answer."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import grpc
import grpc.aio

from slatemq._cancelling import is_cancelled
from slatemq._rpc.connecting import Connecting, Proof
from slatemq._rpc.forks import check_can_connect, inherited_client
from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY, fault_of, from_rpc_error
from slatemq._rpc.topology_cache import TopologyCache
from slatemq.errors import (
    DeadlineExceeded,
    ResourceExhausted,
    SlateMQError,
    Unauthenticated,
    Unavailable,
)
from slatemq.models import Topology

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

Method: TypeAlias = "Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[Q, R]]"
"""A method of a service: `lambda channel: QueueServiceStub(channel).GetQueue`."""


class CallOptions(TypedDict, total=False):
    """How long and how often a call is tried; see `Peers.call`."""

    call_s: float | None
    attempt_s: float
    wait_s: float
    repeat_unknown: bool
    on_failure: Callable[[SlateMQError], None] | None


CALL_S = 30.0
"""How long a call is tried before it fails; a setting of the client."""

ATTEMPT_S = 10.0
"""How long one try of a call may take, its own waiting aside."""

CONNECT_S = 5.0
"""How long one try to connect may take: a far or busy server needs a while to answer."""

PING_S = 5.0
"""A connection with calls on it that brings nothing for so long is pinged."""

PING_ANSWER_S = 5.0
"""A ping without an answer for so long ends the connection: the server is frozen or cut off."""

BACKOFF_S = 0.05
BACKOFF_S_MAX = 1.0

LAST_TRY_S = 0.25
"""A last try with less time than this would fail by that, and hide why the one before did."""

REACH_S = 3.0
"""How long `connect` goes on with an address that refuses: its process may be starting again."""

WAITED_S = 1.0
"""A waiting try that failed later than this had reached a server."""

NOT_CONNECTED = "NOT_CONNECTED"
"""The reason of a call that failed before any of it was sent."""

WRONG_SERVICE = "WRONG_SERVICE"
"""The reason of a call that got to a process of another kind."""

PEER_UNKNOWN = "PEER_UNKNOWN"
"""The reason of a call to a shard that the topology lacks."""

PEER_SILENT = "PEER_SILENT"
"""The reason of a call whose server answered no ping: it may have been silent for `SILENCE_S`."""

SILENCE_S = PING_S + PING_ANSWER_S
"""From the last sign of life of a server to the end of an idle connection to it."""

NOT_REACHED = frozenset({NOT_CONNECTED, WRONG_SERVICE})
"""Reasons of calls that did not get to a process of the service."""

NOT_TAKEN = NOT_REACHED | {"STARTING", "STANDBY", "NOT_SERVING"}
"""Reasons of calls that cannot have taken effect: also those that a process gives which lets no
calls in. What ends calls that it has let in has others (DRAINING, STOPPING)."""

QUEUE_MOVING = "QUEUE_MOVING"
"""The reason of a call about a queue that moves to another shard."""

REFUSED = NOT_TAKEN | {QUEUE_MOVING}
"""Reasons of calls about a queue that cannot have changed anything."""

PROOF_RENEWED = "PROOF_RENEWED"
"""The reason of a call's end where the client has another token or certificate by now."""

HOPELESS = frozenset({"MESSAGE_TOO_LARGE", "SHARD_FULL"})
"""Bounds that the same request will meet again."""

_OPTIONS = [
    # Messages may have 64 MiB of payload and 33 MiB of headers: the server bounds them.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),  # In truth that of one try.
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", int(PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(PING_ANSWER_S * 1000)),
    # What ends the connection; 60 s unless it is set.
    ("grpc.http2.ping_timeout_ms", int(PING_ANSWER_S * 1000)),
    # A stream may wait for messages for hours: it must find out when the other side is gone.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # Ours know which calls may be repeated.
    ("grpc.use_local_subchannel_pool", 1),
]


class Peers:
    """The channels of one client, on one event loop of one process."""

    def __init__(
        self,
        addresses: Sequence[str],
        call_s: float = CALL_S,
        connecting: Connecting | None = None,
    ) -> None:
        """Ask these addresses first; try each call for at most `call_s` seconds.

        `connecting` opens the channels. Raises RuntimeError as `check_can_connect`.
        """
        check_can_connect()
        self.call_s = call_s
        self._connecting = connecting or Connecting()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._outdated: list[grpc.aio.Channel] = []
        self._version = self._connecting.version
        self._topology = TopologyCache(addresses, self.at, self._connecting.mismatch)
        self._closed = False
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    def check_home(self) -> None:
        """Raises RuntimeError in a forked process or another loop, Unavailable after `close`.

        Without the check a call from there would wait for ever for its answer.
        """
        if self._closed:
            raise closed()
        if self._pid != os.getpid():
            raise inherited_client()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError(
                    "this client belongs to another event loop; make one in each loop, "
                    "or use slatemq.sync from threads"
                )
            self._loop = loop

    def at(self, address: str) -> grpc.aio.Channel:
        if self._closed:
            raise closed()
        if self._version != self._connecting.version:
            # Calls that are under way go on; new ones connect with the new certificates.
            self._version = self._connecting.version
            self._outdated += self._channels.values()
            self._channels = {}
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connecting.open(address, _OPTIONS)
        return channel

    async def close(self) -> None:
        """Closes all channels; calls that are under way raise Unavailable (CLIENT_CLOSED)."""
        self._closed = True
        channels = [*self._outdated, *self._channels.values()]
        self._channels, self._outdated = {}, []
        for channel in channels:
            await channel.close()
        await self._topology.close()
        # Callbacks of tasks that have just ended refer to channels, and a fork may come next.
        await asyncio.sleep(0)

    # --- Topology -----------------------------------------------------------

    async def topology(self) -> Topology:
        """Where the processes are, as far as it is known. Raises as `TopologyCache.get`."""
        self.check_home()
        return await self._topology.get()

    async def fresh_topology(self) -> Topology:
        """The topology, asked now. Raises as `TopologyCache.fresh`."""
        self.check_home()
        return await self._topology.fresh(is_doubted=True)

    async def reach(self) -> None:
        """Finds out where the processes are. Raises Unavailable when none answers for `REACH_S`."""
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

    def forget(self) -> None:
        """A process is down or has moved: ask again before the next call."""
        self._topology.forget()

    async def ingest_shards(self) -> list[int]:
        """The ingest shards that take publishes, in ascending order."""
        return (await self.topology()).open_ingests

    def known_ingests(self) -> Sequence[int]:
        """Those that take publishes, in ascending order, without asking; empty = none known."""
        known = self._topology.known
        return [] if known is None else known.open_ingests

    def known_ingest(self, shard: int) -> grpc.aio.Channel | None:
        """The channel to an ingest shard; None where it would have to be asked for."""
        known = self._topology.known
        if known is None or self._topology.is_stale or self._closed:
            return None
        address = known.ingests.get(shard)
        return None if address is None else self.at(address)

    async def broker_shards(self) -> list[int]:
        """The broker shards, in ascending order; none where no broker has ever served."""
        return sorted((await self.topology()).brokers)

    async def some_broker_shards(self) -> list[int]:
        """The broker shards, in ascending order. Raises Unavailable when none is known."""
        shards = await self.broker_shards()
        if not shards:
            self.forget()
            raise Unavailable("no broker is known", reason=PEER_UNKNOWN)
        return shards

    async def ingest(self, shard: int) -> grpc.aio.Channel:
        """The channel to an ingest shard; raises Unavailable when it is not known."""
        return self._of("ingest", (await self.topology()).ingests, shard)

    async def broker(self, shard: int) -> grpc.aio.Channel:
        """The channel to a broker shard; raises Unavailable when it is not known."""
        return self._of("broker", (await self.topology()).brokers, shard)

    async def router(self) -> grpc.aio.Channel:
        """The channel to any router; raises Unavailable when none is known."""
        routers = (await self.topology()).routers
        return self._of("router", routers, random.choice(sorted(routers)) if routers else 0)

    async def janitor(self) -> grpc.aio.Channel:
        """The channel to a janitor; raises Unavailable when none is known."""
        janitors = (await self.topology()).janitors
        return self._of("janitor", janitors, random.choice(sorted(janitors)) if janitors else 0)

    async def any_address(self, without: str = "") -> str:
        """Where any process is, but those of this service; raises Unavailable where none is."""
        processes = (await self.topology()).processes()
        addresses = [address for service, _, address in processes if service != without]
        if not addresses:  # The root was emptied or replaced: owners announce themselves again.
            self.forget()
            raise Unavailable("no process has announced itself", reason=PEER_UNKNOWN)
        return random.choice(addresses)

    def process(self, service: str, shard: int) -> str:
        """A process as errors name it: `broker 0 at 127.0.0.1:4567`, with the address if known."""
        known = self._topology.known
        addresses: Mapping[int, str] = {} if known is None else getattr(known, f"{service}s")
        address = addresses.get(shard)
        return f"{service} {shard} at {address}" if address else f"{service} {shard}"

    def _process_of(self, channel: grpc.aio.Channel) -> str:
        """The process that a channel leads to, as errors name it; empty = it leads there no more.

        So do channels that were closed, and those of before certificates were renewed.
        """
        of_channel = (at for at, opened in self._channels.items() if opened is channel)
        address = next(of_channel, "")
        known = self._topology.known
        for service, shard, at in () if known is None else known.processes():
            if at == address:
                return f"{service} {shard} at {address}"
        return address and f"the process at {address}"

    def _of(self, service: str, addresses: Any, shard: int) -> grpc.aio.Channel:
        if shard not in addresses:
            self.forget()
            raise Unavailable(f"no {service} {shard} is known", reason=PEER_UNKNOWN)
        return self.at(addresses[shard])

    # --- Calls --------------------------------------------------------------

    @property
    def proof(self) -> Proof:
        """Which token and which certificate calls that begin now have."""
        return self._connecting.proof

    def renewed(self, error: SlateMQError, proof: Proof) -> SlateMQError:
        """The error of a call, or Unavailable where another one will not be refused for this.

        Streams, and calls that wait, end with the token or the certificate that they began with,
        `proof`, of which the files may have new ones.
        """
        if isinstance(error, Unauthenticated) and proof != self.proof:
            return Unavailable(error.message, reason=PROOF_RENEWED)
        return error

    async def ask(
        self,
        channel: Callable[[], Awaitable[grpc.aio.Channel]],
        method: Method[Q, R],
        request: Q,
        **options: Unpack[CallOptions],
    ) -> R:
        """Calls a method on this channel, which each try asks for; the rest as in `call`."""

        async def attempt(timeout: float) -> R:
            opened = await channel()
            try:
                return await method(opened)(request, timeout=timeout)
            except grpc.RpcError as error:
                raise translated(error, self._process_of(opened)) from None

        return await self.call(attempt, **options)

    async def ask_broker(
        self, shard: int, method: Method[Q, R], request: Q, **options: Unpack[CallOptions]
    ) -> R:
        """Calls a method of this broker; the rest as in `call`."""
        return await self.ask(partial(self.broker, shard), method, request, **options)

    async def ask_ingest(
        self, shard: int, method: Method[Q, R], request: Q, **options: Unpack[CallOptions]
    ) -> R:
        """Calls a method of this ingest; the rest as in `call`."""
        return await self.ask(partial(self.ingest, shard), method, request, **options)

    async def call(
        self,
        attempt: Callable[[float], Awaitable[T]],
        *,
        call_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
        wait_s: float = 0.0,
        repeat_unknown: bool = True,
        on_failure: Callable[[SlateMQError], None] | None = None,
    ) -> T:
        """Tries a call until it answers, is refused, or the time is over.

        `attempt` gets its timeout in seconds. Tries again after Unavailable and ResourceExhausted;
        with `repeat_unknown` also where the outcome is unknown, which only a call may want that
        does no harm twice. `wait_s`: how long the server itself may wait before it answers; a
        failure after some of that is a new outage, and has the whole time again. `on_failure` gets
        the error of each try that is repeated.

        Raises what the last try did; of one that only ran out of time, what the server said before.
        """
        self.check_home()
        call_s = self.call_s if call_s is None else call_s
        until = time.monotonic() + call_s
        limit = until + wait_s
        backoff = BACKOFF_S
        said: Unavailable | None = None
        problem: SlateMQError
        while True:
            began = time.monotonic()
            left = limit - began
            proof = self.proof
            try:
                with errors_translated():
                    return await self.unless_closed(attempt(max(min(attempt_s, left), 0.001)))
            except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                asked_ms = getattr(error, "retry_after_ms", 0)
                if self._closed or error.reason in HOPELESS or asked_ms is None:
                    raise
                problem = error
            except Unauthenticated as error:
                problem = self.renewed(error, proof)
                if isinstance(problem, Unauthenticated):
                    raise
            is_late = isinstance(problem, DeadlineExceeded)
            cause = said if is_late and said is not None else problem
            # An attempt may have a bound of its own, and be over sooner.
            if cause is said and time.monotonic() >= limit:
                raise cause
            if isinstance(problem, Unavailable) and problem.reason not in NOT_REACHED:
                said = problem
            if on_failure is not None:
                on_failure(problem)
            if not isinstance(problem, ResourceExhausted):
                self.forget()
                if not repeat_unknown and problem.reason not in REFUSED:
                    raise problem
            if wait_s and time.monotonic() - began >= WAITED_S:
                until = min(limit, time.monotonic() + call_s)
            pause = pause_s(problem, backoff)
            least_s = min(LAST_TRY_S, call_s / 4)
            if time.monotonic() + pause >= until - least_s:
                raise cause
            await asyncio.sleep(pause)
            if time.monotonic() > limit - least_s:  # The pause took longer than it was to.
                raise cause
            backoff = min(backoff * 2, BACKOFF_S_MAX)

    def answers(self, call: grpc.aio.UnaryStreamCall[Q, R]) -> _Answers[R]:
        """Within it the responses of a streaming call, which is cancelled at the end."""
        return _Answers(self, call)

    async def unless_closed(self, work: Awaitable[T]) -> T:
        """The result; closing the channels cancels calls, which must not look like a cancel."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed and not is_cancelled():
                raise closed() from None
            raise


class _Answers(AbstractAsyncContextManager[AsyncIterator[R]]):
    """See `Peers.answers`.

    No generator: a loop that ends closes all that are left, in any order, and a context must not be
    closed before what is within it.
    """

    def __init__(self, peers: Peers, call: grpc.aio.UnaryStreamCall[Any, R]) -> None:
        self._peers = peers
        self._proof = peers.proof
        self._call = call

    async def __aenter__(self) -> AsyncIterator[R]:
        return self._each()

    async def _each(self) -> AsyncIterator[R]:
        responses = aiter(self._call)
        while (response := await self._peers.unless_closed(anext(responses, None))) is not None:
            yield response

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._call.cancel()
        if isinstance(error, grpc.RpcError):
            raise self._peers.renewed(translated(error), self._proof) from None


def pause_s(error: SlateMQError | None, backoff_s: float) -> float:
    """How long to wait before the next try: never sooner than asked, nor all at the same moment."""
    asked_s = (getattr(error, "retry_after_ms", 0) or 0) / 1000
    return max(asked_s, backoff_s * random.uniform(0.5, 1.0)) + asked_s * random.uniform(0, 0.2)


def raise_unknown(error: SlateMQError) -> None:
    """For calls that are not repeated where the topology lacks the shard: `on_failure`."""
    if error.reason == PEER_UNKNOWN:
        raise error


def connect_s(call_s: float) -> float:
    """The time for which a call of this length waits for a connection, before it goes elsewhere."""
    return min(CONNECT_S, call_s / 3)


async def connected(channel: grpc.aio.Channel, timeout_s: float, process: str) -> None:
    """Waits until a call on this channel does not have to wait for its connection, or fails.

    Raises Unavailable (NOT_CONNECTED) after `timeout_s`, which names the process.
    """
    state = channel.get_state(try_to_connect=True)
    if state in _DECIDED:
        return
    try:
        async with asyncio.timeout(timeout_s):
            while state not in _DECIDED:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise not_connected(timeout_s, process) from None


_DECIDED = frozenset(
    {
        grpc.ChannelConnectivity.READY,
        grpc.ChannelConnectivity.TRANSIENT_FAILURE,
        grpc.ChannelConnectivity.SHUTDOWN,
    }
)


def not_connected(waited_s: float, process: str) -> Unavailable:
    """What a call gets that was not sent: nothing answered at the address of its process."""
    return Unavailable(
        f"{process} cannot be reached: no connection came about in {waited_s:.1f} s",
        reason=NOT_CONNECTED,
    )


def closed() -> Unavailable:
    """What calls get after the client was closed."""
    return Unavailable("the client is closed", reason="CLIENT_CLOSED")


@contextmanager
def errors_translated(process: str = "") -> Iterator[None]:
    """Within it a failed call raises an error of slatemq.errors, which names the process."""
    try:
        yield
    except grpc.RpcError as error:
        raise translated(error, process) from None


def translated(error: grpc.RpcError, process: str = "") -> SlateMQError:
    """The error of a failed call to a process, such as `broker 0 at 127.0.0.1:4567`.

    Where gRPC itself says INTERNAL, the connection broke under the call (a stream that ends while
    something is written gets that); a fault of the server comes with details. NOT_CONNECTED: no
    byte of the call was sent, so that it cannot have taken effect. Where another process of ours
    answers at a known address, the one that was called has moved, and may be found again.
    """
    problem = from_rpc_error(error)
    call: Any = error
    if problem.reason == WRONG_SERVICE:
        return Unavailable(problem.message, reason=WRONG_SERVICE, metadata=problem.metadata)
    if any(key == STATUS_DETAILS_KEY for key, _ in call.trailing_metadata() or ()):
        return problem
    if process and isinstance(problem, DeadlineExceeded):
        return DeadlineExceeded(f"{process} did not answer in time")
    fault = fault_of(error)
    message = problem.message if fault is None else fault.message(process)
    if fault is not None and fault.is_silent:
        return Unavailable(message, reason=PEER_SILENT)
    if call.code() is grpc.StatusCode.INTERNAL:
        return Unavailable(message, reason="CONNECTION_BROKEN")
    if fault is not None and fault.is_unsent:
        return Unavailable(message, reason=NOT_CONNECTED)
    if fault is not None and isinstance(problem, Unavailable):
        return Unavailable(message, reason=problem.reason)
    return problem
