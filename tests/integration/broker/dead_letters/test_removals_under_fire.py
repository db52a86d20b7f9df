"""Removals while others are at work on the same queue: consumers, redrives, a second janitor."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.broker.dead_letters import mover
from slatemq.v1 import removal_pb2
from tests.integration.broker.dead_letters.removal_calls import (
    ARCHIVED,
    GRACE_MS,
    archive,
    asked,
    failed_rows,
    waiting_rows,
)
from tests.integration.broker.entry_calls import AVAILABLE, FAILED, fail, ids, listed, start, until
from tests.integration.broker.rig import refusal, running

EXPIRED_REMOVAL = removal_pb2.ExpiredRemoval
TEN_SECONDS = 10_000


async def test_each_expired_message_goes_once_while_consumers_take_what_they_can() -> None:
    async with running() as rig:
        await rig.create(lease_ms=600_000)
        deadline_ms = rig.clock.now_ms() + TEN_SECONDS
        for first in range(1, 2001, 50):
            await rig.assign(range(first, first + 50), retention_deadlines_ms=[deadline_ms] * 50)
        rows = waiting_rows(await listed(rig, AVAILABLE))
        held: list[str] = []

        async def consume() -> None:
            for _ in range(40):
                held.extend(one.lease_token for one in await rig.claim(max_messages=7))

        async def janitor(rows: list[removal_pb2.WaitingRow]) -> tuple[int, int]:
            answer = await asked(rig, expired=EXPIRED_REMOVAL(rows=rows))
            return answer.removed_count, len(answer.refused)

        consumers = [asyncio.create_task(consume()) for _ in range(3)]
        await asyncio.sleep(0)
        early = await asyncio.gather(*(janitor(rows[at : at + 500]) for at in range(0, 2000, 500)))
        assert {removed for removed, _ in early} == {0}
        await consumers[0]
        rig.clock.advance(TEN_SECONDS + GRACE_MS)  # from now on no one is given anything
        # Two janitors at once.
        late = await asyncio.gather(*(janitor(rows) for _ in range(2)))
        await asyncio.gather(*consumers)

        assert set(await rig.ack(*held)) == {0}
        dropped = 2000 - len(held)
        assert sum(removed for removed, _ in late) <= dropped
        assert await rig.counts() == {"done": len(held)}
        assert 7 <= len(held) < 2000


async def test_a_redrive_goes_on_beside_removals_and_each_dead_letter_ends_once() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        for first in range(1, 301, 3):
            await fail(rig, range(first, first + 3))
        rows = failed_rows(await listed(rig, FAILED))
        one = await start(rig, rate=1000)
        counts = [await archive(rig, rows[at : at + 20]) for at in range(280, -1, -20)]
        result = await until(rig, one.redrive_id, lambda value: bool(value.ended_at_ms))

        archived = sum(removed for removed, _ in counts)
        assert result.redriven_count + archived == 300
        assert await rig.counts() == {
            name: count
            for name, count in (("available", result.redriven_count), ("archived", archived))
            if count
        }
        both = [*await ids(rig, AVAILABLE), *await ids(rig, ARCHIVED)]
        assert sorted(both) == list(range(1, 301))


async def test_a_redrive_that_waits_for_an_ingest_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "LOCK_S", 0.05)
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [1, 2])
        rows = failed_rows(await listed(rig, FAILED))
        rig.ingest.reads.clear()
        rig.ingest.read_gate.clear()
        one = await start(rig, filter='headers["x"] == "y"')
        while not rig.ingest.reads:
            await asyncio.sleep(0.005)
        wanted = removal_pb2.ArchiveRemoval(rows=rows, run="r")

        code, reason, _ = await refusal(asked(rig, archive=wanted))
        rig.ingest.read_gate.set()

        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "ROWS_BUSY")
        await until(rig, one.redrive_id, lambda value: bool(value.ended_at_ms))
        assert await archive(rig, rows) == (2, 0)
