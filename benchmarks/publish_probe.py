"""How many messages a second one ingest takes: batches in flight, then single publishes.

python -m services.ingest --root file:///tmp/probe --port 7401 &
python -m benchmarks.publish_probe 127.0.0.1:7401
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING

from libs.serving.peers.channels import open_channel
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub

if TYPE_CHECKING:
    from slatemq.v1.ingest_pb2_grpc import IngestServiceAsyncStub

HEADERS = {"type": "order", "region": "eu"}

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]


def batch(count: int, payload_bytes: int) -> PublishRequest:
    made = (os.urandom(payload_bytes) for _ in range(count))
    messages = [PublishRun(payloads=[payload], headers=HEADERS) for payload in made]
    return PublishRequest(runs=messages, request_id=str(uuid.uuid4()))


async def measure(
    stub: IngestServiceAsyncStub, seconds: float, in_flight: int, count: int, payload_bytes: int
) -> None:
    ends_at = time.perf_counter() + seconds
    took: list[float] = []

    async def publish() -> None:
        request = batch(count, payload_bytes)
        while time.perf_counter() < ends_at:
            request.request_id = str(uuid.uuid4())
            began = time.perf_counter()
            await stub.Publish(request)
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(publish() for _ in range(in_flight)))
    rate = len(took) * count / (time.perf_counter() - began)
    took.sort()
    p50, p99 = took[len(took) // 2] * 1000, took[len(took) * 99 // 100] * 1000
    print(
        f"{payload_bytes:6} B x {count:4}, {in_flight:2} in flight: "
        f"{rate:8.0f} msg/s, publish p50 {p50:6.1f} ms, p99 {p99:6.1f} ms"
    )


async def run(address: str, seconds: float) -> None:
    async with open_channel(address) as channel:
        stub = IngestServiceStub(channel)
        await measure(stub, 1, 4, 100, 1024)
        await measure(stub, seconds, 4, 1000, 1024)
        await measure(stub, seconds, 4, 1000, 100)
        await measure(stub, seconds, 64, 1, 1024)
        await measure(stub, seconds, 1, 1, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=5)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(given.address, given.seconds))


if __name__ == "__main__":
    main()
