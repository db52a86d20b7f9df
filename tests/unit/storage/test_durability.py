from __future__ import annotations

from pathlib import Path

import pytest

from libs.storage import durability
from libs.storage.durability import FileSync, FolderSync, NoSync, durability_of


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


@pytest.mark.parametrize("kind", [FileSync, FolderSync])
async def test_one_file_is_synced_with_the_folders_that_lead_to_it(
    tmp_path: Path, synced: list[Path], kind: type[FileSync] | type[FolderSync]
) -> None:
    file = tmp_path / "blobs" / "ab" / "cd"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")

    await kind(tmp_path).sync_file(file)

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
