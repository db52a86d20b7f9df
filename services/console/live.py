"""What a person may see of the instance, sampled while pages that show it are open.

::

    a sample by those who see most ─► what each token may see of it ─► history of each queue, in
                               memory ─► pages, and their event streams

The instance keeps no history of counts; this one begins with the first page that someone opens, and
ends a minute after the last. Persons with different tokens see different queues, so each token has
a history of its own. But few of them are sampled for: before each sample, each token asks the
brokers what it may see, and one sample serves all who may see no more than the token that took it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from opentelemetry.metrics import Histogram

from services.console.clients import Clients, OpenInstance
from services.console.sights import Sight
from slatemq._admin.instance import Status
from slatemq._admin.queue_models import Counts, sum_of_counts
from slatemq._admin.rates import UNKNOWN, QueueRates, Sample, rates_between, sum_rates, take_sample
from slatemq._cancelling import end_all
from slatemq.errors import SlateMQError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

SAMPLE_S: Final = 2.0
"""Between two samples at least, and after one that failed."""

SAMPLE_SHARE: Final = 4
"""A sample that takes long is followed by a pause of this many times its length, which leaves the
instance to its callers."""

SILENCE_PAUSE_S: Final = 5.0
"""The longest pause where a process did not answer: most of the sample was waiting for it."""

SAMPLES_KEPT: Final = 60
"""Two minutes, unless samples take long."""

HISTORIES_MAX: Final = 500
"""Queues of which the history is kept: those with most messages."""

IDLE_S: Final = 60.0
"""How long sampling goes on without a page, so that going to the next one loses no history."""

STREAMS_MAX: Final = 128
PERSON_STREAMS_MAX: Final = 12
"""Open pages that are updated, together and of one person; over it, pages stand still."""

STREAM_S: Final = 600.0
"""Then the browser connects again, and proves again who looks."""


@dataclass(slots=True)
class History:
    """One queue, or all together; the oldest sample first."""

    depth: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    age_ms: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    failed: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    arrived: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    finished: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    rates: QueueRates = UNKNOWN

    def add(self, counts: Counts, rates: QueueRates) -> None:
        self.depth.append(depth(counts))
        self.age_ms.append(counts.oldest_claimable_age_ms or 0)
        self.failed.append(counts.failed_count)
        if rates.in_per_s is not None and rates.out_per_s is not None:
            self.arrived.append(rates.in_per_s)
            self.finished.append(rates.out_per_s)
        self.rates = rates


def depth(counts: Counts) -> int:
    """The messages that are still to be finished."""
    return counts.available_count + counts.delayed_count + counts.in_flight_count


class Watch:
    """The instance as one person sees it.

    Attributes:
        status: The latest sample.
        totals: The history of all queues together.
        queues: Those of single queues.
        streams_count: Open pages that are updated.
        sight: What the token may see, as it was asked for before the latest sample.
    """

    def __init__(self, clients: Clients, token: str) -> None:
        """Keeps the client of the token until it is closed. Raises ResourceExhausted."""
        self.status = Status([], [], [], [])
        self.totals = History()
        self.queues: dict[str, History] = {}
        self.streams_count = 0
        self.sight = Sight({})
        self._clients = clients
        self._token = token
        self._sample: Sample | None = None
        self._tried = asyncio.Condition()
        self._is_sampling = False
        self._error: SlateMQError | OpenInstance | None = None
        self._readers_count = 0
        self._left_s = time.monotonic()
        self._kept = ExitStack()
        self._kept.enter_context(clients.kept(token))

    def close(self) -> None:
        self._kept.close()

    async def current(self) -> Watch:
        """This one, once it has a sample; waits for no more than one try.

        Raises SlateMQError, OpenInstance: what the latest try met, unless another one goes on.
        """
        if self._sample is None or self._error is not None:
            if self._error is None or self._is_sampling:
                await self.next_sample()
            else:
                raise self._error
        self._left_s = time.monotonic()
        return self

    async def next_sample(self) -> None:
        """Wait for the next sample. Raises SlateMQError, OpenInstance."""
        self._readers_count += 1
        try:
            async with self._tried:
                await self._tried.wait()
        finally:
            self._readers_count -= 1
            self._left_s = time.monotonic()
        if self._error is not None:
            raise self._error

    @property
    def is_watched(self) -> bool:
        """Whether a page is updated, or has looked within the last minute."""
        # A stream whose browser reads slowly waits for no sample meanwhile.
        if self.streams_count > 0 or self._readers_count > 0:
            return True
        return time.monotonic() - self._left_s < IDLE_S

    @property
    def lacks_answers(self) -> bool:
        """Whether the latest sample has nothing of a process that is to be there."""
        down = [one for one in self.status.services if not one.serving]
        return bool(down or self.status.unlisted_brokers)

    async def prove(self) -> Sight | None:
        """Begin a try: find out what the token may see; None where that went wrong."""
        self._is_sampling = True

        async def ask() -> Sight:
            client = await self._clients.of(self._token)
            return Sight(await client.get_callers())

        sight = await self._trying(ask)
        if sight is not None:
            self.sight = sight
        return sight

    async def take(self) -> Sample | None:
        """A sample taken with this token; None where that went wrong."""

        async def ask() -> Sample:
            return await take_sample(await self._clients.of(self._token))

        return await self._trying(ask)

    async def _trying(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await ask()
        except (SlateMQError, OpenInstance) as error:
            await self._end_try(error)
        except Exception:  # Pages wait for this.
            log.exception("sampling the instance failed")
            said = "the console failed to sample the instance: its log says why"
            await self._end_try(Unavailable(said))
        return None

    async def show(self, now: Sample) -> None:
        """End a try with this sample."""

        async def add() -> bool:
            self._add(now)
            return True

        if await self._trying(add):
            await self._end_try(None)

    async def _end_try(self, error: SlateMQError | OpenInstance | None) -> None:
        self._error = error
        self._is_sampling = False
        async with self._tried:
            self._tried.notify_all()

    def _add(self, now: Sample) -> None:
        rates, queues = rates_between(self._sample, now), now.status.queues
        self._sample, self.status = now, now.status
        # With a broker down the sum would fall, and rise again when it is back.
        if not now.status.unlisted_brokers:
            counts = sum_of_counts(queue.counts for queue in queues)
            self.totals.add(counts, sum_rates(rates.values()))
        busiest = sorted(queues, key=lambda queue: -depth(queue.counts))[:HISTORIES_MAX]
        for queue in busiest:
            history = self.queues.setdefault(queue.queue_id, History())
            history.add(queue.counts, rates.get(queue.queue_id, UNKNOWN))
        kept = {queue.queue_id for queue in busiest}
        self.queues = {name: one for name, one in self.queues.items() if name in kept}


class Watches:
    """The watch of each token, sampled together.

    Attributes:
        streams_count: Open pages that are updated.
    """

    def __init__(self, clients: Clients, durations: Histogram) -> None:
        """`durations` gets the length of each sample, in s."""
        self.streams_count = 0
        self._clients = clients
        self._durations = durations
        self._watches: dict[str, Watch] = {}
        self._arrived = asyncio.Event()
        self._sampling: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def of(self, token: str) -> Watch:
        """The watch of a token, with a sample. Raises SlateMQError, OpenInstance."""
        watch = self._watches.get(token)
        if watch is None:
            watch = self._watches[token] = Watch(self._clients, token)
            self._arrived.set()
        if self._sampling is None or self._sampling.done():
            # Not in the trace of the page that happens to come first.
            self._sampling = asyncio.create_task(self._sample_all(), context=Context())
        return await watch.current()

    async def _sample_all(self) -> None:
        """Sample until no page has looked for a minute; also at once, when someone comes."""
        while self._watches:
            self._arrived.clear()
            began_s = time.monotonic()
            has_succeeded = await self._sample(list(self._watches.values()))
            took_s = time.monotonic() - began_s
            pause_s = max(SAMPLE_S - took_s, took_s * SAMPLE_SHARE) if has_succeeded else SAMPLE_S
            if any(watch.lacks_answers for watch in self._watches.values()):
                pause_s = min(pause_s, SILENCE_PAUSE_S)
            arrival = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait([arrival], timeout=pause_s)
            finally:
                arrival.cancel()
            for token, watch in list(self._watches.items()):
                if not watch.is_watched:
                    self._watches.pop(token).close()

    async def _sample(self, watches: list[Watch]) -> bool:
        """One sample for each of these; whether any of them has got one."""
        sights = await asyncio.gather(*(watch.prove() for watch in watches))
        proven = [watch for watch, sight in zip(watches, sights, strict=True) if sight is not None]
        takers = widest(proven)
        looks = await asyncio.gather(*map(self._take, takers))
        taken = [(watch, now) for watch, now in zip(takers, looks, strict=True) if now is not None]
        left = []
        for watch in proven:
            if watch in takers:
                continue
            found = next((now for taker, now in taken if taker.sight.covers(watch.sight)), None)
            if found is None:
                left.append(watch)  # What went wrong may be about the other token alone.
            else:
                seen = watch.sight.restricted(found.status)
                await watch.show(Sample(seen, found.taken_s))
                await asyncio.sleep(0)
        return any([*taken, *await asyncio.gather(*map(self._take, left))])

    async def _take(self, watch: Watch) -> Sample | None:
        began_s = time.monotonic()
        now = await watch.take()
        self._durations.record(time.monotonic() - began_s)
        if now is not None:
            await watch.show(now)
        return now

    async def stream(
        self, watch: Watch, render: Callable[[Watch], str]
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `update` with what is rendered of each sample, `gone` at its end.

        Its caller holds a place for it.
        """
        ends_s = time.monotonic() + STREAM_S
        stopping = asyncio.ensure_future(self._stopping.wait())
        sampled: asyncio.Future[Any] = stopping
        try:
            while time.monotonic() < ends_s:
                sampled = asyncio.ensure_future(watch.next_sample())
                await asyncio.wait(
                    [sampled, stopping],
                    timeout=ends_s - time.monotonic(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not sampled.done():
                    return
                sampled.result()
                yield event("update", render(watch))
        except (SlateMQError, OpenInstance) as error:
            yield event("gone", str(error))
        finally:
            sampled.cancel()
            stopping.cancel()

    @property
    def viewers_count(self) -> int:
        """Tokens for which the instance is being sampled."""
        return len(self._watches)

    @contextmanager
    def place(self, watch: Watch) -> Iterator[bool]:
        """Hold a place for one more stream of a watch; whether there was one."""
        has_place = self.streams_count < STREAMS_MAX and watch.streams_count < PERSON_STREAMS_MAX
        self.streams_count += has_place
        watch.streams_count += has_place
        try:
            yield has_place
        finally:
            self.streams_count -= has_place
            watch.streams_count -= has_place

    def stop_streams(self) -> None:
        self._stopping.set()

    async def close(self) -> None:
        self.stop_streams()
        if self._sampling is not None:
            await end_all([self._sampling])


def widest(watches: Iterable[Watch]) -> list[Watch]:
    """The fewest of these that together see what all of them may see, as far as patterns say."""
    found: list[Watch] = []
    for watch in watches:
        if not any(one.sight.covers(watch.sight) for one in found):
            found = [one for one in found if not watch.sight.covers(one.sight)]
            found.append(watch)
    return found


def event(name: str, text: str) -> bytes:
    """One server-sent event."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n".encode()
