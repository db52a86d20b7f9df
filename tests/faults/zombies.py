"""A history with kills, freezes and zombies, judged from what its clients wrote down.

Producers and consumers work through the public client while members are killed, frozen, and
replaced while frozen. Messages are never nacked and may be delivered many times, so a dead letter,
a lost message and a message that is stored twice are all faults of the system.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import slatemq
from slatemq.errors import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.acceptance.workload import Note, find_faults
from tests.faults.shard_processes import Member

log = logging.getLogger(__name__)

LEASE_S = 4.0
PUBLISH_BATCH = 20
CLAIM_MAX = 100
PAUSE_S = 0.2
STALLED_S = 180.0
CHANGING_TASKS = 8

OWNERS = 3
"""The first members, two ingests and a broker, own data; the others are routers."""

FILTERS: dict[str, tuple[str, Callable[[int], bool]]] = {
    "all": ("true", lambda n: True),
    "even": ("int(headers.n) % 2 == 0", lambda n: n % 2 == 0),
    "third": ('headers.class == "0"', lambda n: n % 3 == 0),
}
"""Filter by queue, as CEL and as Python."""


@dataclass
class History:
    """What the clients saw."""

    answered: dict[int, int] = field(default_factory=dict)
    """Message ID by number, of each publish that was answered."""

    unanswered: set[int] = field(default_factory=set)
    """Numbers of publishes whose outcome is unknown."""

    notes: dict[tuple[str, int], list[Note]] = field(default_factory=lambda: defaultdict(list))
    """Deliveries by queue and number."""

    dead_letters: dict[str, int] = field(default_factory=dict)
    changes_count: int = 0
    acked: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Numbers by queue whose ack was answered with OK, or whose outcome is unknown."""

    moved_at: float = field(default_factory=time.monotonic)

    def missing(self) -> dict[str, int]:
        """How many answered publishes of each queue no consumer has acked."""
        return {
            queue: sum(matches(n) and n not in self.acked[queue] for n in self.answered)
            for queue, (_, matches) in FILTERS.items()
        }

    def faults(self) -> list[str]:
        """Everything that should not have happened."""
        found = [f"{queue} lost {count}" for queue, count in self.missing().items() if count]
        found += [
            f"{q} has {count} dead letters" for q, count in self.dead_letters.items() if count
        ]
        ids: dict[int, set[int]] = defaultdict(set)
        for (queue, number), notes in self.notes.items():
            if not FILTERS[queue][1](number):
                found.append(f"{queue} got number {number}, which its filter refuses")
            found += [f"{queue}: {fault}: {number}" for fault in find_faults(notes, LEASE_S * 1000)]
            ids[number] |= {note.message_id for note in notes}
        for number, message_id in self.answered.items():
            ids[number].add(message_id)
        found += [f"{n} is stored as {sorted(i)}" for n, i in ids.items() if len(i) > 1]
        return found


async def produce(client: slatemq.Client, history: History, numbers: Iterable[int]) -> None:
    """Publish numbers until stopped; every other time singly."""
    for turn in itertools.count():
        batch = list(itertools.islice(iter(numbers), 1 if turn % 2 else PUBLISH_BATCH))
        messages = [
            slatemq.OutgoingMessage(
                json.dumps({"n": n}).encode(), {"n": str(n), "class": str(n % 3)}
            )
            for n in batch
        ]
        history.unanswered.update(batch)
        try:
            published = await client.publish_batch(messages)
        except (Unavailable, ResourceExhausted):
            continue
        history.unanswered.difference_update(batch)
        for number, message in zip(batch, published, strict=True):
            history.answered[number] = int(message)
        history.moved_at = time.monotonic()
        await asyncio.sleep(PAUSE_S)


