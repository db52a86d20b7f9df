"""Fetches that go on while their lines claim what other ingests have.

Each line of waiters asks an ingest for one batch of messages at a time. Where the answer is late,
the line passes over what that ingest has until the answer comes; then it takes what was brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from dataclasses import dataclass, field

from libs.serving.requests.budget import AnswerBudget
from services.broker.delivery.message_cache import Fetch, Payloads
from services.broker.delivery.waiters import WaiterLine

LATE_S = 1.0
"""An ingest that has not answered a fetch by then holds up no messages of others."""

KEPT_S = 10.0
"""How long what a late fetch has brought is kept for claims that come again: it may be too large
for the cache."""


@dataclass(eq=False)
class LateFetches:
    _payloads: Payloads
    _budget: AnswerBudget
    _on_change: Callable[[WaiterLine], None]
    """Called when a late fetch of a line has ended, or what it brought is kept no more."""
    _kept: dict[Fetch, asyncio.TimerHandle | None] = field(default_factory=dict, init=False)

    @asynccontextmanager
    async def fetching(
        self, waiter_line: WaiterLine, ids: Sequence[int], max_bytes: int, context: Context
    ) -> AsyncIterator[tuple[list[Fetch], list[Fetch]]]:
        """Ask for messages; gives the fetches that have ended in time, and those that are late.

        They are calls of this context. Late ones go on as the line's, with their part of
        `max_bytes`.
        """
        fetches = self._payloads.begin(ids, max_bytes, context)
        try:
            if fetches:
                await asyncio.wait([fetch.task for fetch in fetches], timeout=LATE_S)
            done = [fetch for fetch in fetches if fetch.is_done]
            late = [fetch for fetch in fetches if not fetch.is_done]
        except BaseException:
            self._end(fetches)
            raise
        for fetch in late:
            self._drop(filter(None, [waiter_line.late.get(fetch.shard)]))
            waiter_line.late[fetch.shard] = fetch
        try:
            yield done, late
        finally:
            self._end(done)
            for fetch in late:
                self._keep(waiter_line, fetch)

    @contextmanager
    def brought(self, waiter_line: WaiterLine) -> Iterator[list[Fetch]]:
        """Within the block, what the line's late fetches have brought: it is to be claimed."""
        fetches = [fetch for fetch in waiter_line.late.values() if fetch.is_done]
        for fetch in fetches:
            del waiter_line.late[fetch.shard]
        try:
            yield fetches
        finally:
            self._drop(fetches)

    async def close(self) -> None:
        fetches = list(self._kept)
        self._drop(fetches)
        await asyncio.gather(*(fetch.task for fetch in fetches), return_exceptions=True)

    def _keep(self, waiter_line: WaiterLine, fetch: Fetch) -> None:
        self._budget.take(fetch.max_bytes)
        self._kept[fetch] = None
        fetch.task.add_done_callback(lambda _: self._came(waiter_line, fetch))

    def _came(self, waiter_line: WaiterLine, fetch: Fetch) -> None:
        if fetch in self._kept:
            loop = asyncio.get_running_loop()
            self._kept[fetch] = loop.call_later(KEPT_S, self._let_go, waiter_line, fetch)
            self._on_change(waiter_line)

    def _let_go(self, waiter_line: WaiterLine, fetch: Fetch) -> None:
        if waiter_line.late.get(fetch.shard) is fetch:
            del waiter_line.late[fetch.shard]
            self._drop([fetch])
            self._on_change(waiter_line)

    def _drop(self, fetches: Iterable[Fetch]) -> None:
        for fetch in fetches:
            timer = self._kept.pop(fetch)
            if timer is not None:
                timer.cancel()
            self._payloads.end(fetch)
            self._budget.release(fetch.max_bytes)

    def _end(self, fetches: Iterable[Fetch]) -> None:
        for fetch in fetches:
            self._payloads.end(fetch)
