"""What servers do to messages under way, by servers of Proton in this process."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import pytest

from libs.events.refusals import TooLarge
from libs.events.settings import ActivemqSettings
from libs.events.tasks import WriteTask, encode_task
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from tests.integration.waiting import WAIT_SECONDS, eventually

pytest.importorskip(
    "proton", reason="requirements/activemq.txt, which takes a C compiler, is not installed"
)

import proton

from libs.events.activemq import engine as activemq_engine
from libs.events.activemq import tasks as activemq_tasks
from libs.events.activemq.connection import Connection, Connections, message_of, translated
from libs.events.activemq.tasks import Tasks

BODY = bytes(128 << 10)

AT = "2026-02-22T12:00:00.000Z"

C = TypeVar("C", Connection, Connections)


class Peer(asyncio.Protocol):
    """Accepts links, and takes no message.

    Attributes:
        received_bytes: What has come of connections.
        connections_count: Those that are open.
    """

    received_bytes = 0
    connections_count = 0

    def __init__(self) -> None:
        self._collector = proton.Collector()
        self._connection = proton.Connection()
        self._connection.collect(self._collector)
        self._proton = proton.Transport(mode=proton.Transport.SERVER)
        sasl = self._proton.sasl()
        sasl.allow_insecure_mechs = True
        sasl.allowed_mechs("ANONYMOUS")
        sasl.done(proton.SASL.OK)
        self._proton.bind(self._connection)
        self._socket: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        self.connections_count += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_count -= 1

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        view = memoryview(data)
        while view and (capacity := self._proton.capacity()) > 0:
            part = view[:capacity]
            self._proton.push(bytes(part))
            view = view[len(part) :]
            self.pump()

    def pump(self) -> None:
        while (event := self._collector.peek()) is not None:
            self._handle(event)
            self._collector.pop()
        while (pending := self._proton.pending()) > 0:
            self.socket.write(self._proton.peek(pending))
            self._proton.pop(pending)

    @property
    def socket(self) -> asyncio.Transport:
        assert self._socket is not None
        return self._socket

    def _handle(self, event: Any) -> None:
        if event.type == proton.Event.CONNECTION_REMOTE_OPEN:
            self._connection.open()
        elif event.type == proton.Event.SESSION_REMOTE_OPEN:
            event.session.open()
        elif event.type in (proton.Event.SESSION_REMOTE_CLOSE, proton.Event.LINK_REMOTE_CLOSE):
            event.context.close()
        elif event.type == proton.Event.LINK_REMOTE_OPEN:
            event.link.source.copy(event.link.remote_source)
            event.link.target.copy(event.link.remote_target)
            event.link.open()
            if event.link.is_receiver:
                event.link.flow(10)
        elif event.type == proton.Event.DELIVERY:
            self.on_message(event.link)
        elif event.type == proton.Event.LINK_FLOW and event.link.is_sender:
            self.on_credit(event.link)

    def on_message(self, link: proton.Link) -> None:
        """A part of a message has come."""

    def on_credit(self, link: proton.Link) -> None:
        """Messages are wanted."""


class RefusingPeer(Peer):
    """Ends the session of a message with an error."""

    def __init__(self, condition: str) -> None:
        super().__init__()
        self._condition = condition

    def on_message(self, link: proton.Link) -> None:
        link.session.condition = proton.Condition(self._condition, "not this one")
        link.session.close()


class SmallPeer(Peer):
    """Takes messages of few bytes, which it says where it takes any."""

    def _handle(self, event: Any) -> None:
        if event.type == proton.Event.LINK_REMOTE_OPEN:
            event.link.max_message_size = len(BODY)
        super()._handle(event)


class StalledPeer(Peer):
    """Reads no more once a message has begun."""

    has_stalled = False

    def on_message(self, link: proton.Link) -> None:
        if not self.has_stalled:
            self.has_stalled = True
            self.socket.pause_reading()


class BacklogPeer(Peer):
    """Has messages in its queues, and sends one in each turn of the event loop.

    Attributes:
        sent: How many it has sent of each queue.
    """

    def __init__(self, queues: dict[str, list[bytes]]) -> None:
        super().__init__()
        self._queues = queues
        self.sent: Counter[str] = Counter()
        self._served: set[str] = set()

    def on_credit(self, link: proton.Link) -> None:
        if link.name not in self._served:
            self._served.add(link.name)
            messages = iter(self._queues.get(link.source.address, [])[: link.credit])
            asyncio.get_running_loop().call_soon(self._send, link, messages)

    def _send(self, link: proton.Link, messages: Iterator[bytes]) -> None:
        if not link.state & proton.Endpoint.REMOTE_ACTIVE:
            return
        if (message := next(messages, None)) is None:
            link.drained()
        else:
            self.sent[link.source.address] += 1
            link.delivery(str(self.sent[link.source.address]))
            link.send(message)
            link.advance()
            asyncio.get_running_loop().call_soon(self._send, link, messages)
        self.pump()


class RoomlessPeer(BacklogPeer):
    """Reads no more of a connection once a message has begun, as ActiveMQ where it has no room."""

    has_stalled = False
    accepted_count = 0

    def on_message(self, link: proton.Link) -> None:
        if link.is_receiver:
            self.has_stalled = True
            self.socket.pause_reading()
        else:
            self.accepted_count += 1


@asynccontextmanager
async def connected(
    make: Callable[[], Peer], kind: Callable[[ActivemqSettings], C]
) -> AsyncIterator[C]:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connection = kind(ActivemqSettings(url=f"amqp://127.0.0.1:{port}"))
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize("condition", ["amqp:not-implemented", "amqp:internal-error"])
async def test_a_message_whose_session_the_server_ends_is_to_be_sent_again(condition: str) -> None:
    async with connected(lambda: RefusingPeer(condition), Connection) as connection:
        with pytest.raises(Unavailable, match="not this one"), translated():
            await connection.send("queue", message_of(b"{}", "id"))


async def test_a_message_larger_than_the_server_takes_is_not_sent() -> None:
    peer = SmallPeer()
    async with connected(lambda: peer, Connection) as connection:
        with pytest.raises(TooLarge), translated():
            await connection.send("queue", message_of(BODY, "id"))
    assert peer.received_bytes < len(BODY)


async def test_a_message_whose_size_the_server_refuses_is_too_large() -> None:
    peer = RefusingPeer("amqp:link:message-size-exceeded")
    async with connected(lambda: peer, Connection) as connection:
        with pytest.raises(TooLarge, match="not this one"), translated():
            await connection.send("queue", message_of(b"{}", "id"))


@pytest.mark.parametrize("end", ["abort", "close"])
async def test_a_connection_ends_though_the_server_does_not_take_what_is_written(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that stops reading amid a message that fits into no buffer
    monkeypatch.setattr(activemq_engine, "CLOSE_S", 0.01)
    peer, message = StalledPeer(), message_of(bytes(64 << 20), "id")
    async with connected(lambda: peer, Connection) as connection:
        sending = asyncio.ensure_future(connection.send("queue", message))
        await eventually(lambda: peer.has_stalled)

        # When the connection is ended
        engine = await connection.engine()
        if end == "abort":
            engine.abort(TimeoutError())
        else:
            await engine.close()
        with pytest.raises(Unavailable), translated():
            await sending

        # Then nothing is kept to be written once the server reads again
        peer.socket.resume_reading()
        await eventually(lambda: not peer.connections_count)
        assert peer.received_bytes < 64 << 20


async def test_a_count_reads_ids_up_to_a_limit_of_bytes_and_keeps_no_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a queue with more than is counted, one with a message of the first, and dead letters of
    # which one has a body that is none
    monkeypatch.setattr(activemq_tasks, "COUNTED_BYTES_MAX", 2 << 20)
    large = [message_of(BODY, f"task_{number}").encode() for number in range(300)]
    broken = message_of(b"{}", "task_broken").encode()[:-4] + b"broken"
    without_id = proton.Message(body="{}").encode()
    peer = BacklogPeer(
        {
            "queue://slatemq.tasks": large,
            "queue://slatemq.tasks.retry": large[:1],
            "queue://slatemq.dead-letter": [broken, without_id, *large[:1]],
        }
    )
    async with connected(lambda: peer, Connections) as connections:
        # When they are counted
        tracemalloc.start()
        try:
            pending, dead_letters = await Tasks(connections).counts()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    # Then so are those within the limit, each once, and no body was kept
    assert (2 << 20) // len(BODY) <= pending < 300
    assert dead_letters == 3
    assert pending <= peer.sent["queue://slatemq.tasks"] < 300
    assert peak_bytes < 16 << 20


async def test_tasks_are_taken_while_the_server_has_no_room_for_another() -> None:
    # Given a task that waits, and a server that has no room for the next one
    waits, next_one = (
        WriteTask(task_id=TaskIds(0).make(number), operation="Publish", created_at=AT, payload={})
        for number in range(2)
    )
    peers: list[RoomlessPeer] = []

    def make() -> RoomlessPeer:
        message = message_of(encode_task(waits), waits.task_id)
        peers.append(RoomlessPeer({"queue://slatemq.tasks": [message.encode()]}))
        return peers[-1]

    async with connected(make, Connections) as connections:
        tasks = Tasks(connections)
        sending = asyncio.create_task(tasks.enqueue(next_one))
        await eventually(lambda: any(one.has_stalled for one in peers))

        # Then the first one is delivered and accepted nonetheless
        async with asyncio.timeout(WAIT_SECONDS):
            while await tasks.dequeue() != waits:
                pass
        assert await tasks.complete(waits.task_id)
        await eventually(lambda: any(one.accepted_count for one in peers))
        sending.cancel()
        await asyncio.wait([sending])
    for one in peers:
        one.socket.resume_reading()
    await eventually(lambda: not any(one.connections_count for one in peers))
