"""Clients of a simulated world: they publish, consume, fail, and come back.

Each world has some of the kinds of queues, which its seed chooses; `QUEUES` has all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from slatemq import Backoff, Complete, Credentials, Push, TaskState, Transfer, connect
from slatemq._publish.published import Published
from slatemq.client import Client
from slatemq.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SlateMQError,
    Unauthenticated,
)
from slatemq.models import OutgoingMessage
from tests.simulation.cluster import Cluster
from tests.simulation.judge import Judge, Violated
from tests.simulation.places import Places

T = TypeVar("T")

INGESTS: Final = 2
BROKERS: Final = 2
"""One more where queues have partitions, which move to a broker without any of their queue."""

COLORS: Final = ("red", "green", "blue")
LEASE_S: Final = 3.0
ATTEMPTS_MAX: Final = 2
"""Of queues whose messages become dead letters."""

BACKOFF: Final = Backoff.exponential(0.5, max=5, jitter=0.5)
"""By default an attempt may come ten minutes after the one before: no world is watched so long."""

NACK_WAIT_MS: Final = 250
"""The least that a message waits after its first nack, by BACKOFF."""

CLAIM_S: Final = 1.0

DELAY_MAX_S: Final = 5
"""How long a message may be delayed by its producer."""


MOVING: Final = ("green",)
"""Colors of messages that become dead letters and move: what is kept of them begins anew there."""

RETENTION_S: Final = 4
"""Of messages that are gone soon."""

TAIL: Final = b"#"
"""Begins what a payload has behind its key."""

DEDUPE_MS: Final = 300_000
"""For how long a publish is repeated: keys are known for 600 s, and calls may wait for minutes."""

LARGE: Final = TAIL + b"large" * 14_000
"""Makes a payload so large that it is an object of its own."""

LEASE_OVER: Final = ("LEASE_ENDED", "LEASE_UNKNOWN")
"""Why an ack is refused whose lease had ended."""

BUGS: Final = (Internal, DataLoss, Unauthenticated)
"""What no mishap excuses as an answer."""


@dataclass(frozen=True)
class Kind:
    """A kind of queue.

    Attributes:
        header: Of the messages that it takes, with the value; None: all.
        shard: Of its broker.
        consumers: How many; those of `ranked` begin at the end.
        idle_s: How long its consumers wait after a claim at most, so that messages gather.
        forgets: Share of messages that its consumers forget: their leases end by themselves.
        fed_from: The queue whose messages move here.
        needs: Kinds that a world must have with it.
    """

    header: str | None = None
    value: str | None = None
    shard: int = 0
    consumers: int = 2
    attempts_max: int = 0
    idle_s: float = 0.0
    forgets: float = 0.05
    fed_from: str = ""
    needs: tuple[str, ...] = ()


LATE: Final = "late"
"""A queue that is created while messages come, on any broker, and starts at the beginning."""


@dataclass(frozen=True)
class Consumer:
    """A client that claims.

    Attributes:
        credentials: Its own; None: those of the clients of the world.
        check: Called when a claim gave messages, with the time at which it began.
    """

    queue: str
    name: str
    credentials: Credentials | None = None
    check: Callable[[float], None] | None = None


Twin = asyncio.Queue[tuple[int, Sequence[OutgoingMessage]] | None]
"""What the twin of a producer gets: messages with dedupe keys, and when; None ends it."""

NONE: Final = "none"
"""No message has this as its color: of queues that get messages otherwise."""

QUEUES: Final[Mapping[str, Kind]] = {
    "all": Kind(),
    "red": Kind("color", "red", shard=1),
    # Nacked until they are dead letters, which are redriven, or dropped.
    "flaky": Kind("color", "green", attempts_max=ATTEMPTS_MAX, needs=("rescue",)),
    "rescue": Kind("color", NONE, shard=1, consumers=1, fed_from="flaky"),
    # Executed: completed with a push to another broker, whose message is transferred.
    "first": Kind("color", "blue", needs=("second", "third")),
    "second": Kind("color", NONE, shard=1),
    "third": Kind("color", NONE, shard=1, consumers=1, fed_from="second"),
    # Their filters change; they are paused, purged, deleted and created again.
    "edited": Kind("color", "red"),
    "moved": Kind("color", "blue", shard=1, consumers=1, idle_s=2.0, forgets=0.4),
    LATE: Kind(consumers=1),
    # Not consumed before the end.
    "ranked": Kind("color", "green", consumers=1),
}

CHOSEN: Final = ("red", "flaky", "first", "edited", "moved", "ranked")
"""Kinds of which a world has some, beside `all`."""

PARTITIONS: Final = 2
"""Of a queue that has some."""

MAY_HAVE_PARTITIONS: Final = ("all", "red", "flaky", "first", "edited", "moved", LATE)
"""Not `ranked`, whose order holds within a partition, nor those that commands name together."""


RELOCATED: Final = ("all", "red", "flaky", "edited")
"""Queues that may move between brokers: commands name them alone, and they are made once. `flaky`
takes its dead letters along."""

PURGED_ON_THE_WAY: Final = ("red", "edited")
"""Those of them that may be purged while they move."""

TWINS_SHARE: Final = 0.5
"""Of producers that have a twin, which publishes some of their messages at the same time."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def parts_of(payload: bytes) -> tuple[bytes, bytes]:
    """The key by which the judge knows a message, and what its payload has behind it."""
    key, tail_begin, tail = payload.partition(TAIL)
    return key, tail_begin + tail


