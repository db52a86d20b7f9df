"""Backups of an instance that has a damaged object: no copy that is whole is replaced by it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root
from services.janitor.backup.catalogue import Catalogue
from services.janitor.backup.shards import ShardSnapshots, snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from slatemq.errors import FailedPrecondition
from tests.integration.janitor.backup.stopped_instance import (
    NOW_MS,
    read,
    restored,
    taking,
    write,
)

SIZES = [1000, 9 << 20]
"""An object that is copied whole, and one that is copied in pieces."""


LARGE = os.urandom(100_000)
"""A row that makes up its table."""


def size_of(path: Path) -> int:
    return path.stat().st_size


def cut(path: Path, by: float = 0.5) -> None:
    os.truncate(path, int(size_of(path) * (1 - by)))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def taking_with(root: Root, backups: Root, damage: Callable[[], None]) -> Taking:
    """A backup whose source is damaged once its snapshots are taken."""

    @asynccontextmanager
    async def take() -> AsyncIterator[ShardSnapshots]:
        async with snapshots_of_stopped(root, NOW_MS) as found:
            damage()
            yield found

    one = taking(root, backups)
    one.source = BackupSource(root, take, one.source.runs)
    return one


@pytest.mark.parametrize("by", [0.5, 0.0001], ids=["its index too", "behind its index"])
async def test_a_table_that_was_cut_off_does_not_replace_its_copy(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, by: float
) -> None:
    # Given a backup
    await write(root, LARGE)
    first = await taking(root, backups).take()
    copies = tmp_path / "backups/objects/ingest/0/compacted"
    table = max((tmp_path / "data/ingest/0/compacted").iterdir(), key=size_of)
    assert size_of(copies / table.name) == size_of(table) > len(LARGE)
    size_bytes = size_of(table)

    # When the next one finds a table of it that is shorter now
    path = f"ingest/0/compacted/{table.name}"
    with pytest.raises(FailedPrecondition, match=f"{path} has .* bytes") as refused:
        await taking_with(root, backups, lambda: cut(table, by)).take()

    # Then it says where the good copy is, which stays, and the backup can be restored
    assert refused.value.reason == "OBJECT_DAMAGED"
    assert f"objects/{path}" in str(refused.value)
    assert size_of(copies / table.name) == size_bytes
    assert await Catalogue(backups.objects).ids() == [first.backup_id]
    await restored(backups, fresh)
    assert await read(fresh, "ingest/0") == LARGE


async def test_a_table_that_is_shorter_than_its_manifest_says_is_in_no_backup(
    root: Root, backups: Root, tmp_path: Path
) -> None:
    await write(root, LARGE)

    def cut_all() -> None:
        for path in (tmp_path / "data/broker/0/compacted").iterdir():
            cut(path)

    with pytest.raises(FailedPrecondition, match=r"broker/0/.* has .* bytes, of .* at least"):
        await taking_with(root, backups, cut_all).take()
    assert await Catalogue(backups.objects).ids() == []
    assert not await backups.objects.list("objects/broker")


@pytest.mark.parametrize("size_bytes", SIZES)
async def test_a_payload_that_was_cut_off_does_not_replace_its_copy_until_it_is_restored(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, size_bytes: int
) -> None:
    await write(root, b"x")
    uri = await Blobs(root).put(payload := os.urandom(size_bytes))
    await taking(root, backups).take()
    cut(tmp_path / "data" / uri)

    for dry_run in (True, False):
        one = taking(root, backups)
        one.dry_run = dry_run
        with pytest.raises(FailedPrecondition, match=f"{uri} has {size_bytes // 2:,} bytes"):
            await one.take()
    copy = tmp_path / "backups/objects" / uri
    assert copy.read_bytes() == payload

    # What the message says to do
    (tmp_path / "data" / uri).write_bytes(copy.read_bytes())
    await taking(root, backups).take()
    await restored(backups, fresh)
    assert await Blobs(fresh).get(uri) == payload


@pytest.mark.parametrize("size_bytes", SIZES)
async def test_a_payload_that_has_changed_before_it_was_copied_is_named_and_not_copied(
    root: Root, backups: Root, tmp_path: Path, size_bytes: int
) -> None:
    await write(root, b"x")
    uris = [await Blobs(root).put(os.urandom(size_bytes)) for _ in range(3)]
    for uri in uris[:2]:
        flip(tmp_path / "data" / uri)

    with pytest.raises(FailedPrecondition, match=f"{min(uris[:2])} is .*1 more") as refused:
        await taking(root, backups).take()
    assert refused.value.reason == "OBJECT_DAMAGED"
    assert await backups.objects.list("objects") == [f"objects/{uris[2]}"]
    assert await Catalogue(backups.objects).ids() == []

    # What the message says to do where there is no good one
    for uri in uris[:2]:
        await Blobs(root).delete(uri)
    await taking(root, backups).take()


async def test_a_copy_that_was_cut_off_is_copied_again(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    await write(root, b"x")
    uri = await Blobs(root).put(payload := os.urandom(1000))
    await taking(root, backups).take()
    cut(tmp_path / "backups/objects" / uri)

    await taking(root, backups).take()
    await restored(backups, fresh)
    assert await Blobs(fresh).get(uri) == payload
