"""What an owner does not take for a new one: a database that is lost, in part or as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind, tuning_of
from libs.storage.database.slate import Batch
from libs.storage.errors import DamagedStore
from libs.storage.objects.small_objects import ObjectInfo
from libs.storage.objects.topology_entries import entry_path

NAME = "ingest/0"
KEY = b"\x01\x7fkey"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(tmp_path.as_uri())


async def commit(root: Root, *, flushed: bool = False) -> None:
    database = await root.database(NAME, Kind.INGEST)
    batch = Batch()
    batch.put(KEY, b"value")
    await database.commit(batch)
    if flushed:
        await database.flush_memtable()
    await database.close()


async def announce(root: Root) -> None:
    await root.objects.put(entry_path("ingest", 0), b"{}")


async def refusal(root: Root) -> str:
    """Why the database cannot be opened, however often that is tried."""
    found = []
    for _ in range(2):
        with pytest.raises(DamagedStore) as raised:
            await root.database(NAME, Kind.INGEST)
        found.append(str(raised.value))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_database_without_manifests_that_has_other_files_does_not_begin_again(
    root: Root, tmp_path: Path, flushed: bool
) -> None:
    await commit(root, flushed=flushed)
    shutil.rmtree(tmp_path / NAME / "manifest")
    assert "ingest/0 has no manifest" in await refusal(root)


async def test_a_database_that_is_gone_does_not_begin_again_while_its_shard_is_announced(
    root: Root, tmp_path: Path
) -> None:
    await commit(root)
    await announce(root)
    shutil.rmtree(tmp_path / NAME)
    said = await refusal(root)
    assert "topology/ingest-0.json says that it was there" in said
    assert "Give a shard up" in said

    await root.objects.delete(entry_path("ingest", 0))
    await commit(root)


@pytest.mark.parametrize(("flushed", "announced"), [(True, False), (False, True)])
async def test_a_database_whose_whole_wal_is_gone_is_not_opened_until_an_operator_says_so(
    root: Root, tmp_path: Path, flushed: bool, announced: bool
) -> None:
    await commit(root, flushed=flushed)
    if announced:
        await announce(root)
    assert (await root.files(NAME)).faults == []
    shutil.rmtree(tmp_path / NAME / "wal")
    said = await refusal(root)
    (fault,) = (await root.files(NAME)).faults
    assert said.startswith(f"{fault.path}: {fault.wrong}")

    await root.objects.put(fault.path, b"")
    await commit(root)
    database = await root.database(NAME, Kind.INGEST)
    assert await database.get(KEY, durable=True) == b"value"
    await database.close()
    assert (await root.files(NAME)).faults == []


async def test_a_crash_before_the_first_commit_leaves_a_database_that_opens(
    root: Root, tmp_path: Path
) -> None:
    await (await root.database(NAME, Kind.INGEST)).close()
    # The first manifest is all that is written before the first file of the WAL.
    first = min((tmp_path / NAME / "manifest").iterdir())
    stored = first.read_bytes()
    shutil.rmtree(tmp_path / NAME)
    first.parent.mkdir(parents=True)
    first.write_bytes(stored)
    assert (await root.files(NAME)).faults == []
    await commit(root)


async def test_a_copy_of_a_snapshot_has_no_wal_and_opens_as_what_was_restored(
    root: Root, tmp_path: Path
) -> None:
    await commit(root, flushed=True)
    shutil.rmtree(tmp_path / NAME / "wal")
    await refusal(root)
    await (await root.database(NAME, Kind.INGEST, is_restored=True)).close()
    await commit(root)


async def test_an_owner_that_begins_a_database_meanwhile_is_not_taken_for_a_loss(
    root: Root, tmp_path: Path
) -> None:
    # Given another owner, which begins after this one has seen that there is no manifest
    real = root.objects.describe
    begun = False

    async def begin(prefix: str, *args: Any, **options: Any) -> Sequence[ObjectInfo]:
        nonlocal begun
        if prefix == NAME and not begun:
            begun = True
            await commit(open_root(tmp_path.as_uri()))
            await announce(root)
        return await real(prefix, *args, **options)

    root.objects.describe = begin  # type: ignore[method-assign]
    await commit(root)
    assert begun


NONE_BYTES = 42
"""What a file of compactions has that says of none."""

LOOKS = ("poll_interval", "worker.compactions_poll_interval")


async def compact(root: Root, tmp_path: Path) -> Path:
    """Have tables of the database compacted; the file that says so."""
    table = tuning_of(Kind.INGEST, "file")
    often = {f"compactor_options.{look}": "100ms" for look in LOOKS}
    settings = {**table.settings, **often, "manifest_poll_interval": "100ms"}
    database = await root.database(NAME, Kind.INGEST, replace(table, settings=settings))
    folder = tmp_path / NAME / "compactions"
    while max(path.stat().st_size for path in folder.glob("*.compactions")) <= NONE_BYTES:
        batch = Batch()
        batch.put(KEY, b"value")
        await database.commit(batch)
        await database.flush_memtable()
    await database.close()
    return max(folder.glob("*.compactions"))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda stored: stored[: len(stored) // 2], id="cut"),
        pytest.param(lambda stored: b"", id="empty"),
        pytest.param(lambda stored: b"\x80" + stored[1:], id="of another version"),
        # Bytes 26 to 33 are the owner's number; 6 of the last 16 are a compaction's time.
        pytest.param(lambda stored: stored[:28] + b"\x01" + stored[29:], id="of a later owner"),
        pytest.param(lambda stored: stored[:-9] + b"\x03" + stored[-8:], id="of a later time"),
    ],
)
async def test_a_damaged_file_of_compactions_is_named_and_the_owner_starts_once_it_is_deleted(
    root: Root, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    newest = await compact(root, tmp_path)
    assert (await root.files(NAME)).compactions is None
    newest.write_bytes(damage(newest.read_bytes()))
    path = str(newest.relative_to(tmp_path))

    said = await refusal(root)
    files = await root.files(NAME)

    assert said.startswith(f"{path}: ")
    assert "delete this file" in said
    assert files.compactions is not None
    assert files.compactions.path == path
    assert files.faults == []
    newest.unlink()
    database = await root.database(NAME, Kind.INGEST)
    assert await database.get(KEY, durable=True) == b"value"
    await database.close()


async def test_a_start_asks_for_the_entry_only_where_there_is_no_database(root: Root) -> None:
    # Each start asks whether the root is being restored.
    await commit(root)
    assert root.objects.counts.requests["head"] == 2
    await commit(root)
    assert root.objects.counts.requests["head"] == 3