def key_of(message: Any) -> bytes:
    """Of a message that is published, or was claimed."""
    return parts_of(message.payload)[0]


class Workload:
    """The clients of one run; each has a machine of its own.

    Attributes:
        names: The queues of this world.
        partitioned: Those that have partitions.
        brokers: How many broker shards there are.
        places: Which of them may have a queue, and when.
        credentials: Of its clients, where the world has access control.
        stopping: Consumers end after their present claim.
        calm: Consumers only ack.
    """

    def __init__(self, cluster: Cluster, judge: Judge, seed: str) -> None:
        self._cluster = cluster
        self._judge = judge
        self._chance = random.Random(f"{seed}/workload")
        chosen = self._chance.sample(CHOSEN, self._chance.randint(2, 4))
        chosen += [needed for name in chosen for needed in QUEUES[name].needs]
        self.names = [name for name in QUEUES if name == "all" or name in chosen]
        spread = random.Random(f"{seed}/partitions")
        share = spread.choice((0.0, 0.5))
        self.partitioned = [name for name in MAY_HAVE_PARTITIONS if spread.random() < share]
        self.brokers = BROKERS + 1 if share else BROKERS
        self.places = Places()
        self._twins = random.Random(f"{seed}/twins")
        self.credentials: Credentials | None = None
        self._guests: set[asyncio.Task[None]] = set()
        self._number = 0
        self.stopping = False
        self.calm = False
        self.publish_tasks: list[asyncio.Task[None]] = []
        self.consume_tasks: list[asyncio.Task[None]] = []
        self.ranks: list[int] = []

    async def create_queues(self) -> None:
        async with await self.connected() as client:
            for name in self.names:
                await self.create_queue(client, name)

    async def create_queue(self, client: Client, name: str) -> None:
        """On the shard of its kind, however often that has to be tried."""
        kind = QUEUES[name]
        self._judge.creating(
            name,
            kind.header,
            kind.value,
            attempts_max=kind.attempts_max,
            fed_from=kind.fed_from,
            partitions_count=self.partitions_of(name),
        )
        # Its next life must be where this one is: what that broker has judged does not come again.
        beside = f"beside-{self.broker_of(name)}"
        await self.insist(lambda: _create_beside(client, beside, self.broker_of(name)))
        partitions = PARTITIONS if name in self.partitioned else None

        async def create() -> None:
            await client.create_queue(
                name,
                with_queue=beside,
                partitions=partitions,
                filter=filter_of(kind.header, kind.value),
                priority="int(headers['rank'])" if name == "ranked" else None,
                lease=LEASE_S,
                max_attempts=kind.attempts_max or 1000,
                backoff=Backoff.none() if kind.attempts_max else BACKOFF,
            )

        with self._judge.change("queue.created", name):
            await self.insist(create, AlreadyExists)
        self._judge.created(name)
        if name not in self.places:  # Its next life is where its first one was.
            await self.note_place(client, name)

    async def insist(
        self, act: Callable[[], Awaitable[T]], *fine: type[SlateMQError], pause_s: float = 0.1
    ) -> T | None:
        """Act until it is answered; an error that is `fine` counts as an answer."""
        while True:
            try:
                return await act()
            except fine:
                return None
            except (InvalidArgument, NotFound):
                raise
            except SlateMQError as error:
                self.note_error("again", error)
                await asyncio.sleep(pause_s)

    def note_error(self, what: str, error: SlateMQError) -> None:
        """Tell of an error that clients must expect. Raises Violated for a bug."""
        is_denied = isinstance(error, PermissionDenied)
        if isinstance(error, BUGS) or (is_denied and asyncio.current_task() not in self._guests):
            raise Violated(f"{what}: {error!r}")
        self._cluster.tell(f"{what}: {error}")

    def broker_of(self, name: str) -> int | None:
        """The shard that a queue is on; None: it is on several, or on any."""
        return None if name in self.partitioned or name == LATE else QUEUES[name].shard

    def partitions_of(self, name: str) -> int:
        return PARTITIONS if name in self.partitioned else 1

    async def note_place(self, client: Client, name: str) -> None:
        """Learn on which shards a queue was created, as far as they answer."""
        shards: list[int | None] = [self.broker_of(name)]
        if shards == [None]:
            queue = await self.insist(lambda: client.get_queue(name))
            assert queue is not None, "no error is fine"
            known = {part: one.broker_shard for part, one in queue.partitions.items()}
            known = known or {0: queue.broker_shard}
            shards = [known.get(part) for part in range(self.partitions_of(name))]
        self.places.created(name, shards)

    def begin(self, producers: int, messages: int) -> None:
        for number in range(producers):
            twin: Twin | None = None
            if self._twins.random() < TWINS_SHARE:
                twin = asyncio.Queue()
                machine = self._cluster.client_machine(f"twin-{number}")
                self.publish_tasks.append(machine.run(self._publish_too(twin)))
            machine = self._cluster.client_machine(f"producer-{number}")
            self.publish_tasks.append(machine.run(self._produce(number, messages, twin)))
        for name in self.names:
            if name != "ranked":
                self.consume(name)

    def consume(self, name: str) -> None:
        for number in range(QUEUES[name].consumers):
            consumer = Consumer(name, f"{name}-consumer-{number}")
            self.consume_tasks.append(self.consume_as(consumer))

    def consume_as(self, consumer: Consumer) -> asyncio.Task[None]:
        """One with credentials of its own may be denied what the others may do."""
        machine = self._cluster.client_machine(consumer.name)
        task = machine.run(self._consume(consumer))
        if consumer.credentials is not None:
            self._guests.add(task)
        return task

    # --- Producers ----------------------------------------------------------

    async def publish(self, client: Client, headers: dict[str, str]) -> None:
        """Publish a message with these headers, beside those of the producers."""
        self._number += 1
        message = OutgoingMessage(f"beside/{self._number}".encode(), headers)
        await self._send(client, [self._about_to_publish(message)])

    async def _produce(self, number: int, messages: int, twin: Twin | None) -> None:
        chance = random.Random(self._chance.random())
        keys = [f"{number}/{count}".encode() for count in range(messages)]
        async with await self.connected() as client:
            published: list[tuple[int, OutgoingMessage]] = []
            while keys:
                await asyncio.sleep(chance.expovariate(20))
                # Where all is down again and again, a world outlasts the window of the keys.
                since_ms = now_ms() - DEDUPE_MS
                published = [one for one in published if one[0] > since_ms]
                if published and chance.random() < 0.1:
                    # The same publish again: its dedupe key makes it the same message.
                    _, message = chance.choice(published)
                    await self._send(client, [message])
                # What is published together is stored together, and in packs.
                size = chance.randint(4, 10) if chance.random() < 0.1 else 1
                batch = [self._message(key, chance) for key in keys[:size]]
                del keys[:size]
                keyed = [message for message in batch if message.dedupe_key]
                published += [(now_ms(), message) for message in keyed]
                if twin is not None and keyed and self._twins.random() < 0.4:
                    twin.put_nowait((now_ms(), keyed))
                await self._send(client, batch)
        if twin is not None:
            twin.put_nowait(None)

    async def _publish_too(self, twin: Twin) -> None:
        """Publish what another producer publishes now: by their dedupe keys it is stored once."""
        async with await self.connected() as client:
            while (given := await twin.get()) is not None:
                since_ms, messages = given
                if since_ms > now_ms() - DEDUPE_MS:
                    await self._send(client, messages)

    def _message(self, key: bytes, chance: random.Random) -> OutgoingMessage:
        """A new message; without a dedupe key, request IDs alone make it one message."""
        headers = {"color": chance.choice((*COLORS, "black")), "rank": str(chance.randrange(5))}
        visible_at_ms = None
        if chance.random() < 0.2:
            visible_at_ms = now_ms() + chance.randrange(DELAY_MAX_S * 1000)
        dedupe_key = key.decode() if chance.random() < 0.5 else None
        is_kept = headers["color"] in MOVING or chance.random() < 0.9
        return self._about_to_publish(
            OutgoingMessage(
                key + (LARGE if chance.random() < 0.04 else b""),
                headers,
                retention_s=None if is_kept else RETENTION_S,
                visible_at_ms=visible_at_ms,
                dedupe_key=dedupe_key,
            )
        )

    def _about_to_publish(self, message: OutgoingMessage) -> OutgoingMessage:
        key, tail = parts_of(message.payload)
        self._judge.publishing(
            key,
            message.headers,
            message.visible_at_ms or 0,
            now_ms(),
            tail,
            (message.retention_s or 0) * 1000,
        )
        return message

    async def _send(self, client: Client, batch: Sequence[OutgoingMessage]) -> None:
        try:
            done = await client.publish_many(batch)
        except SlateMQError as error:
            self.note_error(f"publishing {[key_of(one) for one in batch]}", error)
            return
        self._note_published(batch, done)
        tasks = {one.task_id for one in done if one.task_id}
        if len(tasks) == 1 and len(self._judge.sent) % 3 == 0:
            # Of a batch for several shards, some may be stored already.
            task = tasks.pop()
            accepted = [
                message for message, one in zip(batch, done, strict=True) if one.task_id == task
            ]
            await self._wait_applied(client, task, accepted)

    async def _wait_applied(
        self, client: Client, task_id: str, batch: Sequence[OutgoingMessage]
    ) -> None:
        """Learn the IDs of messages whose publish was accepted as a task."""
        try:
            task = await client.wait_task(task_id, timeout=3)
        except SlateMQError as error:
            self.note_error(f"waiting for {task_id}", error)
            return
        if task.state is TaskState.FAILED:
            raise Violated(f"{task_id}, which nothing is wrong with, failed: {task.error}")
        self._note_published(batch, task.published)

    def _note_published(self, batch: Sequence[OutgoingMessage], done: Sequence[Published]) -> None:
        for message, one in zip(batch, done, strict=False):
            received_ms = 0 if one.duplicate else one.received_at_ms
            self._judge.published(key_of(message), one.message_id, received_ms)

    # --- Consumers ----------------------------------------------------------

    async def _consume(self, consumer: Consumer) -> None:
        queue, name = consumer.queue, consumer.name
        chance = random.Random(self._chance.random())
        async with await self.connected(consumer.credentials) as client:
            while not self.stopping:
                if QUEUES[queue].idle_s and not self.calm:
                    await asyncio.sleep(chance.random() * QUEUES[queue].idle_s)
                most = 1 if queue == "ranked" else chance.randint(1, 8)
                claimed, claimed_ms = self._judge.now(), now_ms()
                claimed_s = self._cluster.loop.time()
                try:
                    messages = await client.claim(queue, most, wait=CLAIM_S, consumer_id=name)
                except SlateMQError as error:
                    self.note_error(f"{name} claims", error)
                    await asyncio.sleep(0.2)
                    continue
                if messages and consumer.check is not None:
                    consumer.check(claimed_s)
                for message in messages:
                    key, tail = parts_of(message.payload)
                    self._judge.delivered_to(
                        queue,
                        key,
                        message.headers,
                        message.message_id,
                        message.lease_token,
                        message.attempts_count,
                        message.lease_deadline_ms,
                        now_ms(),
                        claimed,
                        claimed_ms,
                        tail,
                    )
                for message in messages:
                    if queue == "ranked":
                        self.ranks.append(int(message.headers["rank"]))
                    try:
                        await self._finish(client, queue, message, chance)
                    except SlateMQError as error:
                        self.note_error(f"finishing {key_of(message)!r}", error)

    async def _finish(
        self, client: Client, queue: str, message: Any, chance: random.Random
    ) -> None:
        key, token, dice = key_of(message), message.lease_token, chance.random()
        if self.calm or queue == "ranked":
            dice = 1.0
        if dice < QUEUES[queue].forgets:
            return
        if dice < (0.6 if QUEUES[queue].attempts_max else 0.15):
            await self._nack(client, queue, key, token, chance)
            return
        if dice > 0.9 and not self.calm:
            [deadline] = await client.extend([token], LEASE_S + 1)
            if isinstance(deadline, int):
                self._judge.extended(queue, key, token, deadline)
            else:
                self.note_error(f"extending {key!r}", deadline)
            await asyncio.sleep(chance.random())
        if queue == "first":
            await self._push(client, queue, key, token)
        elif queue == "second":
            await self._transfer(client, queue, key, token)
        else:
            await self._ack(client, queue, key, token)

    async def _ack(self, client: Client, queue: str, key: bytes, token: str) -> None:
        self._judge.ending(queue, key, token, is_ack=True)
        [problem] = await client.ack([token])
        if problem is None:
            self._judge.acked_by(queue, key)
            return
        self.note_error(f"acking {key!r}", problem)
        # The client tries again by itself. An earlier try that counted is known, and OK again.
        if problem.reason in LEASE_OVER:
            self._judge.ack_refused(queue, key, token)

    async def _nack(
        self, client: Client, queue: str, key: bytes, token: str, chance: random.Random
    ) -> None:
        is_delayed = chance.random() < 0.5
        delay_s = chance.random() if is_delayed else None
        wait_ms = int(delay_s * 1000) if delay_s is not None else NACK_WAIT_MS
        nacked_ms = now_ms()
        self._judge.ending(queue, key, token, is_ack=False)
        [problem] = await client.nack([token], "a bad day", delay=delay_s)
        if problem is not None:
            self.note_error(f"nacking {key!r}", problem)
        elif not QUEUES[queue].attempts_max:  # A redrive may have it available earlier.
            self._judge.nacked(queue, key, token, nacked_ms, nacked_ms + wait_ms)

    async def _push(self, client: Client, queue: str, key: bytes, token: str) -> None:
        """End a message, and push another to the other broker: both or none."""
        pushed = key + b"/" + token[-6:].encode()
        self._judge.executing(queue, key, token, pushed, "second", now_ms())
        try:
            await client.execute([Complete(token), Push("second", pushed)])
        except (FailedPrecondition, NotFound):
            self._judge.refused(pushed)
        else:
            self._judge.executed(pushed)

    async def _transfer(self, client: Client, queue: str, key: bytes, token: str) -> None:
        """Move a message to another queue of the broker."""
        self._judge.ending(queue, key, token, is_ack=False)
        self._judge.moving(key, "third")
        await client.execute([Transfer(token, "third")])
        self._judge.moved(key, "third")

    async def connected(self, credentials: Credentials | None = None) -> Client:
        """A client that knows all ingests; `credentials` are not those of the world's clients."""
        while True:
            client = connect(
                self._cluster.addresses,
                call_timeout=20,
                credentials=credentials or self.credentials,
            )
            try:
                await client._peers.reach()
                # A shard that is added takes over dedupe keys, and knows nothing of them.
                # And partitions need all brokers.
                ingests, brokers = (
                    await client._peers.ingest_shards(),
                    await client._peers.broker_shards(),
                )
                if len(ingests) == INGESTS and len(brokers) == self.brokers:
                    return client
            except SlateMQError as error:
                self.note_error("connecting", error)
            await client.close()
            await asyncio.sleep(0.2)


async def _create_beside(client: Client, name: str, shard: int | None) -> None:
    """A queue without messages on a shard, or on some, so that others can be created with it."""
    with suppress(AlreadyExists):
        if shard is None:
            await client.create_queue(name, filter="false", partitions=PARTITIONS)
        else:
            await client.create_queue(name, filter="false", shard=shard)


def filter_of(header: str | None, value: str | None) -> str:
    return "true" if header is None else f"headers['{header}'] == '{value}'"


def failed(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    """What ended a client before its time."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            return task.exception()
    return None
