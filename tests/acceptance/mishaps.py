"""What happens to a stack while a workload runs on it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Protocol

from tests.acceptance.local_stack import LocalStack
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import LONG_LEASE_MS, Run, make_lines

SERVICES = ("ingest", "router", "broker")


class Work(Protocol):
    """Something that goes on."""

    @property
    def progress(self) -> float:
        """Part of the work that is done, 0 to 1."""


async def kill_along(stack: LocalStack, run: Work, victims: list[str]) -> None:
    """SIGKILL one service after another, spread evenly over the work of the run."""
    for number, victim in enumerate(victims, 1):
        while run.progress < number / (len(victims) + 1):
            await asyncio.sleep(0.01)
        pid = stack.signal(victim, signal.SIGKILL)
        await asyncio.to_thread(stack.wait_restarted, victim, pid)


async def ingest_down_under_claims(stack: LocalStack, stubs: Stubs, seconds: float) -> Run:
    """Stop ingest for so long while consumers claim what no cache holds; returns the run."""
    run = Run(make_lines(2_000), LONG_LEASE_MS)
    await run.create_queues(stubs, max_attempts=1)
    await run.publish(stubs)
    await _until_routed(stubs, run)
    # A new broker has no payload in memory.
    broker = stack.signal("broker", signal.SIGKILL)
    ingest = stack.signal("ingest", signal.SIGSTOP)
    try:
        await asyncio.to_thread(stack.wait_restarted, "broker", broker)
        consuming = asyncio.create_task(run.consume(stubs))
        await asyncio.sleep(seconds)
    finally:
        os.kill(ingest, signal.SIGCONT)
    await consuming
    await run.find_nothing_more(stubs)
    return run


async def _until_routed(stubs: Stubs, run: Run) -> None:
    while True:
        counts = [queue.counts.available_count for queue in await stubs.list_queues()]
        if sum(counts) == run.entries_count:
            return
        await asyncio.sleep(0.05)
