"""gRPC between the machines of a simulated world: links, channels and calls.

Channels with the calls of `grpc.aio` that clients and services make; `servers` has the other side.
What is sent is serialized as on a wire, and every message takes its own time. Within a call they
keep their order. Links between two machines can be cut, both ways or one: what is sent then waits,
as with TCP, until a ping has had no answer for too long. They can also be slow for a while. A
machine that ends breaks its connections.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import grpc
import grpc.aio

from tests.simulation.loop import MACHINE, Machine, WorldLoop

Metadata = tuple[tuple[str, Any], ...]

Way = tuple[str, str]
"""From one machine to another, by their names."""

CONNECT_S: Final = 5.0
"""How long a connection is tried over a link that is cut."""

PING_S: Final = 10.0
"""A connection over a link that is cut ends after this, with its calls."""

REFUSED: Final = "failed to connect to all addresses; last error: Connection refused"
CUT: Final = "failed to connect to all addresses; last error: Timeout"
BROKEN: Final = "Socket closed"
PING_TIMEOUT: Final = "ping timeout"

_State = grpc.ChannelConnectivity


class Listener(Protocol):
    """A server, as the network sees it."""

    machine: Machine
    is_listening: bool

    def accept(self, call: Call) -> None:
        """A call has arrived."""


class Cancellable(Protocol):
    """The server's side of a call, as the network sees it."""

    def cancel(self) -> None:
        """The client has gone."""


@dataclass
class LinkFaults:
    """How links behave.

    Attributes:
        latency_s: Of a message, in the mean.
        slow: Share of messages that take fifty times as long.
        slow_calls: Share of the directions of calls in which all messages take so long: one call
            then overtakes another, as on a connection whose stream waits for its window.
        slow_link: How many times as long messages take between machines while that is slow.
    """

    latency_s: float = 0.0003
    slow: float = 0.005
    slow_calls: float = 0.03
    slow_link: float = 300.0


