import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.layout.keys import log_key
from libs.storage.layout.primitives import Row
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from services.ingest.read.tailing import MetadataLog, read_log_bounds
from tests.forms import examples
from tests.manual_clock import ManualClock
from tests.unit.ingest.shards import batch, opened

SHARD = 3

entries = st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(0, 3)), max_size=12)


async def stored_log(database: Database, entries: list[tuple[int, int]]) -> MetadataLog:
    """A log with these entries: sequence and time of receipt."""
    rows = Batch()
    for sequence, received_at_ms in entries:
        message = MessageMetadata(sequence, 0, received_at_ms, 0, 0, {})
        rows.put(log_key(sequence), encode_log_entry([message]))
    if entries:
        await database.commit(rows)
    return MetadataLog(
        database,
        await read_log_bounds(database, SHARD),
        bytes_max=0,
        streams_max=1,
        heartbeat_ms=1000,
    )


@settings(max_examples=examples(60), deadline=None)
@given(entries, st.integers(0, 40))
def test_a_position_is_that_of_the_last_entry_before_the_time(
    gaps: list[tuple[int, int]], wanted_ms: int
) -> None:
    async def run() -> None:
        database = await open_root("memory:///").database("ingest/3", Kind.INGEST)
        sequence, received_at_ms = SHARD << 48, 1
        logged = []
        for ids, ms in gaps:
            sequence, received_at_ms = sequence + ids, received_at_ms + ms
            logged.append((sequence, received_at_ms))
        log = await stored_log(database, logged)
        before = [sequence for sequence, at_ms in logged if at_ms < wanted_ms]
        assert await log.position_before(wanted_ms) == (before[-1] if before else 0)
        await database.close()

    asyncio.run(run())


async def test_finding_a_position_costs_one_row_for_each_bit_of_a_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = await open_root("memory:///").database("ingest/3", Kind.INGEST)
    log = await stored_log(database, [((SHARD << 48) + (n << 30), n) for n in range(1, 2000)])
    limits: list[int | None] = []
    scan = Database.scan

    def counted(
        self: Database,
        start: bytes,
        end: bytes,
        limit: int | None = None,
        durable: bool = False,
        descending: bool = False,
    ) -> AsyncIterator[list[Row]]:
        limits.append(limit)
        return scan(self, start, end, limit, durable, descending)

    monkeypatch.setattr(Database, "scan", counted)
    assert await log.position_before(1234) == (SHARD << 48) + (1233 << 30)
    assert set(limits) == {1}
    assert len(limits) <= 48
    await database.close()


async def test_what_is_not_durable_yet_has_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        first = await shard.publisher.publish(batch(b"a"))
        clock.advance(10)
        flushing, go_on = asyncio.Event(), asyncio.Event()
        flush = Database.flush

        async def slow(self: Database) -> None:
            flushing.set()
            await go_on.wait()
            await flush(self)

        monkeypatch.setattr(Database, "flush", slow)
        second = asyncio.create_task(shard.publisher.publish(batch(b"b")))
        await flushing.wait()
        assert await shard.log.position_before(clock.now_ms() + 1) == first.first_message_id
        go_on.set()
        last = (await second).first_message_id
        assert await shard.log.position_before(clock.now_ms() + 1) == last
        assert await shard.log.position_before(clock.now_ms()) == first.first_message_id


async def test_a_repeat_returns_the_time_of_the_first_also_after_a_restart() -> None:
    root: Root = open_root("memory:///")
    clock = ManualClock()
    async with opened(root, clock) as shard:
        first = await shard.publisher.publish(batch(b"a", b"b", request_id="r"))
        assert first.received_at_ms == clock.now_ms()
        clock.advance(10)
        assert await shard.publisher.publish(batch(b"a", b"b", request_id="r")) == first
        await shard.publisher.publish(batch(b"c"))
    async with opened(root, clock) as shard:
        assert await shard.publisher.publish(batch(b"a", b"b", request_id="r")) == first


async def test_the_purge_epoch_rises_and_never_falls_back() -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        assert shard.purge_epoch.durable == 0
        assert await shard.purge_epoch.raise_by_one() == 1
        raised = await asyncio.gather(*(shard.purge_epoch.raise_by_one() for _ in range(5)))
        assert sorted(raised) == [2, 3, 4, 5, 6]
        assert shard.purge_epoch.durable == 6
    async with opened(root) as shard:
        assert shard.purge_epoch.durable == 6
        assert await shard.purge_epoch.raise_by_one() == 7
