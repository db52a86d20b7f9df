"""Requests that are large, on the wire or once they are parsed: what they cost a real ingest."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.serving import limits
from libs.serving.requests.shape import ITEMS_MAX, MESSAGE_ITEMS, NUMBERS, NUMBERS_MAX, TEXT_ITEMS
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import ingest_pb2
from tests.integration.serving.test_any_request import Method, ending, methods_at
from tests.ready_process import create_subprocess

MEBIBYTE = 1 << 20
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
)
PUBLISH = "/slatemq.v1.IngestService/Publish"
PUBLISH_STREAM = "/slatemq.v1.IngestService/PublishStream"
GET = "/slatemq.v1.IngestService/BatchGetMessages"

STEP_MS_MAX = 100
"""Processor time of one step of an event loop: twice the watchdog's bound, since beside other work
the same step takes up to twice as much. Where a request is parsed whole, a step takes seconds."""


def longest_step_ms(log: str) -> int:
    """What the watchdog's lines in a log have as the longest step; 0 where there are none."""
    return max(
        map(int, re.findall(r"step of the event loop took long.*?cpu_ms=(\d+)", log, re.S)),
        default=0,
    )


async def at_last(folder: Path, look: Callable[[Path], Awaitable[object]]) -> None:
    """Wait until `look`, which returns what is wrong, finds nothing with one of three processes.

    What else a machine does may spoil one of the three; what a process does wrong spoils each.
    """
    for number in range(3):
        place = folder / str(number)
        place.mkdir()
        if not (wrong := await look(place)):
            return
    pytest.fail(str(wrong))


