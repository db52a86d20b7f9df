"""Shows how much memory each service takes under load: `python -m benchmarks.memory_probe`.

Starts a stack of its own on a temporary folder, publishes, drains, and prints the peaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import slatemq

BATCH = 1000


async def run(endpoint: str, count: int, payload_bytes: int) -> None:
    """Publishes `count` messages, then claims and acks them all."""
    async with slatemq.connect(endpoint) as client:
        await client.create_queue("memory")
        headers = {"queue": "memory"}
        payloads = (os.urandom(payload_bytes) for _ in range(BATCH))
        batch = [slatemq.OutgoingMessage(payload, headers) for payload in payloads]
        room = asyncio.Semaphore(4)

        async def publish() -> None:
            async with room:
                await client.publish_many(batch)

        await asyncio.gather(*(publish() for _ in range(count // BATCH)))
        done = 0
        while done < count // BATCH * BATCH:
            claimed = await client.claim("memory", BATCH, wait=10)
            await client.ack([message.lease_token for message in claimed])
            done += len(claimed)


def peak_mb(pid: int) -> float:
    """The most that a process had resident, in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def main() -> None:
    """Measures once and prints a line for each service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--payload-bytes", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        stack = subprocess.Popen(
            [sys.executable, "-m", "services", "--data", f"{folder}/data", "--ready-file", ready]
        )
        try:
            while not ready.exists():
                time.sleep(0.1)
            fields = json.loads(ready.read_text(encoding="utf-8"))
            asyncio.run(run(fields["endpoint"], args.messages, args.payload_bytes))
            for name, pid in fields["pids"].items():
                print(f"{name:9} {peak_mb(pid):6.0f} MB at the peak")
        finally:
            stack.send_signal(signal.SIGTERM)
            stack.wait()


if __name__ == "__main__":
    main()
