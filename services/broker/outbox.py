"""Pushes on their way to the ingests: numbered here, stored with the commands that make them.

    push ──► row <ingest shard, number> in the broker's own batch ──durable──► sender ──► ingest
                                                 ▲                                          │
                                                 └── deleted when ingest says it is durable ┘

The numbers for one ingest shard have no gaps and never begin anew: ingest keeps the last one that
it stored, and passes over what is sent again. Pure: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from libs.storage.execution_records import OutboxCounter, encode_outbox_counter
from libs.storage.own_keys import outbox_counter_key, outbox_key
from services.broker.leases import Row
from slatemq.errors import ResourceExhausted

ROWS_MAX = 1_000_000
"""Rows that may wait unless set otherwise: an hour without ingest at some 300 pushes a second."""

BYTES_MAX = 1 << 30
"""Bytes that may wait unless set otherwise; they are in the database, not in memory."""

FULL_RETRY_MS = 1000

_EMPTY = OutboxCounter(last_number=0, first_waiting=1, waiting_bytes=0)


class Outbox:
    """The pushes of one broker shard that wait, by ingest shard; in memory are numbers alone."""

    def __init__(self, counters: Mapping[int, OutboxCounter] | None = None) -> None:
        """Go on where these stored counters are."""
        self.rows_max = ROWS_MAX
        self.bytes_max = BYTES_MAX
        self.on_push: Callable[[int], None] = lambda ingest_shard: None
        """Called for every push, with its ingest shard; the push is not durable yet."""
        self._counters = dict(counters or {})
        self._oldest_ms: dict[int, int] = {}
        self._changed: set[int] = set()
        self._rows: list[Row] = []

    @property
    def ingest_shards(self) -> list[int]:
        """The ingest shards that any push went to."""
        return list(self._counters)

    def counter(self, ingest_shard: int) -> OutboxCounter:
        """Where the pushes for one ingest shard stand."""
        return self._counters.get(ingest_shard, _EMPTY)

    def waiting_count(self, ingest_shard: int) -> int:
        """How many pushes wait to be sent to an ingest shard."""
        counter = self.counter(ingest_shard)
        return counter.last_number + 1 - counter.first_waiting

    def oldest_ms(self, ingest_shard: int) -> int | None:
        """When the oldest push that waits was made; None: none waits, or it was not read yet."""
        return self._oldest_ms.get(ingest_shard)

    def check_room(self, count: int, size_bytes: int) -> None:
        """Raises ResourceExhausted when so much more does not fit; into an empty one all fits."""
        rows = sum(map(self.waiting_count, self._counters))
        waiting = sum(counter.waiting_bytes for counter in self._counters.values())
        if rows and (rows + count > self.rows_max or waiting + size_bytes > self.bytes_max):
            raise ResourceExhausted(
                f"{rows} pushes wait for an ingest, more do not fit",
                reason="OUTBOX_FULL",
                retry_after_ms=FULL_RETRY_MS,
            )

    def push(self, ingest_shard: int, value: bytes, now_ms: int) -> int:
        """Adds a row (`encode_outbox`) to the next commit; gives its number. See `check_room`."""
        before = self.counter(ingest_shard)
        number = before.last_number + 1
        if before.first_waiting == number:
            self._oldest_ms[ingest_shard] = now_ms
        self._counters[ingest_shard] = before._replace(
            last_number=number, waiting_bytes=before.waiting_bytes + len(value)
        )
        self._rows.append((outbox_key(ingest_shard, number), value))
        self._changed.add(ingest_shard)
        self.on_push(ingest_shard)
        return number

    def seen(self, ingest_shard: int, pushed_at_ms: int) -> None:
        """Notes when the oldest push that waits was made, as its row says."""
        self._oldest_ms[ingest_shard] = pushed_at_ms

    def sent(self, ingest_shard: int, count: int, size_bytes: int) -> None:
        """Removes the oldest rows, which are durable at ingest; `size_bytes` is of their values."""
        before = self.counter(ingest_shard)
        first = before.first_waiting
        after = before._replace(
            first_waiting=first + count, waiting_bytes=before.waiting_bytes - size_bytes
        )
        self._counters[ingest_shard] = after
        if after.first_waiting > after.last_number:
            self._oldest_ms.pop(ingest_shard, None)
        numbers = range(first, first + count)
        self._rows += ((outbox_key(ingest_shard, number), None) for number in numbers)
        self._changed.add(ingest_shard)

    # --- Records ------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether a drain now would give any rows."""
        return bool(self._changed)

    def drain(self) -> Iterator[Row]:
        """The rows that changed since the last drain."""
        rows, self._rows = self._rows, []
        changed, self._changed = self._changed, set()
        yield from rows
        for ingest_shard in changed:
            counter = encode_outbox_counter(self._counters[ingest_shard])
            yield outbox_counter_key(ingest_shard), counter
