"""People and jobs that work on the queues of a simulated world while clients use them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from uuid import uuid4

from slatemq._admin.entry_models import Entry, StateName
from slatemq._admin.redrives import RedriveState
from slatemq._admin.settling import DropDeadLetter
from slatemq.client import Client
from slatemq.errors import AlreadyExists, NotFound, SlateMQError
from tests.simulation.cluster import Cluster
from tests.simulation.judge import Judge
from tests.simulation.workload import (
    BACKOFF,
    COLORS,
    LATE,
    LEASE_S,
    PARTITIONS,
    PURGED_ON_THE_WAY,
    QUEUES,
    RELOCATED,
    TAIL,
    Workload,
    filter_of,
    key_of,
    now_ms,
)

ALL: Final = "all"
"""The queue that every message reaches."""


class Operators:
    """Attributes:
    stopping: No more changes from now on, but of what waits to be redriven.
    """

    def __init__(self, cluster: Cluster, judge: Judge, workload: Workload, seed: str) -> None:
        self._cluster = cluster
        self._judge = judge
        self._workload = workload
        self._seed = seed
        self._chance = random.Random(f"{seed}/operators")
        self._color = QUEUES["edited"].value
        self._edits = 0
        purges = random.Random(f"{seed}/purged on the way")
        self._purged_on_the_way = PURGED_ON_THE_WAY if purges.random() < 0.7 else ()
        self.stopping = False
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        names = self._workload.names
        works: list[tuple[str, Callable[[Client, random.Random], Awaitable[None]]]] = []
        if "edited" in names:
            works.append(("editor", self._edit))
        if self._chance.random() < 0.6:
            works.append(("corrector", self._correct))
        if "moved" in names:
            works.append(("mover", self._empty))
        if "flaky" in names:
            works.append(("redriver", self._redrive))
        if self._chance.random() < 0.5:
            works.append(("starter", self._start_late))
        share = 0.7 if self._workload.partitioned else 0.5
        if random.Random(f"{self._seed}/to another broker").random() < share:
            works.append(("relocator", self._relocate))
        for name, work in works:
            machine = self._cluster.client_machine(name)
            self.tasks.append(machine.run(self._work(name, work)))

    async def _work(
        self, name: str, work: Callable[[Client, random.Random], Awaitable[None]]
    ) -> None:
        chance = random.Random(self._chance.random())
        async with await self._workload.connected() as client:
            await work(client, chance)

    # --- Edits --------------------------------------------------------------

    async def _edit(self, client: Client, chance: random.Random) -> None:
        """Change the filter of a queue, and pause it."""
        while not self.stopping:
            await asyncio.sleep(chance.uniform(0.1, 1.5))
            if chance.random() < 0.7:
                await self._change_filter(client, "edited", chance.choice(COLORS))
                # At once, while routers may not know of the change yet.
                for color in COLORS:
                    await self._workload.publish(client, {"color": color, "rank": "1"})
            else:
                await self._pause(client, "edited", chance.random())

    async def _change_filter(self, client: Client, name: str, color: str) -> None:
        change = self._judge.changing(name, "color", color)
        wanted = filter_of("color", color)

        async def attempt() -> None:
            # By its etag, so that a try whose answer was lost changes nothing later.
            queue = await client.get_queue(name)
            # A try may have changed some of its partitions.
            is_partial = queue.settings_differ or queue.missing_partitions
            if queue.filter != wanted or is_partial:
                await client.update_queue(name, etag=queue.etag, filter=wanted)

        if color == self._color:
            await self._workload.insist(attempt)
        else:
            is_once = name not in self._workload.partitioned
            with self._judge.change("queue.updated", name, is_once=is_once):
                await self._workload.insist(attempt)
        self._color = color
        self._judge.done(change)

    async def _pause(self, client: Client, name: str, seconds: float) -> None:
        with self._judge.change("queue.paused", name, is_once=False):
            await self._workload.insist(lambda: client.pause_queue(name))
        pause = self._judge.paused(name)
        await asyncio.sleep(seconds)
        self._judge.done(pause)
        with self._judge.change("queue.resumed", name, is_once=False):
            await self._workload.insist(lambda: client.resume_queue(name))

    async def _relocate(self, client: Client, chance: random.Random) -> None:
        """Move queues between brokers, but those that commands name together."""
        names = [name for name in RELOCATED if name in self._workload.names]
        names += [name for name in names if name != ALL]  # It has every message, so it moves less.
        async with await self._workload.connected() as beside:
            while names and not self.stopping:
                await asyncio.sleep(chance.uniform(0.1, 2.0))
                name = chance.choice(names)
                if name == "flaky":
                    await self._wait_for_dead_letters(beside, name)
                if name in self._purged_on_the_way and chance.random() < 0.8:
                    # Listed before: who lists a queue that moves waits until it is there.
                    listed = await self._listed(beside, name)
                    move = self._move(client, name, chance)
                    delay_s = chance.choice((0.0, 0.02, 0.1, 0.5)) * chance.random()
                    await asyncio.gather(
                        move, self._purge_on_the_way(beside, name, listed, delay_s)
                    )
                else:
                    await self._move(client, name, chance)

    async def _wait_for_dead_letters(self, client: Client, name: str) -> None:
        """Wait until a queue has some to take along, for three seconds at most."""
        for _ in range(30):
            page = await self._workload.insist(
                lambda: client.entry_page(name, "failed", page_size=1)
            )
            if self.stopping or (page is not None and page.entries):
                return
            await asyncio.sleep(0.1)

    async def _purge_on_the_way(
        self, client: Client, name: str, listed: Sequence[int], delay_s: float
    ) -> None:
        """Purge a queue that begins to move: at either broker, whichever has it by then."""
        await asyncio.sleep(delay_s)
        await self._purge(client, name, listed)

    async def _move(self, client: Client, name: str, chance: random.Random) -> None:
        """Move a queue to any shard, or a partition of it to the one without any."""
        shard = partition = None
        if name in self._workload.partitioned:
            partition = chance.randrange(PARTITIONS)
        else:
            shard = chance.randrange(self._workload.brokers)
        what = name if partition is None else f"partition {partition} of {name}"
        self._cluster.tell(f"{what} begins to move")
        places, part = self._workload.places, partition or 0
        relocation = self._judge.relocating(name, partition)
        places.moving(name, part, shard, now_ms())
        # Until it is over: one that is cancelled is begun again.
        there = await self._workload.insist(
            lambda: client.move_queue(name, shard, partition=partition)
        )
        assert there is not None, "no error is fine"
        places.moved(name, part, there, now_ms())
        self._judge.done(relocation)
        self._cluster.tell(f"{what} moved to broker {there}")

    async def _empty(self, client: Client, chance: random.Random) -> None:
        """Purge a queue, and delete it and create it again."""
        name = "moved"
        while not self.stopping:
            await asyncio.sleep(chance.choice((1.0, 5.0, 10.0)))
            listed = await self._listed(client, name)
            if chance.random() < 0.5:
                await self._purge(client, name, listed)
            else:
                loss = self._judge.losing(name, listed)
                self._cluster.tell(f"{name} is deleted")
                with self._judge.change("queue.deleted", name):
                    await self._workload.insist(lambda: client.delete_queue(name), NotFound)
                self._judge.done(loss)
                await self._workload.create_queue(client, name)
                self._cluster.tell(f"{name} is there again")

    async def _purge(self, client: Client, name: str, listed: Sequence[int]) -> None:
        """Remove all that waits in a queue or is leased there; `listed` was in it before."""
        loss = self._judge.losing(name, listed)
        self._cluster.tell(f"{name} is purged")
        self._judge.may_change("queue.purged", name, is_once=False)
        count = await self._workload.insist(
            lambda: client.purge_queue(name, ["available", "in_flight"])
        )
        if count:  # one that removed nothing has no event
            self._judge.has_changed("queue.purged", name)
        self._judge.done(loss)
        self._cluster.tell(f"{name} was purged of {count}")

    async def _listed(self, client: Client, name: str) -> list[int]:
        """The messages that are in a queue now; others come and go meanwhile."""
        states: tuple[StateName, ...] = ("available", "delayed", "in_flight")

        async def list_all() -> list[int]:
            return [
                entry.message_id
                for state in states
                async for entry in client.list_entries(name, state)
            ]

        return await self._workload.insist(list_all) or []

    # --- Messages that wait -------------------------------------------------

    async def _correct(self, client: Client, chance: random.Random) -> None:
        """Change delayed messages, and cancel some, in the queue that has all."""
        while not self.stopping:
            await asyncio.sleep(chance.uniform(0.2, 1.5))
            try:
                page = await client.entry_page(ALL, "delayed", page_size=10, view="full")
                stored = [entry for entry in page.entries if entry.message is not None]
                if not stored:
                    continue
                entry = chance.choice(stored)
                if chance.random() < 0.7:
                    await self._edit_message(client, entry)
                else:
                    await self._cancel(client, entry)
            except SlateMQError as error:
                self._workload.note_error("correcting", error)

    async def _edit_message(self, client: Client, entry: Entry) -> None:
        key = key_of(entry.message)
        self._edits += 1
        tail = TAIL + f"edit {self._edits}".encode()
        content = self._judge.editing(key, entry.message_id, tail)
        # By its etag: a try whose answer was lost changes nothing after a later edit.
        await client.edit_message(entry.handle, payload=key + tail, etag=entry.etag)
        self._judge.edited(ALL, key, entry.message_id, content)
        self._cluster.tell(f"{key!r} is edited")

    async def _cancel(self, client: Client, entry: Entry) -> None:
        key = key_of(entry.message)
        self._judge.dropping(ALL, key)
        await client.cancel_entry(entry.handle)
        self._judge.cancelled(ALL, key, entry.message_id)
        self._cluster.tell(f"{key!r} is cancelled")

    # --- Dead letters -------------------------------------------------------

    async def _redrive(self, client: Client, chance: random.Random) -> None:
        """Redrive dead letters, back or into another queue, and drop some."""
        while not self._workload.stopping:
            await asyncio.sleep(chance.uniform(0.2, 2.0))
            try:
                if not self.stopping and chance.random() < 0.3:
                    await self._drop(client, chance)
                    continue
                into = "rescue" if chance.random() < 0.5 else ""
                name = str(uuid4())
                redriving = self._judge.redriving("flaky")
                redrive = await client.start_redrive("flaky", into=into, request_id=name)
                while redrive.state is RedriveState.RUNNING:
                    await asyncio.sleep(0.1)
                    redrive = await client.get_redrive(redrive)
                self._judge.done(redriving)
                self._cluster.tell(f"redrive into {into or 'flaky'}: {redrive.state}")
            except SlateMQError as error:
                self._workload.note_error("redriving", error)

    async def _drop(self, client: Client, chance: random.Random) -> None:
        page = await client.entry_page("flaky", "failed", page_size=10, view="full")
        stored = [entry for entry in page.entries if entry.message is not None]
        if not stored:
            return
        entry = chance.choice(stored)
        assert entry.message is not None, "stored"
        key = key_of(entry.message)
        self._judge.dropping("flaky", key)
        await client.settle_dead_letters([DropDeadLetter(entry.handle)])
        self._judge.dropped("flaky", key, entry.message_id)

    # --- Replays ------------------------------------------------------------

    async def _start_late(self, client: Client, chance: random.Random) -> None:
        await asyncio.sleep(chance.uniform(1.0, 6.0))
        count = self._workload.partitions_of(LATE)
        self._judge.creating(LATE, is_replayed=True, partitions_count=count)

        async def create() -> None:
            await client.create_queue(
                LATE,
                start_from="beginning",
                filter="true",
                lease=LEASE_S,
                backoff=BACKOFF,
                max_attempts=1000,
                partitions=PARTITIONS if LATE in self._workload.partitioned else None,
            )

        with self._judge.change("queue.created", LATE):
            await self._workload.insist(create, AlreadyExists)
        window_ms = self._cluster.window_s * 1000
        self._judge.created(LATE, now_ms() - window_ms if window_ms else 0)
        await self._workload.note_place(client, LATE)
        self._cluster.tell("late is created")
        self._workload.consume(LATE)
