"""What a person may see of the instance, sampled while pages that show it are open.

::

    look() ─► sample ─► history of each queue, in memory ─► pages, and their event streams

The instance keeps no history of counts; this one begins with the first page that someone opens, and
ends a minute after the last. Persons with different tokens see different queues, so each token has
a history of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.metrics import Histogram

from services.console.clients import Clients, OpenInstance
from slatemq._admin.instance import Status
from slatemq._admin.queue_models import Counts
from slatemq._admin.rates import UNKNOWN, Look, QueueRates, look, rates_between, sum_rates
from slatemq.errors import SlateMQError, Unavailable

log = logging.getLogger(__name__)

SAMPLE_S: Final = 2.0
"""Between two samples at least, and after one that failed."""

SAMPLE_SHARE: Final = 4
"""A sample that takes long is followed by a pause of this many times its length."""

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


def together(all_counts: Iterable[Counts]) -> Counts:
    """The counts of all queues."""
    each = list(all_counts)
    ages = [one.oldest_claimable_age_ms for one in each if one.oldest_claimable_age_ms is not None]
    return Counts(
        available_count=sum(one.available_count for one in each),
        delayed_count=sum(one.delayed_count for one in each),
        in_flight_count=sum(one.in_flight_count for one in each),
        done_count=sum(one.done_count for one in each),
        failed_count=sum(one.failed_count for one in each),
        archived_count=sum(one.archived_count for one in each),
        oldest_claimable_age_ms=max(ages, default=None),
    )


class Watch:
    """The instance as one person sees it.

    Attributes:
        status: The latest sample.
        totals: The history of all queues together.
        queues: Those of single queues.
    """

    def __init__(self, clients: Clients, token: str, durations: Histogram) -> None:
        self.status = Status([], [], [], [])
        self.totals = History()
        self.queues: dict[str, History] = {}
        self._clients = clients
        self._token = token
        self._durations = durations
        self._look: Look | None = None
        self._tried = asyncio.Condition()
        self._is_sampling = False
        self._error: SlateMQError | OpenInstance | None = None
        self._readers_count = 0
        self._left_s = time.monotonic()
        self.streams_count = 0

    async def current(self) -> Watch:
        """This one, once it has a sample; waits for no more than one try.

        Raises SlateMQError, OpenInstance: what the latest try met, unless another one goes on.
        """
        if self._look is None or self._error is not None:
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

    async def run(self) -> None:
        """Sample until no page has looked for a minute."""
        while self._readers_count or time.monotonic() - self._left_s < IDLE_S:
            began_s = time.monotonic()
            self._is_sampling = True
            self._error = await self._sample()
            self._is_sampling = False
            async with self._tried:
                self._tried.notify_all()
            took_s = time.monotonic() - began_s
            self._durations.record(took_s)
            has_failed = self._error is not None
            pause_s = SAMPLE_S if has_failed else max(SAMPLE_S - took_s, took_s * SAMPLE_SHARE)
            await asyncio.sleep(pause_s)

    async def _sample(self) -> SlateMQError | OpenInstance | None:
        """What went wrong."""
        try:
            client = await self._clients.of(self._token)
            self._add(await look(client))
        except (SlateMQError, OpenInstance) as error:
            return error
        except Exception:  # Pages wait for this.
            log.exception("sampling the instance failed")
            return Unavailable("the console failed to sample the instance: its log says why")
        return None

    def _add(self, now: Look) -> None:
        rates, queues = rates_between(self._look, now), now.status.queues
        self._look, self.status = now, now.status
        # With a broker away the sum would fall, and rise again when it is back.
        if not now.status.unlisted_brokers:
            counts = together(queue.counts for queue in queues)
            self.totals.add(counts, sum_rates(rates.values()))
        busiest = sorted(queues, key=lambda queue: -depth(queue.counts))[:HISTORIES_MAX]
        for queue in busiest:
            history = self.queues.setdefault(queue.queue_id, History())
            history.add(queue.counts, rates.get(queue.queue_id, UNKNOWN))
        kept = {queue.queue_id for queue in busiest}
        self.queues = {name: one for name, one in self.queues.items() if name in kept}


class Watches:
    """The watch of each token.

    Attributes:
        streams_count: Open pages that are updated.
    """

    def __init__(self, clients: Clients, durations: Histogram) -> None:
        """`durations` gets the length of each sample, in s."""
        self.streams_count = 0
        self._clients = clients
        self._durations = durations
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()

    async def of(self, token: str) -> Watch:
        """The watch of a token, with a sample. Raises SlateMQError, OpenInstance."""
        found = self._watches.get(token)
        if found is None or found[1].done():
            watch = Watch(self._clients, token, self._durations)
            task = asyncio.create_task(watch.run())
            self._watches[token] = watch, task
            task.add_done_callback(lambda _: self._forget(token, watch))
        return await self._watches[token][0].current()

    async def stream(
        self, watch: Watch, render: Callable[[Watch], str]
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `update` with what is rendered of each sample, `gone` at its end."""
        self.streams_count += 1
        watch.streams_count += 1
        ends_s = time.monotonic() + STREAM_S
        stopping = asyncio.ensure_future(self._stopping.wait())
        sampled: asyncio.Future[Any] = stopping
        try:
            while time.monotonic() < ends_s:
                sampled = asyncio.ensure_future(watch.next_sample())
                await asyncio.wait([sampled, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not sampled.done():
                    return
                sampled.result()
                yield event("update", render(watch))
        except (SlateMQError, OpenInstance) as error:
            yield event("gone", str(error))
        finally:
            sampled.cancel()
            stopping.cancel()
            self.streams_count -= 1
            watch.streams_count -= 1

    @property
    def viewers_count(self) -> int:
        """Tokens for which the instance is being sampled."""
        return len(self._watches)

    def has_place(self, token: str) -> bool:
        """Whether one more stream may be opened."""
        found = self._watches.get(token)
        own = found[0].streams_count if found is not None else 0
        return self.streams_count < STREAMS_MAX and own < PERSON_STREAMS_MAX

    def stop_streams(self) -> None:
        self._stopping.set()

    async def close(self) -> None:
        self.stop_streams()
        tasks = [task for _, task in self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, token: str, watch: Watch) -> None:
        if self._watches.get(token, (None,))[0] is watch:
            del self._watches[token]


def event(name: str, text: str) -> bytes:
    """One server-sent event."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n".encode()
