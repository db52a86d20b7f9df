"""Clients that do all that clients do, write it down, and are judged by `tests.judge`.

Producers publish singly and in batches, some of it delayed, some with a short retention, some with
payloads that are objects. Consumers ack, nack with and without a delay, release, extend and forget.
A worker completes each order and pushes what comes of it; an operator redrives the dead letters of
a queue whose consumer fails half of all messages, another one changes the filter of a queue, pauses
and purges it, and a third one moves a queue between brokers. What is left at the end is drained,
and then nothing may be missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import slatemq
from slatemq.errors import SlateMQError
from tests.faults.recorded import AGAIN_S, REFUSED, RecordedClient, key_of, recorded_client
from tests.judge.histories import OK
from tests.judge.parts import judge

log = logging.getLogger(__name__)

LEASE_S: Final = 4.0
CLAIM_MAX: Final = 100
PUBLISH_BATCH: Final = 20
ORDERS_MAX: Final = 10
STALLED_S: Final = 180.0
SLEWED_MS: Final = 20.0
"""A service's clock never goes back: it is ahead by what the machine's was corrected since."""

RETENTION_MS: Final = 5000
"""Of some plain messages, which nothing waits for."""

OBJECT_BYTES: Final = 70_000
"""A payload that is too large for a row."""

OBJECT_SHARE: Final = 0.01

ORDERS, SHIPPED, FRAGILE, EDITED = "orders", "shipped", "fragile", "edited"
EDITS: Final = ('headers.class in ["1", "4"]', 'headers.class in ["4", "6"]')
"""Filters of a queue by turns."""

PURGES: Final = (0, 3)
"""Turns with a purge: of what came before the last one, no queue is known to have lost anything."""

EDITED_BACKOFF_MS: Final = 1000
FRAGILE_ATTEMPTS: Final = 2
FILTERS: Final = {
    "all": 'headers.kind != "other"',
    "even": 'headers.parity == "even" && headers.kind == "plain"',
    "third": 'headers.class in ["0", "3"]',
    ORDERS: 'headers.kind == "order"',
    SHIPPED: 'headers.kind == "shipped"',
    FRAGILE: 'headers.kind == "fragile"',
    EDITED: EDITS[0],
}
ATTEMPTS: Final = {FRAGILE: FRAGILE_ATTEMPTS}
PARTITIONED: Final = ("even", FRAGILE)
"""Have a partition on each broker, where there are several."""

MOVED: Final = "third"
"""Moves from one broker to another, where there are several."""

BETWEEN_MOVES_S: Final = 4.0


@dataclass
class Work:
    """One history and what waits for it.

    Attributes:
        rate: Messages that each producer publishes in a second, about.
        brokers_count: Broker shards of the instance.
        answered_count: Messages of publishes that were answered.
        finished_count: Acks that were answered, or whose outcome is unknown.
        changes_count: Changes of queues beside it.
        latencies_ms: Of each first delivery without a delay, from its publish.
    """

    client: RecordedClient
    seed: int
    rate: float = 30.0
    producers_count: int = 2
    brokers_count: int = 1
    answered_count: int = 0
    finished_count: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    changes_count: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    _wall_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    _back_ms: float = 0.0
    _is_draining: bool = False
    _due_at: dict[str, float] = field(default_factory=dict)
    _unsure: dict[str, str] = field(default_factory=dict)
    _missing: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _early: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By queue, what was finished before clients knew that it would come."""

    _keys: itertools.count[int] = field(default_factory=itertools.count)

    async def begin(self) -> None:
        """Create the queues; those of commands on one shard."""
        await self.note_clock(SLEWED_MS)
        for queue, text in FILTERS.items():
            with_queue = ORDERS if queue == SHIPPED else ""
            is_partitioned = queue in PARTITIONED and self.brokers_count > 1
            await self.client.create_queue(
                queue,
                text,
                ATTEMPTS.get(queue, 1000),
                with_queue,
                self.brokers_count if is_partitioned else None,
                EDITED_BACKOFF_MS if queue == EDITED else 0,
            )
        editor = self.client.named("editor")
        await self._edit_once(editor, 0)
        await self._resume(editor)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Consumers, workers and the operator, which work until they are cancelled."""
        plain = [
            self._consume(queue)
            for queue in ("all", "all", "even", "third", SHIPPED, FRAGILE, EDITED)
        ]
        movers = [self._move()] if self.brokers_count > 1 else []
        return [*plain, self._work(), self._operate(), self._edit(), *movers]

    def producers(self) -> list[Coroutine[Any, Any, None]]:
        return [self._produce(number) for number in range(self.producers_count)]

    async def note_clock(self, ahead_ms: float) -> None:
        """Write down by how much the clocks of services are ahead of ours at most, from now on."""
        await self.client.named("clock").note_clock(ahead_ms)

    # --- Clients ------------------------------------------------------------

    async def _produce(self, number: int) -> None:
        client = self.client.named(f"producer-{number}")
        random_ = random.Random(f"{self.seed}/{number}")
        for turn in itertools.count():
            count = 1 if turn % 2 else PUBLISH_BATCH
            messages = [self._message(next(self._keys), random_) for _ in range(count)]
            began = time.monotonic()
            self._look_at_clock()
            try:
                await client.publish(messages)
            except SlateMQError:
                await asyncio.sleep(AGAIN_S)
                continue
            for one in messages:
                if one["retention_ms"]:
                    continue
                self.note_answered(one["key"], one["headers"])
                if not one["delay_ms"]:
                    self._due_at[one["key"]] = began
            self.moved_at = time.monotonic()
            await asyncio.sleep(max(0, count / self.rate - (time.monotonic() - began)))

    def _look_at_clock(self) -> None:
        """Notice by how much the wall clock went back, as the host of a machine corrects it."""
        back_ms = (self._wall_s - (time.time() - time.monotonic())) * 1000
        self._back_ms = max(self._back_ms, back_ms)

    def _message(self, number: int, random_: random.Random) -> dict[str, Any]:
        kind = random_.choices(("plain", "order", "fragile", "other"), (12, 3, 2, 1))[0]
        headers = {
            "kind": kind,
            "class": str(number % 7),
            "parity": "odd" if number % 2 else "even",
        }
        delay_ms = random_.randrange(100, 3000) if random_.random() < 0.1 else 0
        is_short = kind == "plain" and random_.random() < 0.05
        return {
            "key": f"m{number}",
            "headers": headers,
            "delay_ms": delay_ms,
            "retention_ms": RETENTION_MS if is_short else 0,
            "payload_bytes": OBJECT_BYTES if random_.random() < OBJECT_SHARE else 0,
        }

    async def _consume(self, queue: str) -> None:
        client = self.client.named(f"consumer-{queue}-{next(self._keys)}")
        random_ = random.Random(f"{self.seed}/{queue}")
        while True:
            try:
                messages = await client.claim(queue, CLAIM_MAX, lease_s=LEASE_S)
                self._note_latency(messages)
                await self._treat(client, queue, messages, random_)
            except SlateMQError:
                await asyncio.sleep(AGAIN_S)

    async def _treat(
        self,
        client: RecordedClient,
        queue: str,
        messages: Sequence[slatemq.Received],
        random_: random.Random,
    ) -> None:
        """Of a fragile queue half is nacked; of others few are nacked, released and forgotten."""
        weights = (1, 1, 0, 0) if queue == FRAGILE else (92, 4, 2, 2)
        groups = defaultdict(list)
        for one in messages:
            groups[random_.choices(("ack", "nack", "release", "forget"), weights)[0]].append(one)
        if groups["ack"] and random_.random() < 0.2:
            await client.extend([one.lease_token for one in groups["ack"]], LEASE_S)
        delay_s = random_.choice((None, 0, 0.5))
        for kind in ("nack", "release"):
            tokens = [one.lease_token for one in groups[kind]]
            if tokens:
                await client.nack(tokens, delay_s, release=kind == "release")
        await self._ack(client, queue, groups["ack"])

    async def _ack(
        self, client: RecordedClient, queue: str, messages: Sequence[slatemq.Received]
    ) -> None:
        if not messages:
            return
        try:
            results = await client.ack([one.lease_token for one in messages])
        except SlateMQError as error:
            results = [error] * len(messages)
        for one, problem in zip(messages, results, strict=True):
            if problem is None or not isinstance(problem, REFUSED):
                self.note_finished(queue, key_of(one.payload))

    def _note_latency(self, messages: Sequence[slatemq.Received]) -> None:
        now = time.monotonic()
        for one in messages:
            began = self._due_at.pop(key_of(one.payload), None)
            if began is not None:
                self.latencies_ms.append((now - began) * 1000)

    async def _work(self) -> None:
        """Complete the orders of a claim and push two messages for each, all or nothing."""
        client = self.client.named("worker")
        while True:
            try:
                orders = await client.claim(ORDERS, ORDERS_MAX, lease_s=LEASE_S)
                if orders:
                    await self._ship(client, [key_of(one.payload) for one in orders], orders)
            except SlateMQError:
                await asyncio.sleep(AGAIN_S)

    async def _ship(
        self, client: RecordedClient, keys: Sequence[str], orders: Sequence[slatemq.Received]
    ) -> None:
        pushes = [(SHIPPED, f"{key}/{part}/{next(self._keys)}") for key in keys for part in "ab"]
        try:
            await client.complete_and_push(orders, pushes)
        except REFUSED:
            return
        except SlateMQError as error:
            log.debug("whether orders were shipped is not known: %s", error)
            # They come again, or what was pushed for them comes.
            for _, pushed in pushes:
                self.note_unsure(pushed.partition("/")[0], pushed)
            return
        for queue, pushed in pushes:
            self.note_pushed(queue, pushed)
        for key in keys:
            self.note_finished(ORDERS, key)

    async def _operate(self) -> None:
        """Redrive the dead letters now and then."""
        client = self.client.named("operator")
        while True:
            await asyncio.sleep(3)
            try:
                await client.redrive(FRAGILE)
            except SlateMQError as error:
                log.debug("redriving: %s", error)

    async def _move(self) -> None:
        """Move a queue between brokers."""
        client = self.client.named("mover")
        while True:
            await asyncio.sleep(BETWEEN_MOVES_S)
            if self._is_draining:
                continue
            try:
                await client.move(MOVED)
            except SlateMQError as error:
                log.debug("moving: %s", error)

    async def _edit(self) -> None:
        """Change the filter of a queue, pause it for a while, and purge it once."""
        client = self.client.named("editor")
        for turn in itertools.count(1):
            await asyncio.sleep(1)
            if self._is_draining:
                continue
            try:
                await self._edit_once(client, turn)
                await asyncio.sleep(1)
            except SlateMQError as error:
                log.debug("editing: %s", error)
            await self._resume(client)

    async def _edit_once(self, client: RecordedClient, turn: int) -> None:
        await client.update_queue(EDITED, EDITS[turn % 2])
        await client.pause(EDITED)
        if turn in PURGES:
            await client.purge(EDITED)

    async def _resume(self, client: RecordedClient) -> None:
        """However often that takes: nothing comes from a queue that stays paused."""
        while True:
            try:
                return await client.resume(EDITED)
            except SlateMQError:
                await asyncio.sleep(AGAIN_S)

    # --- The end ------------------------------------------------------------

    def note_answered(self, key: str, headers: dict[str, str]) -> None:
        """A message comes to all queues that take it, for certain."""
        self.answered_count += 1
        for queue, takes in _TAKES.items():
            if takes(headers):
                self._expect(queue, key)

    def note_finished(self, queue: str, key: str) -> None:
        """A message is finished in a queue, as far as clients know."""
        self.finished_count += 1
        self._finish(queue, key)
        if key in self._unsure:
            self._finish(ORDERS, self._unsure[key])
        self.moved_at = time.monotonic()

    def note_pushed(self, queue: str, key: str) -> None:
        self._expect(queue, key)

    def note_unsure(self, order: str, pushed: str) -> None:
        """What may have been pushed for an order, which is finished where it comes."""
        self._unsure[pushed] = order

    def kept_count(self) -> int:
        """How many keys are kept of messages, by queue."""
        return sum(len(keys) for each in (self._missing, self._early) for keys in each.values())

    def missing(self) -> int:
        """How many entries are not finished that will be, as far as clients know."""
        return sum(map(len, self._missing.values()))

    def _expect(self, queue: str, key: str) -> None:
        if key in self._early[queue]:
            self._early[queue].discard(key)
        else:
            self._missing[queue].add(key)

    def _finish(self, queue: str, key: str) -> None:
        if key in self._missing[queue]:
            self._missing[queue].discard(key)
        elif queue != EDITED:  # Of which nothing is expected.
            self._early[queue].add(key)

    async def drain(self, settled_s: float) -> None:
        """Wait until all is finished, or nothing moves; what would come again comes in the end."""
        await self.note_clock(SLEWED_MS + self._back_ms)
        self._is_draining = True
        self.moved_at = time.monotonic()
        while self.missing() and self._moves():
            await asyncio.sleep(0.2)
        await self._resume(self.client.named("last-editor"))
        # Of what is missing from it, clients know nothing: a consumer may have let a lease end.
        while not await self.client.is_empty(EDITED) and self._moves():
            await asyncio.sleep(0.2)
        await asyncio.sleep(settled_s)

    def _moves(self) -> bool:
        return time.monotonic() - self.moved_at < STALLED_S


_TAKES: Final[dict[str, Callable[[dict[str, str]], bool]]] = {
    "all": lambda h: h["kind"] != "other",
    "even": lambda h: h["parity"] == "even" and h["kind"] == "plain",
    "third": lambda h: h["class"] in ("0", "3"),
    ORDERS: lambda h: h["kind"] == "order",
    SHIPPED: lambda h: False,
    FRAGILE: lambda h: h["kind"] == "fragile",
    EDITED: lambda h: False,  # By the filter of the moment; the judge knows which that was.
}
"""When the work is done; the judge has its own."""


async def run_work(
    file: Path,
    endpoint: str,
    seed: int,
    mishaps: Callable[[Work], Awaitable[None]],
    settled_s: float = 2 * LEASE_S,
    **rates: float,
) -> Work:
    """Have clients work while something happens, then drain; the history is in `file`."""
    async with recorded_client(file, endpoint) as client:
        work = Work(client, seed, **rates)  # type: ignore[arg-type]
        await work.begin()
        producers = [asyncio.create_task(one) for one in work.producers()]
        others = [asyncio.create_task(one) for one in work.tasks()]
        try:
            await mishaps(work)
            await _cancel(producers)
            await work.drain(settled_s)
            await _cancel(others)
            for queue in FILTERS:
                await client.drain(queue)
        finally:
            await _cancel([*producers, *others])
    return work


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End tasks; raises what one of them has raised."""
    for one in tasks:
        one.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def judged(file: Path) -> list[str]:
    """The faults of a history, by the judge; says how much it judged."""
    verdict = judge([file])
    deliveries = verdict.deliveries_count
    print(
        f"judged {file}: {verdict.operations_count} operations, {deliveries} deliveries", flush=True
    )
    if not verdict.counts["publish", OK] or not deliveries:
        return [f"{file} has no publish that was answered, or no delivery: nothing was judged"]
    return [str(fault) for fault in verdict.faults]