class Ingest:
    """A real ingest, its memory and what it logs."""

    def __init__(self, process: Any, address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self.log = log

    def memory(self, what: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024
        raise AssertionError(what)

    @property
    def resident(self) -> int:
        return self.memory("VmRSS")

    @property
    def peak(self) -> int:
        return self.memory("VmHWM")


@asynccontextmanager
async def ingest(folder: Path) -> AsyncIterator[Ingest]:
    async with serving("ingest", folder) as there:
        yield there


@asynccontextmanager
async def serving(kind: str, folder: Path, ready: bool = False) -> AsyncIterator[Ingest]:
    """A process of this kind; a `ready` one is not as small: see tests.ready_process."""
    ready_file, log = folder / f"{kind}.ready", folder / f"{kind}.log"
    command = [sys.executable, "-m", f"services.{kind}", "--parent-pid", str(os.getpid())]
    command += ["--root", (folder / "data").as_uri(), "--ready-file", str(ready_file)]
    with log.open("wb") as file:
        begin: Any = create_subprocess if ready else asyncio.create_subprocess_exec
        process = await begin(*command, stderr=file)
    try:
        async with asyncio.timeout(120):
            while not ready_file.exists():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.02)
        yield Ingest(process, json.loads(ready_file.read_text())["peer_address"], log)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


def channel(address: str) -> grpc.aio.Channel:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(address, options=options)


def method(opened: grpc.aio.Channel, path: str = PUBLISH) -> Any:
    return opened.unary_unary(path)


async def ended(call: Any) -> grpc.aio.AioRpcError | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    return None


def field(number: int, content: bytes) -> bytes:
    length, encoded = len(content), bytearray()
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes([number << 3 | 2]) + bytes(encoded) + content


def pairs(count: int) -> bytes:
    """This many headers of a message, ten million at most."""
    begin, end = field(2, field(1, bytes(7)) + field(2, b"x")).split(bytes(7))
    return b"".join([begin + b"%07d" % number + end for number in range(count)])


MILLIONS: list[tuple[str, str, Callable[[], bytes]]] = [
    (PUBLISH, "runs[0].headers", lambda: field(1, pairs(1_000_000))),
    (PUBLISH, "runs", lambda: field(1, b"") * 6_500_000),
    (PUBLISH, "runs[0].payloads", lambda: field(1, field(1, b"x") * 4_000_000)),
    (PUBLISH, "", lambda: b"\x78\x01" * 6_500_000),  # fields that there are not
    (GET, "message_ids", lambda: field(1, b"\x01" * 13_000_000)),
    (GET, "", lambda: b"\x08\x01" * 6_500_000),
]


async def test_a_request_of_a_million_items_is_refused_and_blocks_no_caller(tmp_path: Path) -> None:
    await at_last(tmp_path, send_requests_of_a_million_items)


async def send_requests_of_a_million_items(folder: Path) -> object:
    """Returns what took too long."""
    async with ingest(folder) as there, channel(there.address) as opened:
        # Given an ingest at rest
        before = there.resident

        # When such requests come, three of each at once, and on a stream
        for method, name, make in MILLIONS:
            request = make()
            call: Any = opened.unary_unary(method)
            for error in await asyncio.gather(
                *(ended(call(request, timeout=60)) for _ in range(3))
            ):
                assert error is not None, name
                refusal = from_rpc_error(error)
                assert refusal.reason == "TOO_MANY_ITEMS", (name, refusal)
                if name:
                    assert refusal.message.startswith(f"{name}: "), refusal

        stream: Any = opened.stream_stream(PUBLISH_STREAM)
        on_stream = field(2, field(1, pairs(120_000)))  # Two megabytes, as many as fit on one
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream(iter([on_stream]), timeout=60):
                pass
        assert from_rpc_error(caught.value).reason == "TOO_MANY_ITEMS"

        # Then its memory is given back
        async with asyncio.timeout(60):
            while there.resident > before + 64 * MEBIBYTE:
                await asyncio.sleep(0.1)
        # And no step of the ingest's event loop took long
        said = there.log.read_text()
        return said if longest_step_ms(said) >= STEP_MS_MAX else None


def lists_of(kind: str) -> Iterator[tuple[Method, str, bytes]]:
    """Each list of each request that a process takes, as long as it may be to be parsed."""
    for one in methods_at(kind):
        for repeated in one.request.fields:
            inner = repeated.message_type
            if not repeated.is_repeated or (inner and inner.GetOptions().map_entry):
                continue
            request: Any = GetMessageClass(one.request)()
            for name, value in MEANT.items():
                if name in one.request.fields_by_name:
                    setattr(request, name, value)
            data = request.SerializeToString()
            if repeated.cpp_type in NUMBERS:
                data += field(repeated.number, b"\x01" * (NUMBERS_MAX - 1))
            else:
                item = b"" if inner is not None else b"q"
                each = MESSAGE_ITEMS if inner is not None else TEXT_ITEMS
                data += field(repeated.number, item) * (ITEMS_MAX // each - 1)
            yield one, repeated.name, data


MEANT = {"queue_id": "q", "message_id": 1, "first_number": 1, "reason": 1, "job": "restore"}
"""What requests must have for their lists to be looked at."""


@pytest.mark.parametrize("kind", ["ingest", "broker", "router", "janitor"])
async def test_the_longest_lists_that_are_parsed_block_no_caller(tmp_path: Path, kind: str) -> None:
    await at_last(tmp_path, partial(send_the_longest_lists, kind))


async def send_the_longest_lists(kind: str, folder: Path) -> object:
    """Returns what took too long."""
    async with serving(kind, folder, ready=True) as there, channel(there.address) as opened:
        for one, name, data in lists_of(kind):
            error = await ending(opened, one, data, timeout_s=60)

            assert error.code() in REFUSALS, (one.path, name, error)
            said = there.log.read_text()
            if longest_step_ms(said) >= STEP_MS_MAX:
                return one.path, name, said
    return None


async def on_stream(opened: grpc.aio.Channel, request: bytes) -> grpc.StatusCode | None:
    """How a stream ends on which this request is sent; None where it is answered."""
    call: Any = opened.stream_stream(PUBLISH_STREAM)(timeout=120)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(request)
    with suppress(grpc.aio.AioRpcError):
        if await call.read() is not grpc.aio.EOF:
            call.cancel()
            return None
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_request_that_unpacks_to_more_than_may_be_is_not_unpacked(tmp_path: Path) -> None:
    async with ingest(tmp_path) as there, channel(there.address) as opened:
        before = there.peak
        call: Any = opened.unary_unary(PUBLISH)

        error = await ended(
            call(bytes(110 * MEBIBYTE), timeout=60, compression=grpc.Compression.Gzip)
        )

        assert error is not None
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert there.peak - before < 32 * MEBIBYTE


async def test_senders_that_stall_do_not_hold_up_the_others(tmp_path: Path) -> None:
    await at_last(tmp_path, publish_beside_senders_that_stall)


PROBE_S_MAX = 0.5
"""A process, or a test, that takes longer for a probe was held up by what else the machine does:
probes do not wait for other requests. A publish is refused for that after 2 s."""


async def publish_beside_senders_that_stall(folder: Path) -> object:
    """Returns the errors, if the process was held up: then they may come from that."""
    async with ingest(folder) as there, channel(there.address) as opened:
        host, port = there.address.split(":")

        # Given more stalled requests than may arrive at once: a part of each was sent
        stalled = []
        for _ in range(4 * limits.ARRIVING_AT_ONCE):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun_request(there.address))
            await writer.drain()
            stalled.append(writer)

        # When others publish
        small = ingest_pb2.PublishRequest(runs=[ingest_pb2.PublishRun(payloads=[b"x"])])
        call: Any = opened.unary_unary(PUBLISH)
        publishing = asyncio.gather(
            *(ended(call(small.SerializeToString(), timeout=30)) for _ in range(20))
        )
        health: Any = health_pb2_grpc.HealthStub(opened)
        slowest_s = 0.0
        while not publishing.done():
            began_s = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            await asyncio.sleep(0.01)
            slowest_s = max(slowest_s, time.monotonic() - began_s)

        # Then they are served
        errors = [error for error in await publishing if error is not None]
        for writer in stalled:
            writer.close()
        assert not errors or slowest_s > PROBE_S_MAX, (errors, slowest_s)
        return errors


def begun_request(address: str) -> bytes:
    """HTTP/2 as far as the first bytes of a publish of a megabyte."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": PUBLISH,
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\x00" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode()
        for key, value in headers.items()
    )
    message = b"\x00" + (1 << 20).to_bytes(4, "big") + field(1, bytes(100))[:100]
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, b"")
        + frame(1, 4, 1, block)
        + frame(0, 0, 1, message)
    )


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    length = len(content).to_bytes(3, "big")
    return length + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
