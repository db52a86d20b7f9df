"""A claim whose response was sent holds none of its messages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from services.broker.delivery.waiters import ClaimBatch
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.manual_clock import ManualClock


def batches_count() -> int:
    return sum(isinstance(one, ClaimBatch) for one in gc.get_objects())


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(memory_root(Disk()), ManualClock()) as rig:
        yield rig


async def test_the_messages_of_a_claim_are_let_go_without_the_garbage_collector(rig: Rig) -> None:
    # Given: gRPC's objects of a call are in a cycle, and stay until the collector looks
    gc.collect()
    gc.disable()
    try:
        before = batches_count()
        await rig.create()
        await rig.assign([1, 2, 3])

        # When
        messages = await rig.claim(max_messages=3)

        # Then
        assert len(messages) == 3
        async with asyncio.timeout(10):
            while batches_count() > before:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
