"""A client that behaves, beside those that do not: it publishes, claims and acks, one at a time.

A process of its own, so that its latency is the servers' and not the attacker's. It gets its orders
as JSON in its argument, prints a line for each message, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import slatemq
from slatemq.errors import SlateMQError

CALL_S: Final = 60.0
"""How long it tries to publish, to claim and to ack; what takes longer is lost."""

PAUSE_S: Final = 0.02
"""Between two messages: it shall measure the servers, not load them."""


async def _one(client: slatemq.Client, queue: str, number: int, seen: set[int]) -> list[str]:
    """Take one message through; returns what was wrong."""
    faults = []
    await client.publish(str(number).encode(), {"queue": queue})
    end = time.monotonic() + CALL_S
    while number not in seen:
        if time.monotonic() > end:
            return [f"message {number} was published and is not delivered"]
        with suppress(slatemq.errors.ResourceExhausted, slatemq.errors.Unavailable):
            for message in await client.claim(queue, 10, wait=5, lease=2 * CALL_S):
                got = int(message.payload)
                if got in seen:
                    faults.append(f"message {got} was acked and is delivered again")
                await message.ack()
                seen.add(got)
    return faults


async def _run(orders: dict[str, str]) -> None:
    credentials = slatemq.Credentials(ca=orders["ca"], token=orders["token"])
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    async with slatemq.connect(
        orders["endpoint"],
        credentials=credentials if orders["ca"] else None,
        call_timeout=CALL_S,
    ) as client:
        await client.create_queue(orders["queue"])
        number, seen = 0, set[int]()
        while not ended.done():
            number += 1
            began = time.monotonic()
            try:
                faults = await _one(client, orders["queue"], number, seen)
            except SlateMQError as error:
                faults = [f"message {number}: {type(error).__name__}: {error.message}"]
            _say({"ms": (time.monotonic() - began) * 1000, "faults": faults})
            await asyncio.sleep(PAUSE_S)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Witness:
    """The process, and what it has said.

    Attributes:
        latencies_ms: Of each message, from before its publish until its ack was answered.
        faults: What was wrong.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.latencies_ms: list[float] = []
        self.faults: list[str] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, endpoint: str, queue: str, ca: Path | None = None, token: str = ""
    ) -> Witness:
        orders = {"endpoint": endpoint, "queue": queue, "ca": str(ca or ""), "token": token}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, json.dumps(orders)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            self.latencies_ms.append(said["ms"])
            self.faults += said["faults"]

    async def count(self, messages: int) -> None:
        """Wait until this many more messages went through."""
        wanted = len(self.latencies_ms) + messages
        async with asyncio.timeout(3 * CALL_S):
            while len(self.latencies_ms) < wanted:
                if self._reading.done():
                    raise RuntimeError("the witness has ended")
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Let it finish its message, and end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(2 * CALL_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            self.faults.append("the witness does not end")
        await self._reading
        if self._process.returncode:
            self.faults.append(f"the witness ended with {self._process.returncode}")


if __name__ == "__main__":
    asyncio.run(_run(json.loads(sys.argv[1])))
