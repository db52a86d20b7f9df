"""Which addresses a client goes to: several that it was given, new ones, none that is dead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
import grpc.aio
import pytest

import slatemq
from slatemq._rpc import peers, topology_cache
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import InvalidArgument, Unavailable, Unimplemented
from slatemq.v1 import topology_pb2_grpc
from tests.integration.client.peers import Directory, Ingest, Instance, refuse


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address that refuses connections, and keeps doing so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


async def two_ingests(instance: Instance) -> tuple[Ingest, str, grpc.aio.Server]:
    """A second ingest of the instance."""
    second = Ingest(shard=1)
    second.shards = instance.ingest.shards = [0, 1]
    return second, *await instance.serve(ingest=second)


# --- The addresses given ------------------------------------------------------


async def test_any_one_of_several_addresses_will_do(instance: Instance, refusing: str) -> None:
    for endpoint in (f"{refusing}, {instance.endpoint}", [refusing, instance.endpoint]):
        async with slatemq.connect(endpoint) as client:
            await client.publish(b"x")
    assert instance.ingest.stored == [b"x", b"x"]


async def test_an_address_that_never_answers_does_not_hold_up_the_others(
    instance: Instance,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = [f"127.0.0.1:{silent.getsockname()[1]}", instance.endpoint]
        async with slatemq.connect(endpoint, call_timeout=600) as client:
            assert (await client.topology()).brokers


async def test_what_is_wrong_with_each_address_is_in_the_error(refusing: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        other = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable) as raised:
            async with slatemq.connect(f"{refusing},{other}", call_timeout=0.1):
                pass
    assert raised.value.reason == "UNREACHABLE"
    assert f"{refusing} is not reachable" in raised.value.message
    assert f"{other} is not reachable" in raised.value.message


async def test_a_server_that_closes_the_connection_is_said_to_be_another_perhaps() -> None:
    # As PostgreSQL and RabbitMQ do, which do not know HTTP/2
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Unavailable, match="perhaps it is not SlateMQ") as raised:
            async with slatemq.connect(address, call_timeout=1):
                pass
    assert raised.value.reason == "UNREACHABLE"


async def test_a_claim_of_no_messages_is_refused_and_takes_none(instance: Instance) -> None:
    instance.broker.available.append((b"x", 0))
    async with slatemq.connect(instance.endpoint) as client:
        with pytest.raises(InvalidArgument, match="max_messages: must be at least 1"):
            await client.claim("q", 0)
        assert [one.payload for one in await client.claim("q", 1)] == [b"x"]


@pytest.mark.parametrize(
    ("endpoint", "names"),
    [
        ("", "''"),
        ("a:1,,b:2", "''"),
        ("http://a:1", "http://a:1"),
        ("a:0", "a:0"),
        ("a", "'a'"),
        ([], "at least one"),
        (7, "not int"),
        ([b"a:1"], "not bytes"),
    ],
)
def test_what_is_not_an_address_is_refused_by_name(endpoint: object, names: str) -> None:
    with pytest.raises(InvalidArgument, match="endpoint") as raised:
        slatemq.connect(endpoint)  # type: ignore[arg-type]
    assert names in raised.value.message


# --- Other servers ------------------------------------------------------------


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """A server that answers each connection so; gives its address."""
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await answer(reader, writer)
            await reader.read()  # Until the client hangs up.
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Nothing beside the output of the tests."""


async def answer_http_1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


async def answer_redis(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"-ERR unknown command 'PRI'\r\n")


async def answer_html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"<!DOCTYPE HTML>\n<html><head><title>Error response</title></head></html>\n")


async def answer_http_2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    writer.write(b"\0\0\0\x04\0\0\0\0\0")  # SETTINGS
    kind = 0
    while kind != 1:  # HEADERS: a call
        head = await reader.readexactly(9)
        kind = head[3]
        await reader.readexactly(int.from_bytes(head[:3], "big"))
    # Its stream gets HEADERS with :status 404 (of the static table), and ends
    writer.write(b"\0\0\x01\x01\x05" + head[5:9] + b"\x8d")


