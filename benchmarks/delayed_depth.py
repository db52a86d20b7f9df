"""What very many delayed messages cost a broker: how fast they come in, and how much it holds.

python -m benchmarks.delayed_depth --messages 1600000

Assigns messages with times scattered over ten hours to one queue of a broker of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.suite.servers import free_port
from libs.serving.peers.channels import open_channel
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, queue_pb2, queue_pb2_grpc

AT_ONCE = 5000
TELL_EVERY = 200_000
HOUR_MS = 3_600_000


def resident_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line) // 1024


async def created(queues: Any) -> None:
    request = queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id="delayed"))
    while True:
        try:
            await queues.CreateQueue(request, timeout=5)
        except grpc.RpcError:
            await asyncio.sleep(0.2)
        else:
            return


async def fill(port: int, pid: int, messages: int) -> None:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await created(queue_pb2_grpc.QueueServiceStub(channel))
        stub = assignment_pb2_grpc.AssignmentServiceStub(channel)
        state = await stub.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
        began, begin_ms = time.perf_counter(), int(time.time() * 1000) + HOUR_MS
        for first in range(1, messages, AT_ONCE):
            ids = range(first, first + AT_ONCE)
            assignment = assignment_pb2.QueueAssignment(
                queue_id="delayed",
                message_ids=ids,
                visible_at_ms=[begin_ms + random.randrange(10 * HOUR_MS) for _ in ids],
            )
            piece = assignment_pb2.LogRange(
                previous_sequence=first - 1,
                last_sequence=ids[-1],
                assignments=[assignment],
                config_revision=state.config_revision,
            )
            await stub.Assign(assignment_pb2.AssignRequest(ranges=[piece]))
            if not ids[-1] % TELL_EVERY:
                rate = ids[-1] / (time.perf_counter() - began)
                print(f"{ids[-1]:9} delayed, {rate:6.0f} msg/s, {resident_mb(pid)} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delayed_depth")
    parser.add_argument("--messages", type=int, default=1_600_000)
    given = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, "-m", "services.broker", "--root", Path(folder).as_uri()]
        with (Path(folder) / "log").open("wb") as log:
            broker = subprocess.Popen([*command, "--peer-port", str(port)], stderr=log, stdout=log)
        try:
            asyncio.run(fill(port, broker.pid, given.messages))
        finally:
            broker.terminate()
            broker.wait()


if __name__ == "__main__":
    main()
