"""A random history lived on a real instance, and in plain Python, which says what jobs may remove.

What happened is known by the answers of the services. Two days pass, `early` and `late`: whatever
is short (a retention, a failed or done retention, the replay window, the age of letters) is over
for all that happened early, by the time that the jobs are asked to judge by, and for nothing that
happened late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import slatemq
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from services.janitor.snapshots import snapshots_of_all
from services.janitor.spark.source import options_of
from slatemq.v1 import queue_pb2, queue_pb2_grpc
from tests.integration.janitor.instances import Instance
from tests.integration.janitor.spark.tables_read import read

SHORT_S, LONG_S = 1, 3600

PAUSE_S = 1.5

BLOB_BYTES = 70_000

STATES = ("available", "in-flight", "done", "failed", "archived")


@dataclass
class Message:
    """What was published, and whether that is of old, and over."""

    payload: bytes
    queues: list[str]
    early: bool
    over: bool
    for_ever: bool


@dataclass
class Entry:
    """A message in a queue; `early` tells when it came into its state."""

    state: str
    early: bool
    attempts: int = 0
    received: slatemq.Received | None = None


@dataclass
class Queue:
    shard: int
    max_attempts: int
    done_retention_s: int
    failed_retention_s: int
    entries: dict[int, Entry] = field(default_factory=dict)


class Lived:
    """The history, and what is so after it, by the model.

    Attributes:
        judged_ms: The time for the jobs to judge by.
        stored: The messages that ingest has.
    """

    def __init__(self, made: Instance, number: int) -> None:
        self.random = random.Random(number)
        self.made = made
        self.queues: dict[str, Queue] = {}
        self.messages: dict[int, Message] = {}
        self.stored: set[int] = set()
        self.judged_ms = 0
        self.early = True

    async def live(self) -> None:
        """Both days."""
        for place, name in enumerate("abcdef"):
            await self._create(name, place % len(self.made.brokers))
        await self._day(8, 60)
        await asyncio.sleep(PAUSE_S)
        self.judged_ms = time.time_ns() // 1_000_000
        await asyncio.sleep(0.1)
        self.early = False
        await self._day(4, 30)

    async def _create(self, name: str, shard: int) -> None:
        choose = self.random.choice
        made = Queue(shard, choose((1, 1, 2)), choose((0, SHORT_S, LONG_S)), choose((0, SHORT_S)))
        stub = queue_pb2_grpc.QueueServiceStub(self.made.brokers[shard].there)
        wanted = queue_pb2.Queue(
            queue_id=name,
            filter=f'headers.{name} == "yes"',
            max_attempts=made.max_attempts,
            done_retention_s=made.done_retention_s,
            failed_retention_s=made.failed_retention_s,
        )
        wanted.backoff.kind = queue_pb2.Backoff.KIND_NONE  # what fails comes again at once
        await stub.CreateQueue(queue_pb2.CreateQueueRequest(queue=wanted))
        self.queues[name] = made

    async def _day(self, publishes: int, steps: int) -> None:
        for _ in range(publishes):
            await self._publish()
        await self.made.routed()
        for _ in range(steps):
            await self.random.choice((self._claim, self._claim, self._finish, self._redrive))()

    # --- What happens -------------------------------------------------------

    async def _publish(self) -> None:
        choose = self.random.choice
        queues = [name for name in self.queues if self.random.random() < 0.3]
        # What is short is over before the late day; then nothing short is published any more.
        retention_s = choose((0, SHORT_S, LONG_S)) if self.early else choose((0, LONG_S))
        size = choose((10, 10, BLOB_BYTES))
        some = [
            slatemq.OutgoingMessage(
                self.random.randbytes(size), dict.fromkeys(queues, "yes"), retention_s=retention_s
            )
            for _ in range(self.random.randint(1, 12))
        ]
        ids = [int(one) for one in await self.made.client.publish_many(some)]
        for message_id, one in zip(ids, some, strict=True):
            over = retention_s == SHORT_S
            self.messages[message_id] = Message(
                one.payload, queues, self.early, over, for_ever=not retention_s
            )
            for name in queues:
                self.queues[name].entries[message_id] = Entry("available", self.early)
        self.stored |= set(ids)

    async def _claim(self) -> None:
        name = self.random.choice(list(self.queues))
        for one in await self.made.client.claim(name, self.random.randint(1, 6), lease=600):
            entry = self.queues[name].entries[one.message_id]
            assert entry.state == "available", (name, entry)
            assert one.payload == self.messages[one.message_id].payload
            entry.state, entry.early, entry.received = "in-flight", self.early, one
            entry.attempts += 1

    async def _finish(self) -> None:
        for name, message_id in self._some("in-flight", 5):
            queue = self.queues[name]
            entry = queue.entries[message_id]
            assert entry.received is not None
            match self.random.choice(("ack", "nack", "nack", "transfer")):
                case "ack":
                    await entry.received.ack()
                    entry.state, entry.early = "done", self.early
                case "nack":
                    await entry.received.nack("boom")
                    is_last = entry.attempts >= queue.max_attempts
                    entry.state, entry.early = "failed" if is_last else "available", self.early
                case _:
                    await self._transfer(name, message_id)

    async def _transfer(self, name: str, message_id: int) -> None:
        queue = self.queues[name]
        others = [
            other
            for other, there in self.queues.items()
            if there.shard == queue.shard and message_id not in there.entries
        ]
        if not others:
            return
        target, entry = self.random.choice(others), queue.entries[message_id]
        assert entry.received is not None
        await self.made.client.execute([slatemq.Transfer(entry.received, target)])
        entry.state, entry.early = "done", self.early
        self.queues[target].entries[message_id] = Entry("available", self.early)

    async def _redrive(self) -> None:
        some = [
            (name, message_id)
            for name, message_id in self._some("failed", 3)
            # What is over brokers bring back no more.
            if not self.messages[message_id].over and not self.queues[name].failed_retention_s
        ]
        for name, message_id in some:
            begun = await self.made.client.start_redrive(name, message_ids=[message_id])
            redrive = await self.made.client.wait_redrive(begun, every=0.05)
            assert redrive.redriven_count == 1, redrive
            self.queues[name].entries[message_id] = Entry("available", self.early)

    async def ack(self, names: Iterable[tuple[str, int]]) -> None:
        """Acks of leases that are valid; late, whenever that is."""
        for name, message_id in names:
            entry = self.queues[name].entries[message_id]
            assert entry.received is not None
            await entry.received.ack()
            entry.state, entry.early = "done", False

    def _some(self, state: str, most: int) -> list[tuple[str, int]]:
        there = self.all_in(state)
        return self.random.sample(there, min(most, len(there)))

    def all_in(self, *states: str) -> list[tuple[str, int]]:
        """The entries in these states, by queue and message."""
        return [
            (name, message_id)
            for name, queue in self.queues.items()
            for message_id, entry in queue.entries.items()
            if entry.state in states
        ]

    # --- What each job may remove, and does ---------------------------------

    def after(self, job: str) -> None:
        """Take away what the job may remove."""
        match job:
            case "retention":
                needed = {message_id for _, message_id in self.all_in("in-flight", "failed")}
                for name, message_id in self.all_in("available"):
                    if self.messages[message_id].over:
                        del self.queues[name].entries[message_id]
                for name, message_id in self.all_in("failed"):
                    queue = self.queues[name]
                    if queue.failed_retention_s == SHORT_S and queue.entries[message_id].early:
                        del queue.entries[message_id]
                self.stored -= {one for one in self.stored if self.messages[one].over} - needed
            case "done":
                for name, message_id in self.all_in("done"):
                    queue = self.queues[name]
                    if queue.done_retention_s == SHORT_S and queue.entries[message_id].early:
                        del queue.entries[message_id]
            case "dead-letters":
                for name, message_id in self.all_in("failed"):
                    entry = self.queues[name].entries[message_id]
                    if entry.early:
                        entry.state = "archived"
            case "unreferenced":
                needed = {
                    message_id for _, message_id in self.all_in("available", "in-flight", "failed")
                }
                needed |= {one for one in self.stored if self.messages[one].for_ever}
                self.stored -= {one for one in self.stored if self.messages[one].early} - needed

    def listed(self, name: str, state: str) -> set[int]:
        """What a queue lists by the model."""
        entries = self.queues[name].entries
        return {message_id for message_id, entry in entries.items() if entry.state == state}

    async def compare(self, when: str, racing: frozenset[int] = frozenset()) -> None:
        """Everything is as the model says, except messages of which it is not known who was first.

        Brokers drop expired entries when they come by: then nothing needs their messages.
        """
        waiting = {message_id for _, message_id in self.all_in("available")}
        open_ = racing | {one for one in waiting if self.messages[one].over}
        stored = await self.made.stored(self.messages)
        assert stored - open_ == self.stored - open_, (when, (stored ^ self.stored) - open_)
        logged = await self.made.logged() & self.messages.keys()
        assert logged - open_ == self.stored - open_, (when, (logged ^ self.stored) - open_)
        if not open_:
            blobs = [one for one in self.stored if len(self.messages[one].payload) == BLOB_BYTES]
            assert len(self.made.objects) == len(blobs), when
        there = await self._in_the_store()
        for name in self.queues:
            for state in STATES:
                found, result = there[name, state], self.listed(name, state)
                dropped = open_ - racing if state == "available" else set()
                assert result - dropped <= found <= result, (when, name, state, found ^ result)

    async def _in_the_store(self) -> dict[tuple[str, str], set[int]]:
        """The entries in snapshots: brokers list none that is over, whatever is to remove it."""
        directory = TopologyDirectory(open_root(self.made.url).objects)
        channels = Channels(directory)
        found: dict[tuple[str, str], set[int]] = {
            (name, state): set() for name in self.queues for state in STATES
        }
        async with snapshots_of_all(directory, channels) as taken:
            options = options_of(self.made.url, taken.names)
            for table in ("active", "done", "failed", "archived"):
                for row in (await read(options, table)).rows:
                    place = row["queue"], row.get("state", table)
                    found.setdefault(place, set()).add(row["message_id"])
        await channels.close()
        await directory.close()
        return found