class Network:
    """All links and listening servers."""

    def __init__(self, loop: WorldLoop, seed: str) -> None:
        self.loop = loop
        self.faults = LinkFaults()
        self.chance = random.Random(f"{seed}/network")
        self.servers: dict[str, Listener] = {}
        self._cuts: dict[Way, None] = {}
        self._slow: dict[Way, None] = {}
        self._calls: dict[Call, None] = {}
        self._ports = 50_000

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    # --- Links --------------------------------------------------------------

    def cut(self, one: str, other: str, *, is_half: bool = False) -> None:
        """Hold what is sent between two machines, by their names.

        `is_half`: only what `one` sends; what `other` sends still arrives.
        """
        self._cuts[one, other] = None
        if not is_half:
            self._cuts[other, one] = None
        self.loop.call_later(
            PING_S, self._end_cut_calls, one, other, context=self.loop.world.context
        )

    def slow_down(self, one: str, other: str) -> None:
        """Let what is sent between two machines take its time; the order within calls stays."""
        self._slow.update({(one, other): None, (other, one): None})

    def heal(self, one: str, other: str) -> None:
        for way in ((one, other), (other, one)):
            self._cuts.pop(way, None)
            self._slow.pop(way, None)

    def heal_all(self) -> None:
        self._cuts.clear()
        self._slow.clear()

    def is_cut(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._cuts

    def answers(self, one: str, other: str) -> bool:
        """Whether what `one` sends arrives, and what is answered, too."""
        return not self.is_cut(one, other) and not self.is_cut(other, one)

    def way_s(self, sender: str, receiver: str, *, is_slow: bool = False) -> float:
        is_slow = is_slow or self.chance.random() < self.faults.slow
        slow = 50.0 if is_slow else 1.0
        if (sender, receiver) in self._slow:
            slow *= self.faults.slow_link
        return self.chance.uniform(0.3, 1.7) * self.faults.latency_s * slow

    def _end_cut_calls(self, one: str, other: str) -> None:
        if self.answers(one, other):
            return
        for call in list(self._calls):
            if {call.client.name, call.host.name} == {one, other}:
                call.break_off(PING_TIMEOUT, is_noticed_late=True)

    # --- Machines -----------------------------------------------------------

    def machine_ended(self, machine: Machine) -> None:
        """Its servers do not listen any more, and the others notice that their calls broke."""
        for address, server in list(self.servers.items()):
            if server.machine is machine:
                del self.servers[address]
        for call in list(self._calls):
            if machine in (call.client, call.host):
                call.break_off(BROKEN)

    def begin(self, call: Call) -> None:
        self._calls[call] = None

    def end(self, call: Call) -> None:
        self._calls.pop(call, None)


class Status(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    trailing: Metadata = ()


class Pipe:
    """One direction of a call: what is put in comes out in this order, each some time later.

    What has arrived waits until it is read; the end of the pipe comes behind it.
    """

    def __init__(self, call: Call, sender: Machine, receiver: Machine) -> None:
        self._call = call
        self._receiver = receiver
        self._sender = sender
        self._on_way: deque[Any] = deque()
        self._last_s = 0.0
        self._is_slow = call.network.chance.random() < call.network.faults.slow_calls
        self._arrived: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._is_ended = False
        self.on_arrival: Callable[[Any], bool] | None = None

    def send(self, item: Any) -> None:
        network = self._call.network
        self._on_way.append(item)
        way_s = network.way_s(self._sender.name, self._receiver.name, is_slow=self._is_slow)
        self._last_s = max(self._last_s, network.loop.time() + way_s)
        network.loop.at(self._last_s, network.loop.world, self._deliver)

    def _deliver(self) -> None:
        """The next one is due. On a cut link it, and all behind it, wait until it is healed."""
        network = self._call.network
        if network.is_cut(self._sender.name, self._receiver.name):
            network.loop.call_later(0.05, self._deliver)
            return
        if not self._on_way:
            return
        item = self._on_way.popleft()
        network.loop.at(network.loop.time(), self._receiver, self._arrive, item)

    def _arrive(self, item: Any) -> None:
        if self.on_arrival is not None and self.on_arrival(item):
            return
        self._arrived.append(item)
        self._wake()

    def end(self) -> None:
        """Nothing comes any more, beyond what has arrived."""
        self._is_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self) -> Any:
        """The next item; EOF once the pipe has ended and is empty."""
        while not self._arrived:
            if self._is_ended:
                return grpc.aio.EOF
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._arrived.popleft()


HALF_CLOSED: Final = object()
"""Sent behind the last request of a call."""


class Call:
    """One call: the client's side of it, as grpc.aio's call objects are."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], Any],
        metadata: Metadata,
        timeout: float | None,
        requests: Any,
    ) -> None:
        """Send `requests`, as they come; None: those of `write`."""
        self.network = channel.network
        self.client = channel.machine
        self.host: Machine = channel.machine
        self.method = method
        self.metadata = metadata
        self._channel = channel
        self._encode = encode
        self._decode = decode
        loop = self.network.loop
        self._deadline_s = None if timeout is None else loop.time() + timeout
        self._status: Status | None = None
        self._ended: asyncio.Future[None] = loop.create_future()
        self._done_callbacks: list[Callable[[Any], None]] = []
        self._cancelled_here = False
        self._begun: asyncio.Future[bool] = loop.create_future()
        self.requests: Pipe | None = None
        self.responses: Pipe | None = None
        self.served: Cancellable | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._timer = loop.call_later(max(0.0, timeout), self._run_out)
        self._connecting = loop.create_task(self._connect())
        if requests is not None:
            self._sending = loop.create_task(self._send_all(requests))

    # --- Beginning ----------------------------------------------------------

    async def _connect(self) -> None:
        problem = await self._channel.connected()
        if self._status is not None:
            return
        server = self._channel.server()
        if problem or server is None:
            self.finish(Status(grpc.StatusCode.UNAVAILABLE, problem or REFUSED))
            return
        self.host = server.machine
        self.requests = Pipe(self, self.client, self.host)
        self.responses = Pipe(self, self.host, self.client)
        self.responses.on_arrival = self._take_status
        self.network.begin(self)
        self._channel.calls[self] = None
        loop = self.network.loop
        arrival = loop.time() + self._way_s()
        self.requests._last_s = arrival
        loop.at(arrival, loop.world, self._reach, server)
        self._begun.set_result(True)

    def _reach(self, server: Listener) -> None:
        """The head of the call arrives at the server."""
        if self.network.is_cut(self.client.name, self.host.name):
            self.network.loop.call_later(0.05, self._reach, server)
            return
        if self._status is not None and self.served is None:
            return
        loop = self.network.loop
        if not server.is_listening or not self.host.is_alive:
            loop.at(
                loop.time() + self._way_s(),
                self.client,
                self.finish,
                Status(grpc.StatusCode.UNAVAILABLE, BROKEN),
            )
            return
        loop.at(loop.time(), self.host, server.accept, self)

    # --- Ending -------------------------------------------------------------

    def _take_status(self, item: Any) -> bool:
        if not isinstance(item, Status):
            return False
        self.finish(item)
        return True

    def finish(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if not self._begun.done():
            self._begun.set_result(False)
        if self.responses is not None:
            self.responses.end()
        self._channel.calls.pop(self, None)
        self.network.end(self)
        self._ended.set_result(None)
        for callback in self._done_callbacks:
            callback(self)

    def break_off(self, why: str, *, is_noticed_late: bool = False) -> None:
        """The connection has ended: both sides notice, if they live.

        `is_noticed_late`: the server by a ping of its own, up to PING_S later.
        """
        loop = self.network.loop
        after_s = loop.time() + self._way_s()
        late_s = self.network.chance.uniform(0.0, PING_S) if is_noticed_late else 0.0
        loop.at(after_s, self.client, self.finish, Status(grpc.StatusCode.UNAVAILABLE, why))
        loop.at(after_s + late_s, self.host, self._end_served)
        self._channel.lose()
        self.network.end(self)

    def _way_s(self) -> float:
        return self.network.way_s(self.client.name, self.host.name)

    def _run_out(self) -> None:
        self._abandon(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _abandon(self, status: Status) -> None:
        if self._status is not None:
            return
        loop = self.network.loop
        if self.requests is not None:
            loop.at(
                max(self.requests._last_s, loop.time() + self._way_s()),
                loop.world,
                self._tell_end,
            )
        self.finish(status)

    def _tell_end(self) -> None:
        if self.network.is_cut(self.client.name, self.host.name):
            self.network.loop.call_later(0.05, self._tell_end)
            return
        self.network.loop.at(self.network.loop.time(), self.host, self._end_served)

    def _end_served(self) -> None:
        if self.served is not None:
            self.served.cancel()

    def _error(self) -> grpc.aio.AioRpcError:
        status = self._status
        assert status is not None, "the call has ended"
        return grpc.aio.AioRpcError(
            status.code,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*status.trailing),
            details=status.details,
        )

    async def _raise(self) -> None:
        """Raise what the call ended with, unless that is OK."""
        await asyncio.shield(self._ended)
        assert self._status is not None, "the call has ended"
        if self._cancelled_here:
            raise asyncio.CancelledError
        if self._status.code is not grpc.StatusCode.OK:
            raise self._error()

    # --- grpc.aio.Call ------------------------------------------------------

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cancelled_here = True
        self._abandon(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code is grpc.StatusCode.CANCELLED

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._done_callbacks.append(callback)

    def time_remaining(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self.network.loop.time())

    async def code(self) -> grpc.StatusCode:
        await asyncio.shield(self._ended)
        assert self._status is not None, "the call has ended"
        return self._status.code

    async def details(self) -> str:
        await asyncio.shield(self._ended)
        assert self._status is not None, "the call has ended"
        return self._status.details

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> Any:
        await asyncio.shield(self._ended)
        assert self._status is not None, "the call has ended"
        return grpc.aio.Metadata(*self._status.trailing)

    async def wait_for_connection(self) -> None:
        if not await asyncio.shield(self._begun):
            await self._raise()

    # --- Messages -----------------------------------------------------------

    async def write(self, request: Any) -> None:
        if not await asyncio.shield(self._begun):
            await self._raise()
        if self._status is not None:
            await self._raise()
            raise asyncio.InvalidStateError("the call has ended")
        assert self.requests is not None, "begun"
        self.requests.send(self._encode(request))

    async def _send_all(self, requests: Any) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    await self.write(request)
            else:
                for request in requests:
                    await self.write(request)
            await self.done_writing()

    async def done_writing(self) -> None:
        if await asyncio.shield(self._begun) and self._status is None:
            assert self.requests is not None, "begun"
            self.requests.send(HALF_CLOSED)

    async def _receive(self) -> Any:
        """The next response; EOF at a good end. Raises AioRpcError."""
        try:
            if not await asyncio.shield(self._begun):
                await self._raise()
            assert self.responses is not None, "begun"
            item = await self.responses.next()
        except asyncio.CancelledError:
            # Who waits for a response and is cancelled cancels the call, as gRPC has it.
            self.cancel()
            raise
        if item is grpc.aio.EOF:
            await self._raise()
            return item
        return self._decode(item)


class UnaryCall(Call):
    """A call with one response."""

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self._receive()
        if answer is grpc.aio.EOF:
            self.finish(Status(grpc.StatusCode.INTERNAL, "no response"))
            raise self._error()
        if await self._receive() is not grpc.aio.EOF:
            raise AssertionError("a second response of a unary call")
        return answer


class StreamCall(Call):
    """A call with a stream of responses."""

    async def read(self) -> Any:
        return await self._receive()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._each()

    async def _each(self) -> AsyncIterator[Any]:
        while (response := await self._receive()) is not grpc.aio.EOF:
            yield response


class Channel:
    """The calls of grpc.aio.Channel that clients and services make."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self.machine = MACHINE.get()
        self.calls: dict[Call, None] = {}
        self._address = address
        self._state = _State.IDLE
        self._changed = asyncio.Event()
        self._connecting: asyncio.Task[str] | None = None
        self._is_closed = False

    def server(self) -> Listener | None:
        return self.network.servers.get(self._address)

    async def connected(self) -> str:
        """Connect if need be; returns why that failed, or nothing."""
        if self._is_closed:
            return "Channel closed!"
        if self._state is _State.READY:
            return ""
        if self._connecting is None or self._connecting.done():
            self._connecting = self.network.loop.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> str:
        self._become(_State.CONNECTING)
        server = self.server()
        host = "" if server is None else server.machine.name
        await asyncio.sleep(self.network.way_s(self.machine.name, host) * 2)
        server = self.server()
        if server is not None:
            until_s = self.network.loop.time() + CONNECT_S
            while not self.network.answers(self.machine.name, server.machine.name):
                if self.network.loop.time() >= until_s:
                    self._become(_State.TRANSIENT_FAILURE)
                    return CUT
                await asyncio.sleep(0.05)
            server = self.server()
        if server is None or not server.is_listening:
            self._become(_State.TRANSIENT_FAILURE)
            return REFUSED
        self._become(_State.READY)
        return ""

    def lose(self) -> None:
        if self._state is _State.READY:
            self._become(_State.IDLE)

    def _become(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    # --- grpc.aio.Channel ---------------------------------------------------

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        server = self.server()
        if self._state is _State.READY and (server is None or not server.is_listening):
            self._state = _State.IDLE
        is_idle = self._connecting is None or self._connecting.done()
        if try_to_connect and self._state is not _State.READY and is_idle:
            self._connecting = self.network.loop.create_task(self._connect())
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            await self._changed.wait()

    async def channel_ready(self) -> None:
        while await self.connected():
            await asyncio.sleep(0.05)

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        if grace and self.calls:
            await asyncio.wait([call._ended for call in self.calls], timeout=grace)
        for call in list(self.calls):
            call.cancel()
        self._become(_State.SHUTDOWN)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable(UnaryCall, False, *args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable(StreamCall, False, *args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable(UnaryCall, True, *args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable(StreamCall, True, *args, **kwargs)

    def _callable(
        self,
        kind: Any,
        is_stream: bool,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        encode, decode = request_serializer or bytes, response_deserializer or bytes

        def begin(
            requests: Any = None,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, Any]] | None = None,
            **_: Any,
        ) -> Any:
            return kind(
                self,
                method,
                encode,
                decode,
                tuple(metadata or ()),
                timeout,
                requests if is_stream else [requests],
            )

        return begin
