"""The limits: what gRPC and SlateDB give for the same bytes with nothing of ours around them."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.suite import payloads, servers
from benchmarks.suite.workloads import Measured
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

BATCH = 1000
DEPTHS = (1, 2, 4)
METHOD = "/bench.Echo/Echo"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
KEY = b"message%016d"


def _request(size: int) -> bytes:
    """A publish request of ours with this many messages, as bytes."""
    messages = [
        PublishRun(payloads=[payloads.make(n, size)], headers={"topic": "bench"})
        for n in range(BATCH)
    ]
    return PublishRequest(runs=messages).SerializeToString()


def _serve(port: int) -> None:
    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def run() -> None:
        server = grpc.aio.server(options=OPTIONS)
        handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Echo", handlers),)
        )
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


async def _echo(port: int, request: bytes, batches: int, depth: int) -> float:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call: Any = channel.unary_unary(METHOD)
        await call(request, wait_for_ready=True, timeout=30)
        left = iter(range(batches))

        async def one() -> None:
            for _ in left:
                if len(await call(request)) != len(request):
                    raise AssertionError("an echo of another length")

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(depth)))
        return batches * BATCH / (time.perf_counter() - began)


async def _write(folder: Path, size: int, batches: int, depth: int) -> float:
    """A batch of rows after the other, each flushed and synced; `depth` of them under way."""
    root = open_root(folder.as_uri())
    database = await root.database("ingest/0", Kind.INGEST)
    under_way: deque[asyncio.Task[None]] = deque()
    began = time.perf_counter()
    for at in range(batches):
        batch = Batch()
        for number in range(at * BATCH, (at + 1) * BATCH):
            batch.put(KEY % number, payloads.make(number, size))
        await database.write(batch)
        under_way.append(asyncio.create_task(database.flush()))
        if len(under_way) >= depth:
            await under_way.popleft()
    await asyncio.gather(*under_way)
    rate = batches * BATCH / (time.perf_counter() - began)
    await database.close()
    return rate


def _run(work: Any) -> float:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return float(runner.run(work))


def limits(sizes: Sequence[int], messages: int) -> Measured:
    """Both, for payloads of these sizes; each at the best of three depths."""
    numbers: dict[str, float] = {}
    batches = messages // BATCH
    port = servers.free_port()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(port,), daemon=True)
    server.start()
    try:
        for size in sizes:
            request = _request(size)
            best = max(_run(_echo(port, request, batches, depth)) for depth in DEPTHS)
            numbers[f"gRPC echo, messages/s of {size} B"] = best
    finally:
        server.terminate()
        server.join()
    for size in sizes:
        rates = []
        for depth in DEPTHS:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                rates.append(_run(_write(Path(folder), size, batches, depth)))
        numbers[f"SlateDB batches, messages/s of {size} B"] = max(rates)
    return Measured(numbers, {"batch": BATCH, "depths": DEPTHS})
