from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from libs.storage.objects import durability
from libs.storage.objects.durability import (
    NO_SPACE,
    FileSync,
    FolderSync,
    NoSync,
    durability_of,
    full_disk,
)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    paths: list[Path] = []
    real = durability.fsync_path

    def watching(path: Path) -> None:
        real(path)
        paths.append(path)

    monkeypatch.setattr(durability, "fsync_path", watching)
    return paths


def test_only_a_folder_is_synced(tmp_path: Path) -> None:
    assert isinstance(durability_of(None), NoSync)
    assert isinstance(durability_of(tmp_path, enabled=False), NoSync)
    assert isinstance(durability_of(tmp_path), FolderSync | FileSync)


def test_elsewhere_than_on_linux_files_are_synced_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert isinstance(durability_of(tmp_path), FileSync)


async def test_file_by_file_all_that_changed_is_synced_and_every_folder(
    tmp_path: Path, synced: list[Path]
) -> None:
    wal = tmp_path / "ingest" / "wal"
    wal.mkdir(parents=True)
    (wal / "1.sst").write_bytes(b"one")
    (wal / "2.sst").write_bytes(b"two")
    sync = FileSync(tmp_path)

    await sync.sync()
    folders = {tmp_path, tmp_path / "ingest", wal}
    assert set(synced) == {wal / "1.sst", wal / "2.sst", *folders}

    synced.clear()
    (wal / "2.sst").write_bytes(b"other")
    (wal / "3.sst").write_bytes(b"three")
    await sync.sync()
    assert set(synced) == {wal / "2.sst", wal / "3.sst", *folders}
    assert synced.index(wal / "3.sst") < synced.index(wal), "a folder after the files in it"


async def test_elsewhere_one_file_is_synced_with_the_folders_that_lead_to_it(
    tmp_path: Path, synced: list[Path]
) -> None:
    file = tmp_path / "blobs" / "ab" / "cd"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")

    await FileSync(tmp_path).sync_file(file)

    assert synced == [file, file.parent, tmp_path / "blobs", tmp_path]


async def test_a_disk_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")

    def failing(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(durability, "fsync_path", failing)
    with pytest.raises(OSError, match="Input/output"):
        await FileSync(tmp_path).sync()


class Held(FolderSync):
    """Each sync waits to be let through; `error` is what the next ones meet."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let_through = threading.Semaphore(0)
        self.begun = 0
        self.error: OSError | None = None

    def _sync(self, descriptors: Sequence[int]) -> None:
        self.begun += 1
        self.let_through.acquire()
        if self.error is not None:
            raise self.error
        super()._sync(descriptors)


async def begun(held: Held, count: int) -> None:
    while held.begun < count:
        await asyncio.sleep(0.001)


async def test_calls_beside_a_running_sync_share_the_next_one(tmp_path: Path) -> None:
    held = Held(tmp_path)
    first = asyncio.create_task(held.sync_file(tmp_path / "a"))
    await begun(held, 1)
    others = [asyncio.create_task(held.sync_file(tmp_path / str(n))) for n in range(20)]
    await asyncio.sleep(0)

    # When the first has ended, then no one else has: what they wrote may have come too late for it
    held.let_through.release()
    await first
    await begun(held, 2)
    assert not any(other.done() for other in others)

    # And one more is for all of them
    held.let_through.release()
    await asyncio.gather(*others)
    assert held.begun == 2


async def test_after_a_sync_that_failed_nothing_counts_as_durable(tmp_path: Path) -> None:
    held = Held(tmp_path)
    first = asyncio.create_task(held.sync())
    await begun(held, 1)
    others = [asyncio.create_task(held.sync_file(tmp_path / str(n))) for n in range(3)]
    await asyncio.sleep(0)
    held.error = OSError(5, "Input/output error")
    held.let_through.release()

    failures = await asyncio.gather(first, *others, return_exceptions=True)
    assert [str(failure) for failure in failures] == ["[Errno 5] Input/output error"] * 4

    # The system says it once; what was lost may be what this one is about
    held.error = None
    held.let_through.release()
    with pytest.raises(OSError, match="Input/output"):
        await held.sync()
    with pytest.raises(OSError, match="Input/output"):
        held.sync_now()


class FailedDisk:
    """What a C library says on a disk that has lost a write: each descriptor hears of it once."""

    def __init__(self) -> None:
        self.reported = set[int]()
        self.first_returns = threading.Event()

    def syncfs(self, descriptor: int) -> int:
        if descriptor in self.reported:
            return 0
        self.reported.add(descriptor)
        if len(self.reported) == 1:
            self.first_returns.wait()
        ctypes.set_errno(errno.EIO)
        return -1


async def test_a_failure_is_seen_by_each_of_two_threads_that_sync_at_once(tmp_path: Path) -> None:
    # Given a sync that has met a failure, and whose thread has not come to say so
    sync, disk = FolderSync(tmp_path), FailedDisk()
    sync._libc = disk  # type: ignore[assignment]
    first = asyncio.create_task(sync.sync())
    while not disk.reported:
        await asyncio.sleep(0.001)

    # When a commit, which may have lost the write, is made durable beside it
    with pytest.raises(OSError, match="Input/output"):
        await asyncio.to_thread(sync.sync_now)

    disk.first_returns.set()
    with pytest.raises(OSError, match="Input/output"):
        await first


@pytest.mark.parametrize("is_there", [True, False])
async def test_what_is_written_into_another_folder_at_its_path_is_not_durable(
    tmp_path: Path, is_there: bool
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    sync = FolderSync(data)
    await sync.sync()
    data.rename(tmp_path / "moved")
    if is_there:
        data.mkdir()

    with pytest.raises(OSError, match=str(data)):
        await sync.sync()

    # Nor is what is written once the folder is back, as something may be missing from it
    data.rmdir() if is_there else None
    (tmp_path / "moved").rename(data)
    with pytest.raises(OSError, match=str(data)):
        await asyncio.to_thread(sync.sync_now)


SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no second file system")
async def test_a_shard_on_a_disk_of_its_own_is_synced(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as other:
        devices = {one.stat().st_dev for one in (tmp_path, Path(other))}
        assert len(devices) == 2, "the temporary folder is in memory, too"
        (tmp_path / "ingest").mkdir()
        (tmp_path / "ingest" / "0").symlink_to(other)
        sync, synced = FolderSync(tmp_path), list[int]()

        class Libc:
            def syncfs(self, descriptor: int) -> int:
                synced.append(os.fstat(descriptor).st_dev)
                return 0

        sync._libc = Libc()  # type: ignore[assignment]

        await sync.sync()
        assert set(synced) == devices
        synced.clear()
        await asyncio.to_thread(sync.sync_now)
        assert set(synced) == devices


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path) -> None:
    said = full_disk(tmp_path, f"writing an object: {NO_SPACE} (os error 28)")

    assert f"the disk of {tmp_path} has " in said
    assert said.endswith("free space on it, or move the folder to a larger disk")
    # Once is enough, and a store that is no folder has no disk
    assert full_disk(tmp_path, said) == full_disk(None, NO_SPACE) == ""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc has no bytes left, where it is")
def test_a_full_disk_is_seen_when_the_error_does_not_name_it() -> None:
    assert "no space left on device" in full_disk(Path("/proc"), "object store error")