async def consume(client: slatemq.Client, history: History, queue: str) -> None:
    """Claim and ack until cancelled."""
    while True:
        try:
            messages = await client.claim(queue, CLAIM_MAX, wait=1, lease=LEASE_S)
        except (Unavailable, ResourceExhausted):
            continue
        notes = []
        for message in messages:
            note = Note(message.message_id, message.attempts_count, message.lease_deadline_ms)
            history.notes[queue, json.loads(message.payload)["n"]].append(note)
            notes.append(note)
        if not messages:
            continue
        results = await client.ack([message.lease_token for message in messages])
        for note, message, error in zip(notes, messages, results, strict=True):
            note.acked = error is None
            if error is None or isinstance(error, Unavailable):
                history.acked[queue].add(json.loads(message.payload)["n"])
        history.moved_at = time.monotonic()


async def change_queues(client: slatemq.Client, history: History, task: int, count: int) -> None:
    """Create, update, pause, resume and delete queues that get nothing."""
    for number in range(count):
        queue_id = f"changing-{task}-{number // 5 % 50}"
        change = number % 5
        try:
            await _change(client, queue_id, change)
        except (AlreadyExists, DeadlineExceeded, NotFound, Unavailable) as error:
            log.debug("%s: %s", queue_id, error)
        history.changes_count += 1


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


async def run_zombies(folder: Path, seconds: float, seed: int, changes: int) -> History:
    """One history; raises when a member cannot start again, or a zombie does not end as fenced."""
    members = [
        *(Member(folder, "ingest", shard) for shard in range(2)),
        *(Member(folder, "broker", shard) for shard in range(1)),
        *(Member(folder, "router", shard) for shard in range(2)),
    ]

    async def mishaps(_: History) -> None:
        end = time.monotonic() + seconds
        done = await asyncio.gather(
            disturb(members[:OWNERS], seed, end), disturb(members[OWNERS:], seed + 1, end)
        )
        print(f"{sum(map(len, done))} mishaps")

    return await run_history(folder, members, members[2], mishaps, changes)


async def run_history(
    folder: Path,
    members: Sequence[Member],
    broker: Member,
    mishaps: Callable[[History], Awaitable[None]],
    changes: int = 0,
    settled_s: float = 2 * LEASE_S,
) -> History:
    """Starts the members, and has clients work while something happens to them.

    After that all that was answered must come, and for `settled_s` nothing may come twice.
    """
    (folder / "data").mkdir()
    history = History()
    try:
        await asyncio.gather(*(member.start() for member in members))
        async with slatemq.connect(broker.address) as client:
            for queue, (text, _) in FILTERS.items():
                await client.create_queue(
                    queue, filter=text, max_attempts=1_000, backoff=slatemq.Backoff.none()
                )
            await _work(client, history, mishaps, changes, settled_s)
    finally:
        await asyncio.gather(*(member.close() for member in members))
    return history


async def _work(
    client: slatemq.Client,
    history: History,
    mishaps: Callable[[History], Awaitable[None]],
    changes: int,
    settled_s: float,
) -> None:
    numbers = itertools.count()
    producers = [asyncio.create_task(produce(client, history, numbers)) for _ in range(2)]
    consumers = [asyncio.create_task(consume(client, history, queue)) for queue in FILTERS]
    changing = [
        asyncio.create_task(change_queues(client, history, task, changes // CHANGING_TASKS))
        for task in range(CHANGING_TASKS if changes else 0)
    ]
    try:
        await mishaps(history)
        await asyncio.gather(*changing)
        for producer in producers:
            producer.cancel()
        await asyncio.wait(producers)
        await _drained(history, [*consumers])
        await asyncio.sleep(settled_s)  # what is delivered once more would come now
        history.dead_letters = {
            queue: (await client.get_queue(queue)).counts.failed_count for queue in FILTERS
        }
        print(f"{history.changes_count} queue changes")
    finally:
        for task in (*producers, *consumers, *changing):
            task.cancel()
        await asyncio.wait([*producers, *consumers, *changing])


async def _drained(history: History, consumers: Sequence[asyncio.Task[None]]) -> None:
    """Wait until every answered publish is acked, or nothing moves any more."""
    history.moved_at = time.monotonic()
    while any(history.missing().values()):
        for consumer in consumers:
            if consumer.done():
                consumer.result()
        if time.monotonic() - history.moved_at > STALLED_S:
            return
        await asyncio.sleep(0.2)
