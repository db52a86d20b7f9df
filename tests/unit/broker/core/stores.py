"""A database in a dict, which can answer slowly, fail to become durable, and lose what was not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from libs.storage.layout.own_keys import (
    CLOCK_KEY,
)
from libs.storage.records.states import encode_clock

Row = tuple[bytes, bytes | None]


class DictStore:
    """Implements `services.broker.shard.loading.Store`; reads see all that is written."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self._seen: dict[bytes, bytes] = {}  # what reads see: not yet what is just being written
        self.reads = 0
        self.rows_read = 0
        self.slow = False
        self._gates: list[asyncio.Future[None]] = []
        self._batches: list[Sequence[Row]] = []  # written, not durable yet
        self._durable: dict[bytes, bytes] = {}

    # --- Commits ------------------------------------------------------------

    def write(self, rows: Sequence[Row], now_ms: int, *, late: bool = False) -> None:
        self.catch_up()
        batch = [*rows, (CLOCK_KEY, encode_clock(now_ms))]
        _apply(self.rows, batch)
        self._batches.append(batch)
        if not late:
            self.catch_up()

    def catch_up(self) -> None:
        """Lets reads see a batch that was written late."""
        self._seen = dict(self.rows)

    def make_durable(self) -> None:
        if len(self._batches) == 1:
            self.catch_up()
        _apply(self._durable, self._batches.pop(0))

    @property
    def durable_rows(self) -> dict[bytes, bytes]:
        """What no crash takes back."""
        return self._durable

    def crash(self, surviving: int) -> DictStore:
        """What a restart finds if the first of the undurable batches survived, this many."""
        after = DictStore()
        after.rows = dict(self._durable)
        for batch in self._batches[:surviving]:
            _apply(after.rows, batch)
        after._durable = dict(after.rows)
        after.catch_up()
        return after

    # --- Reads --------------------------------------------------------------

    async def get(self, key: bytes) -> bytes | None:
        await self._wait()
        value = self._seen.get(key)
        await self._wait()
        self.reads += 1
        self.rows_read += 1
        return value

    async def scan(
        self, start: bytes, end: bytes, limit: int | None = None
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        await self._wait()
        rows = sorted((k, v) for k, v in self._seen.items() if start <= k < end)[:limit]
        await self._wait()
        self.reads += 1
        for row in rows:
            self.rows_read += 1
            yield [row]

    async def _wait(self) -> None:
        if self.slow:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._gates.append(gate)
            await gate

    def open_gates(self) -> None:
        """Lets every read that waits go one step on."""
        gates, self._gates = self._gates, []
        for gate in gates:
            if not gate.done():
                gate.set_result(None)


def _apply(rows: dict[bytes, bytes], batch: Sequence[Row]) -> None:
    for key, value in batch:
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = value