async def test_another_grpc_server_is_called_that(instance: Instance) -> None:
    server = grpc.aio.server()
    other = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(InvalidArgument) as raised:
            async with slatemq.connect(other):
                pass
        assert raised.value.reason == "NOT_SLATEMQ"
        assert f"{other} is not SlateMQ: a gRPC server answers there" in raised.value.message
        # Beside one of ours it does not matter
        async with slatemq.connect([other, instance.endpoint]) as client:
            await client.publish(b"x")
    finally:
        await server.stop(None)


async def test_an_http_server_is_called_that() -> None:
    async with served(answer_http_1) as other:
        with pytest.raises(InvalidArgument) as raised:
            async with slatemq.connect(other):
                pass
    assert raised.value.reason == "NOT_SLATEMQ"
    assert f"{other} is not SlateMQ: an HTTP/1 server answers there" in raised.value.message


@pytest.mark.parametrize("answer", [answer_html, answer_redis])
async def test_a_server_of_another_protocol_is_called_that(answer: Answer) -> None:
    async with served(answer) as other:
        with pytest.raises(InvalidArgument) as raised:
            async with slatemq.connect(other):
                pass
    assert raised.value.reason == "NOT_SLATEMQ"
    assert f"{other} is not SlateMQ: a server answers there that" in raised.value.message


async def test_the_http_server_of_python_is_called_that() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            with pytest.raises(InvalidArgument, match="is not SlateMQ") as raised:
                async with slatemq.connect(f"127.0.0.1:{server.server_port}"):
                    pass
        finally:
            server.shutdown()
    assert raised.value.reason == "NOT_SLATEMQ"


async def test_an_http_2_server_is_called_that() -> None:
    async with served(answer_http_2) as other:
        with pytest.raises(InvalidArgument) as raised:
            async with slatemq.connect(other):
                pass
    assert raised.value.reason == "NOT_SLATEMQ"
    assert f"{other} is not SlateMQ: an HTTP/2 server answers there" in raised.value.message
    assert "404" in raised.value.message


# --- Ingests that come and go -------------------------------------------------


async def test_a_client_in_use_learns_of_a_new_ingest(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"before")
        second, _, _ = await two_ingests(instance)
        # When what it knows is old enough, without anything having failed
        monkeypatch.setattr(topology_cache, "AGE_S", 0.0)
        async with asyncio.timeout(60):
            while not second.stored:
                await client.publish(b"single")
        second.stored.clear()
        async with asyncio.timeout(60):
            while not second.stored:
                await client.publish_many([b"many"])


async def test_topology_is_not_asked_for_by_each_publish(instance: Instance) -> None:
    asked = 0
    answer = instance.directory.GetTopology

    async def counted(request: object, context: object) -> object:
        nonlocal asked
        asked += 1
        return await answer(request, context)

    instance.directory.GetTopology = counted  # type: ignore[method-assign]
    endpoint, _ = await instance.serve()
    async with slatemq.connect(endpoint) as client:
        for _ in range(200):
            await client.publish(b"x")
    assert asked <= 2


