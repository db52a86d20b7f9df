"""Commits that are drained in steps, between which others have turns."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.database.slate import Batch
from libs.storage.errors import StoreFailed
from tests.unit.storage.database.commit_loop import HeldSync, Rows, committing


class _InSteps(Rows):
    """Drains in two steps, between which others have turns when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def drain(self, batch: Batch) -> None:
        self.begun.set()
        await self.go_on.wait()
        await super().drain(batch)


async def test_what_changes_while_a_source_is_drained_in_steps_belongs_to_the_same_commit() -> None:
    async with committing() as stack:
        stack.commits._source = rows = stack.rows = _InSteps()
        first = asyncio.create_task(stack.set(b"first"))
        await rows.begun.wait()
        second = asyncio.create_task(stack.set(b"second"))
        await asyncio.sleep(0)
        rows.go_on.set()
        await asyncio.gather(first, second)
        assert [keys for _, keys in rows.taken] == [[b"first", b"second"]]
        assert await stack.database.get(b"second", durable=True) == b"v"


async def test_a_commit_that_is_being_drained_when_one_before_it_fails_is_not_made() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        first = asyncio.create_task(stack.set(b"first"))
        await sync.until_waiting()
        stack.commits._source = rows = stack.rows = _InSteps()
        second = asyncio.create_task(stack.set(b"second"))
        await rows.begun.wait()
        sync.error = OSError(5, "Input/output error")
        sync.open.set()
        for waiter in (first, second):
            with pytest.raises(StoreFailed, match="Input/output error"):
                await waiter
        rows.go_on.set()
        with pytest.raises(StoreFailed, match="Input/output error"):
            await stack.running
        assert await stack.database.get(b"second") is None
