"""Small commits on file:// take one step in a thread: same guarantees as on the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from libs.storage.database.commits import AT_ONCE_BYTES, GroupCommit
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import Fenced, StoreFailed
from libs.storage.objects.durability import FolderSync
from tests.forms import examples
from tests.manual_clock import ManualClock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="small commits go elsewhere")


class _HeldSync(FolderSync):
    """A disk whose syncs from the commit thread end when the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun = threading.Event()
        self.open = threading.Event()
        self.count = 0
        self.error: OSError | None = None

    def sync_now(self) -> None:
        self.count += 1
        self.begun.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        super().sync_now()


class _Rows:
    def __init__(self) -> None:
        self.waiting: list[tuple[bytes, bytes]] = []
        self.taken: list[list[bytes]] = []

    async def drain(self, batch: Batch) -> None:
        for key, value in self.waiting:
            batch.put(key, value)
        self.taken.append([key for key, _ in self.waiting])
        self.waiting = []


def _batch(key: bytes, value: bytes = b"v") -> Batch:
    batch = Batch()
    batch.put(key, value)
    return batch


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[tuple[Root, Database, _HeldSync]]:
    root = open_root(folder.as_uri())
    root.durability = sync = _HeldSync(folder)
    database = await root.database("ingest/0", Kind.INGEST)
    try:
        yield root, database, sync
    finally:
        sync.open.set()
        await database.close()


async def test_the_known_binding_on_a_folder_takes_the_thread(tmp_path: Path) -> None:
    async with _opened(tmp_path) as (_, database, sync):
        sync.open.set()
        assert await database.write(_batch(b"k"), alone=True)
        assert sync.count == 1
        assert await database.get(b"k", durable=True) == b"v"


async def test_nothing_is_answered_before_the_sync_and_the_next_commit_gathers(
    tmp_path: Path,
) -> None:
    async with _opened(tmp_path) as (_, database, sync):
        rows = _Rows()
        commits = GroupCommit(database, ManualClock(), rows)
        running = asyncio.create_task(commits.run())

        async def put(key: bytes, value: bytes = b"v") -> None:
            rows.waiting.append((key, value))
            commits.mark_dirty(len(value))
            await commits.durable()

        first = asyncio.create_task(put(b"first"))
        assert await asyncio.to_thread(sync.begun.wait, 30)
        others = [asyncio.create_task(put(b"%d" % number)) for number in range(5)]
        await asyncio.sleep(0.1)
        assert not first.done()
        assert len(rows.taken) == 1
        assert commits.uncommitted_bytes > 0
        assert commits.overdue_ms() > 0

        sync.open.set()
        await asyncio.gather(first, *others)
        assert len(rows.taken) == 2
        for number in range(5):
            assert await database.get(b"%d" % number, durable=True) == b"v"

        # Large ones overlap as before, in their order with small ones around them
        large = bytes(AT_ONCE_BYTES)
        for step in range(4):
            await asyncio.gather(put(b"same", large), put(b"same", b"%d" % step))
            assert await database.get(b"same", durable=True) == b"%d" % step
        await commits.close()
        await running


async def test_a_disk_that_cannot_sync_fails_the_commit_and_all_after_it(tmp_path: Path) -> None:
    async with _opened(tmp_path) as (_, database, sync):
        sync.open.set()
        sync.error = OSError(5, "Input/output error")
        with pytest.raises(StoreFailed, match="Input/output error"):
            await database.commit(_batch(b"k"))
        sync.error = None
        with pytest.raises(StoreFailed, match="Input/output error"):
            await database.commit(_batch(b"l"))


async def test_who_was_fenced_answers_nothing(tmp_path: Path) -> None:
    async with _opened(tmp_path) as (root, database, sync):
        sync.open.set()
        await database.commit(_batch(b"k"))
        newer = await root.database("ingest/0", Kind.INGEST)
        synced = sync.count
        with pytest.raises(Fenced):
            await database.commit(_batch(b"k", b"late"))
        assert sync.count == synced
        assert await newer.get(b"k") == b"v"
        await newer.close()


async def test_closing_waits_for_a_commit_whose_caller_gave_up(tmp_path: Path) -> None:
    async with _opened(tmp_path) as (root, database, sync):
        commit = asyncio.create_task(database.commit(_batch(b"k")))
        assert await asyncio.to_thread(sync.begun.wait, 30)
        commit.cancel()
        with suppress(asyncio.CancelledError):
            await commit
        closing = asyncio.create_task(database.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        sync.open.set()
        await closing
        again = await root.database("ingest/0", Kind.INGEST)
        assert await again.get(b"k") == b"v"
        await again.close()


async def test_signals_and_a_busy_loop_disturb_no_commit(tmp_path: Path) -> None:
    async with _opened(tmp_path) as (_, database, sync):
        sync.open.set()
        heard = 0

        def hear(*_: object) -> None:
            nonlocal heard
            heard += 1

        # Not reset: the last one may be delivered later than this test ends, and would kill us all.
        signal.signal(signal.SIGUSR1, hear)
        committing = asyncio.create_task(_many(database, 100))
        while not committing.done():
            for thread in threading.enumerate():
                if thread.name.startswith("commit ") and thread.ident is not None:
                    signal.pthread_kill(thread.ident, signal.SIGUSR1)
            os.sched_yield()
            await asyncio.sleep(0)
        await committing
        assert heard > 0
        assert sync.count == 100
        for number in range(100):
            assert await database.get(b"%d" % number, durable=True) == b"v"


async def _many(database: Database, count: int) -> None:
    for number in range(count):
        await database.commit(_batch(b"%d" % number))


@pytest.mark.repeated
def test_a_future_that_is_polled_too_early_never_stops_the_process(tmp_path: Path) -> None:
    # In a process of its own: this one would stand still, too.
    command = [sys.executable, "-m", "tests.unit.storage.database.early_waker", str(tmp_path)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    assert run.stdout == f"{examples(200)}\n"