async def test_a_process_that_moved_is_found_when_another_one_has_its_address(
    instance: Instance,
) -> None:
    # Given an ingest at the address where the topology has the broker
    class Elsewhere(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            if "QueueService" not in handler_call_details.method:
                return await continuation(handler_call_details)
            called.set()

            async def refused(request: Any, context: Any) -> None:
                await refuse(context, Unimplemented("call a broker", reason="WRONG_SERVICE"))

            return grpc.unary_unary_rpc_method_handler(refused)

    called = asyncio.Event()
    right = instance.directory.response.brokers[0].address
    instance.interceptors.append(Elsewhere())
    wrong, _ = await instance.serve()
    instance.directory.put("brokers", 0, wrong)
    async with slatemq.connect(instance.endpoint) as client, asyncio.timeout(60):
        asking = asyncio.create_task(client.get_queue("q"))
        await called.wait()
        # When the topology has the right one again
        instance.directory.put("brokers", 0, right)
        assert (await asking).queue_id == "q"


async def test_no_publish_waits_for_an_ingest_that_refuses_connections(
    instance: Instance,
) -> None:
    _, _, server = await two_ingests(instance)
    await server.stop(None)  # Its address is still in the topology.
    async with slatemq.connect(instance.endpoint, call_timeout=600) as client, asyncio.timeout(60):
        for number in range(10):
            await client.publish(b"%d" % number)
        await client.publish_many([b"many"] * 10)
        await client.publish_batch([slatemq.OutgoingMessage(b"batch")])
    assert [*map(int, instance.ingest.stored[:10])] == list(range(10))
    assert len(instance.ingest.stored) == 21


async def test_a_publish_leaves_an_ingest_that_no_connection_reaches_within_its_own_deadline(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CONNECT_S", 0.5)
    monkeypatch.setattr(
        peers,
        "_OPTIONS",
        [*dict(peers._OPTIONS, **{"grpc.min_reconnect_backoff_ms": 600_000}).items()],
    )
    # Given an ingest at an address that takes connections, and never says a word
    instance.ingest.shards = [0, 1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        instance.directory.put("ingests", 1, f"127.0.0.1:{silent.getsockname()[1]}")
        # When clients publish twice, to each in turn, with less time than gRPC takes to connect
        async with slatemq.connect(instance.endpoint, call_timeout=8) as client:
            await client.publish(b"0")
            await client.publish_many([b"1"])
        async with slatemq.connect(instance.endpoint, call_timeout=8) as client:
            await client.publish_batch([slatemq.OutgoingMessage(b"2")])
            await client.publish_batch([slatemq.OutgoingMessage(b"3")])
    # Then the other one has stored each of them, once
    assert sorted(instance.ingest.stored) == [b"0", b"1", b"2", b"3"]


async def test_a_publish_that_may_be_stored_stays_on_its_shard(instance: Instance) -> None:
    # Given two ingests that both store a request and lose the answer
    second, _, _ = await two_ingests(instance)
    for ingest in (instance.ingest, second):
        ingest.after.append(Unavailable("the answer is lost", retry_after_ms=1))
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish_many([b"x"])
    # Then it went to one of them only, which recognised the repeat
    assert sorted([len(instance.ingest.stored), len(second.stored)]) == [0, 1]
    assert sorted([len(instance.ingest.calls), len(second.calls)]) == [0, 2]


async def test_a_publish_that_one_dead_shard_must_store_says_so(instance: Instance) -> None:
    _, _, server = await two_ingests(instance)
    await server.stop(None)
    key = next(key for key in map(str, range(100)) if dedupe_shard(key, [0, 1]) == 1)
    async with slatemq.connect(instance.endpoint, call_timeout=2) as client:
        with pytest.raises(Unavailable) as raised:
            await client.publish(b"x", dedupe_key=key)
        assert "ingest shard 1" in raised.value.message
        assert raised.value.metadata["ingest_shard"] == "1"
        # Keys of the other shard are stored meanwhile
        other = next(key for key in map(str, range(100)) if dedupe_shard(key, [0, 1]) == 0)
        await client.publish(b"y", dedupe_key=other)


async def test_an_instance_that_names_no_process_is_unavailable() -> None:
    # Given one whose root was replaced, and whose owners have not announced themselves there
    server = grpc.aio.server()
    topology_pb2_grpc.add_TopologyServiceServicer_to_server(Directory(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async with slatemq.connect(address, call_timeout=1) as client:
        for call in (client.get_instance, client.get_caller):
            with pytest.raises(Unavailable, match="no process has announced itself"):
                await call()
    await server.stop(None)
