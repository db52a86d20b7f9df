"""The journals of delayed messages are cleaned of what can be claimed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from libs.storage.records.delayed_records import decode_delayed
from services.broker.core.queue import Queue
from services.broker.entries import delayed as delayed_cleaning
from services.broker.entries.delayed import DelayedCleaner
from tests.integration.broker.entries.delayed_rows import (
    MINUTE,
    YEAR,
    delay,
    rows,
    watching,
)
from tests.integration.broker.rig import Rig, running
from tests.manual_clock import ManualClock


def cleaner(rig: Rig) -> DelayedCleaner:
    assert rig.service.database is not None
    return DelayedCleaner(rig.owner, rig.service.database, rig.clock.now_ms())


async def clean_for(rig: Rig, cleaning: DelayedCleaner, minutes: int) -> None:
    for _ in range(minutes):
        rig.clock.advance(MINUTE)
        await cleaning.clean()


async def test_rows_whose_messages_can_be_claimed_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delayed_cleaning, "CLEANED_ROWS", 2)
    monkeypatch.setattr(delayed_cleaning, "LOOK_S", 3600)  # the broker's own leaves it to us
    async with running() as rig:
        await rig.create()
        cleaning = cleaner(rig)
        for minutes in (200 * YEAR // MINUTE, 1, 3, 1, 10, 1, 1):
            await delay(rig, [minutes], minutes * MINUTE)
        assert len(await rows(rig)) == 7
        await clean_for(rig, cleaning, 2)
        assert len(await rows(rig)) == 3
        await clean_for(rig, cleaning, 6)
        assert len(await rows(rig)) == 2
        # At the latest when it is twice as old as its delay was, and a minute.
        await clean_for(rig, cleaning, 13)
        assert len(await rows(rig)) == 1
        async with watching(rig) as watch:
            assert await watch.heartbeat() == [200 * YEAR // MINUTE]


async def test_a_row_that_waits_long_is_seldom_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    decode = decode_delayed

    def counted(value: bytes) -> Any:
        nonlocal looked
        looked += 1
        return decode(value)

    monkeypatch.setattr(delayed_cleaning, "decode_delayed", counted)
    monkeypatch.setattr(delayed_cleaning, "LOOK_S", 3600)  # the broker's own leaves it to us
    async with running() as rig:
        await rig.create()
        cleaning = cleaner(rig)
        await delay(rig, [1], 100 * YEAR)
        await clean_for(rig, cleaning, 600)
        assert looked <= 11
        # One that stood still, for a night or for years, looks once.
        looked = 0
        for pause in (700, 100_000, 10 * YEAR // MINUTE):
            rig.clock.advance(pause * MINUTE)
            await cleaning.clean()
        assert looked <= 3
        assert len(await rows(rig)) == 1


async def test_what_is_known_to_be_empty_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str] = []
    find_last = DelayedCleaner._find_last

    async def noted(self: DelayedCleaner, queue: Queue) -> None:
        looked_for.append(queue.queue_id)
        await find_last(self, queue)

    monkeypatch.setattr(DelayedCleaner, "_find_last", noted)
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.create("purged")
        rig.owner.shard.queues["purged"].purge_available()
        await clean_for(rig, cleaner(rig), 3)
    assert looked_for == []
    async with running(tmp_path, clock) as rig:
        await clean_for(rig, cleaner(rig), 3)
    assert set(looked_for) == {"q", "purged"}  # of an earlier run


async def test_cleaning_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def left(count: int) -> None:
        async with asyncio.timeout(60):
            while len(await rows(rig)) != count:
                await asyncio.sleep(0.01)

    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.create("none")
        await delay(rig, [1], 5 * MINUTE)
        await delay(rig, [2], 500 * MINUTE)
    clock.advance(30 * MINUTE)
    async with running(tmp_path, clock) as rig:
        await left(1)
        async with watching(rig) as watch:
            assert await watch.heartbeat() == [2]
        clock.advance(1000 * MINUTE)
        await left(0)
