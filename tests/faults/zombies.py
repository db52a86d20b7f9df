"""A history with kills, freezes and zombies, judged from what its clients wrote down.

Clients of all kinds work through the public client (tests.faults.mixed_work) while members are
killed, frozen, and replaced while frozen.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import slatemq
from slatemq.errors import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.faults.mixed_work import LEASE_S, Work, run_work
from tests.faults.shard_processes import Member

log = logging.getLogger(__name__)

CHANGING_TASKS = 8

OWNERS = 4
"""The first members, two ingests and two brokers, own data; the others are routers."""

HISTORY = "history.jsonl"
"""What clients wrote down, in the folder of a run."""


async def change_queues(client: slatemq.Client, work: Work, task: int, count: int) -> None:
    """Create, update, pause, resume and delete queues that get nothing."""
    for number in range(count):
        queue_id = f"changing-{task}-{number // 5 % 50}"
        change = number % 5
        try:
            await _change(client, queue_id, change)
        except (
            AlreadyExists,
            DeadlineExceeded,
            NotFound,
            ResourceExhausted,
            Unavailable,
        ) as error:
            log.debug("%s: %s", queue_id, error)
        work.changes_count += 1


async def _change(client: slatemq.Client, queue_id: str, change: int) -> None:
    match change:
        case 0:
            await client.create_queue(queue_id, filter='headers.n == "none"')
        case 1:
            await client.update_queue(queue_id, filter='headers.class == "none"')
        case 2:
            await client.pause_queue(queue_id)
        case 3:
            await client.resume_queue(queue_id)
        case _:
            await client.delete_queue(queue_id)


async def disturb(members: Sequence[Member], seed: int, end: float) -> list[str]:
    """One mishap after another, until `end` by the monotonic clock; returns what was done."""
    random_ = random.Random(seed)
    done: list[str] = []
    while time.monotonic() < end:
        member = random_.choice(members)
        seconds = random_.choice((0.5, 2.0, 6.0, 12.0))
        mishap: Awaitable[None]
        match random_.randrange(4 if member.service != "router" else 2):
            case 0:
                what, mishap = "killed", member.kill()
            case 1:
                what, mishap = f"frozen for {seconds:g} s", member.freeze(asyncio.sleep(seconds))
            case _:
                what, mishap = (
                    f"replaced and thawed after {seconds:g} s",
                    member.replace(asyncio.sleep(seconds)),
                )
        began = time.monotonic()
        await mishap
        done.append(f"{member.name} {what}")
        print(f"{done[-1]} (took {time.monotonic() - began:.1f} s)", flush=True)
        await asyncio.sleep(random_.uniform(0.5, 4.0))
    return done


async def run_zombies(folder: Path, seconds: float, seed: int, changes: int) -> Work:
    """One history; raises when a member cannot start again, or a zombie does not end as fenced."""
    members = [
        *(Member(folder, "ingest", shard) for shard in range(2)),
        *(Member(folder, "broker", shard) for shard in range(2)),
        *(Member(folder, "router", shard) for shard in range(2)),
    ]

    async def mishaps(_: Work) -> None:
        end = time.monotonic() + seconds
        done = await asyncio.gather(
            disturb(members[:OWNERS], seed, end), disturb(members[OWNERS:], seed + 1, end)
        )
        print(f"{sum(map(len, done))} mishaps")

    return await run_history(folder, members, members[2], mishaps, changes, seed=seed)


async def run_history(
    folder: Path,
    members: Sequence[Member],
    broker: Member,
    mishaps: Callable[[Work], Awaitable[None]],
    changes: int = 0,
    settled_s: float = 2 * LEASE_S,
    seed: int = 1,
) -> Work:
    """Starts the members, and has clients work while something happens to them.

    After that all that was answered must come, and for `settled_s` nothing may come twice. The
    history is in the folder, for `judged`.
    """
    (folder / "data").mkdir()
    try:
        await asyncio.gather(*(member.start() for member in members))

        async def changed(work: Work) -> None:
            each = changes // CHANGING_TASKS
            async with slatemq.connect(broker.address) as client:
                changing = [
                    change_queues(client, work, task, each) for task in range(CHANGING_TASKS)
                ]
                await asyncio.gather(mishaps(work), *changing)

        brokers_count = sum(member.service == "broker" for member in members)
        work = await run_work(
            folder / HISTORY,
            broker.address,
            seed,
            changed,
            settled_s,
            brokers_count=brokers_count,
        )
        print(f"{work.changes_count} queue changes")
    finally:
        await asyncio.gather(*(member.close() for member in members))
    return work
