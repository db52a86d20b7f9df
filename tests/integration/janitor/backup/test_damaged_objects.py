"""Backups of an instance that has a damaged object: no copy that is whole is replaced by it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import DamagedObject
from libs.storage.objects.small_objects import CopiedObject, Objects
from services.janitor.backup.catalogue import Catalogue, stored_manifest
from services.janitor.backup.checking import PARTS, in_part
from services.janitor.backup.command import main
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import ShardSnapshots, snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.backup.verifying import Verifying
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


async def verified(backups: Root) -> Verifying:
    catalogue = Catalogue(backups.objects)
    one = Verifying(catalogue, await catalogue.get())
    await one.verify()
    assert one.checked_count
    return one


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


def rot_all(folder: Path, name: str) -> list[Path]:
    found = [one for one in (folder / "objects").rglob("*") if one.is_file() and name in str(one)]
    for path in found:
        flip(path)
    assert found
    return found


def test_each_copy_is_checked_by_one_of_so_many_backups() -> None:
    for stored in ("objects/ingest/0/compacted/a.sst", "objects/blobs/00/b"):
        checked = [in_part(stored, number) for number in range(3 * PARTS)]
        assert checked == checked[:PARTS] * 3
        assert sum(checked) == 3


@pytest.mark.parametrize("name", ["compacted", "blobs"])
async def test_a_copy_that_has_rotted_is_found_by_a_backup_and_copied_again(
    root: Root,
    backups: Root,
    fresh: Root,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a backup, of whose copies some have rotted since and kept their size
    await write(root, LARGE)
    uri = await Blobs(root).put(LARGE)
    await taking(root, backups).take()
    found = rot_all(tmp_path / "backups", name)

    # When a backup checks these, then they are copied again, and all are whole
    monkeypatch.setattr("services.janitor.backup.taking.in_part", lambda stored, number: True)
    second = taking(root, backups)
    await second.take()
    assert second.rotten_count == len(found)
    assert second.checked_count > len(found)
    assert not (await verified(backups)).rotten
    assert not (await restored(backups, fresh)).rotten
    assert await read(fresh, "ingest/0") == LARGE
    assert await Blobs(fresh).get(uri) == LARGE


async def test_a_copy_that_has_rotted_is_named_by_verify_and_by_a_restore(
    root: Root,
    backups: Root,
    fresh: Root,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Given a backup of which a copy is lost, and others have rotted
    await write(root, b"x")
    uri = await Blobs(root).put(LARGE)
    lost = await Blobs(root).put(LARGE)
    backup = await taking(root, backups).take()
    assert not (await verified(backups)).rotten
    (rotten,) = rot_all(tmp_path / "backups", uri)
    manifest = tmp_path / "backups" / stored_manifest(backup.folder, "ingest/0")
    flip(manifest)
    copy = tmp_path / "backups/objects" / lost
    size_bytes = size_of(copy)
    cut(copy)

    # Then the command names them
    code = await asyncio.to_thread(main, ["backup", "verify", "--backups", backups.url], {})
    said = capsys.readouterr()
    named = [str(one.relative_to(tmp_path / "backups")) for one in (manifest, rotten)]
    assert code == 1
    assert said.out.splitlines() == [
        f"missing: objects/{lost}",
        *(f"rotten: {path}" for path in sorted(named)),
    ]
    assert "3 of" in said.err
    assert f"cannot be restored: use another one, and delete {backup.folder}/" in said.err

    # And where its manifests are whole, it says what to delete
    flip(manifest)
    assert await asyncio.to_thread(main, ["backup", "verify", "--backups", backups.url], {}) == 1
    assert "Delete the rotten ones from objects/ " in capsys.readouterr().err
    flip(manifest)

    # And a restore makes no database of another manifest
    os.truncate(copy, size_bytes)
    with pytest.raises(FailedPrecondition, match=r"0.manifest has rotted"):
        await restored(backups, fresh)


async def test_a_backup_whose_payloads_are_gone_is_named_and_restored_without_them_on_request(
    root: Root,
    backups: Root,
    fresh: Root,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a backup whose copies of payloads are gone, all but one
    monkeypatch.setattr("services.janitor.backup.command.NAMED_MAX", 2)
    await write(root, b"x")
    kept, *uris = [await Blobs(root).put(b"%d" % number) for number in range(8)]
    await taking(root, backups).take()
    for uri in uris:
        await backups.objects.delete(f"objects/{uri}")
    named = sorted(f"objects/{uri}" for uri in uris)

    # When it is verified, then some are named, all are counted, and the exit code says so
    command = ["backup", "verify", "--backups", backups.url]
    assert await asyncio.to_thread(main, command, {}) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"missing: {one}" for one in named[:2]] + ["missing: 5 more"]
    assert f"missing: 7 payloads ({', '.join(named[:5])} and 2 more)" in said.err
    assert await asyncio.to_thread(main, [*command, "--json"], {}) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["missing"], found["missing_count"]) == (named[:2], 7)
    assert found["missing_by_place"] == {"payloads": 7}
    assert (found["rotten"], found["rotten_count"]) == ([], 0)

    # When it is restored, then that is refused before anything is written
    command = ["backup", "restore", "--backups", backups.url, "--root", fresh.url]
    assert await asyncio.to_thread(main, command, {}) == 1
    said = capsys.readouterr()
    assert "lacks 7 payloads (" in said.err
    assert "--without-missing" in said.err
    assert await fresh.objects.list("") == []

    # And on request all else is restored
    assert await asyncio.to_thread(main, [*command, "--without-missing"], {}) == 0
    said = capsys.readouterr()
    assert said.out.endswith("without 7 objects whose copies are gone\n")
    assert await read(fresh, "ingest/0") == b"x"
    assert await Blobs(fresh).get(kept) == b"0"
    assert not await fresh.objects.exists(uris[0])


@pytest.mark.parametrize("lost", ["compacted/", ".manifest"])
async def test_a_restore_without_what_is_missing_needs_all_of_the_databases(
    root: Root, backups: Root, fresh: Root, lost: str
) -> None:
    await write(root, LARGE)
    await taking(root, backups).take()
    paths = [*await backups.objects.list("objects"), *await backups.objects.list("backups")]
    path = next(one for one in paths if "ingest/0" in one and lost in one)
    await backups.objects.delete(path)

    catalogue = Catalogue(backups.objects)
    restoring = Restoring(catalogue, await catalogue.get(), fresh, without_missing=True)
    with pytest.raises(FailedPrecondition, match=rf"lacks 1 of ingest/0 \({path}\)") as refused:
        await restoring.restore()

    assert refused.value.reason == "BACKUP_DAMAGED"
    assert await fresh.objects.list("") == []


async def test_payloads_of_the_backup_before_that_a_backup_lacks_are_named(
    root: Root, backups: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    await write(root, b"x")
    gone, _ = [await Blobs(root).put(payload) for payload in (b"one", b"other")]
    first = await taking(root, backups).take()
    await Blobs(root).delete(gone)
    await taking(root, backups).take()

    command = ["backup", "verify", "--backups", backups.url, "--json"]
    assert await asyncio.to_thread(main, command, {}) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["payloads_gone"] == [f"objects/{gone}"]
    assert f"the backup before, {first.backup_id}, has 1 payload (objects/{gone})" in said.err

    assert await asyncio.to_thread(main, [*command, first.backup_id], {}) == 0
    assert json.loads(capsys.readouterr().out)["payloads_gone_count"] == 0


@pytest.mark.parametrize("size_bytes", SIZES)
async def test_a_restore_leaves_out_payloads_that_have_rotted_and_names_them(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, size_bytes: int
) -> None:
    await write(root, b"x")
    uri = await Blobs(root).put(os.urandom(size_bytes))
    await taking(root, backups).take()
    rot_all(tmp_path / "backups", uri)
    assert (await restored(backups, fresh)).rotten == [f"objects/{uri}"]
    assert await read(fresh, "ingest/0") == b"x"
    assert not await fresh.objects.exists(uri)

    # And the new instance has backups
    await taking(fresh, open_root((tmp_path / "later").as_uri(), sync=False)).take()


@pytest.mark.parametrize("mended", [True, False])
async def test_a_restore_after_its_objects_were_copied_ahead_copies_what_is_whole_since(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, mended: bool
) -> None:
    # Given objects that were copied ahead, all but one, which had rotted
    await write(root, b"x")
    uri = await Blobs(root).put(LARGE)
    backup = await taking(root, backups).take()
    (copy,) = rot_all(tmp_path / "backups", uri)
    ahead = Restoring(Catalogue(backups.objects), backup, fresh, prepare=True)
    await ahead.restore()
    assert ahead.rotten == [f"objects/{uri}"]

    # When it is restored, then the instance has the payload if its copy is whole, or it is named
    if mended:
        flip(copy)
    assert (await restored(backups, fresh)).rotten == ([] if mended else [f"objects/{uri}"])
    assert await fresh.objects.exists(uri) == mended
    assert await read(fresh, "ingest/0") == b"x"


async def test_a_restore_refuses_a_table_that_has_rotted_until_it_is_whole(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    # Given a backup with tables that have rotted
    await write(root, LARGE)
    await taking(root, backups).take()
    tables = rot_all(tmp_path / "backups", "ingest/0/compacted")

    # When it is restored, then it says so, and there is no instance
    with pytest.raises(FailedPrecondition, match=r"such as objects/ingest/0/.*sst") as refused:
        await restored(backups, fresh)
    assert refused.value.reason == "BACKUP_DAMAGED"
    assert not await fresh.objects.list("ingest/0/manifest")

    # When they are put back, then a repeat ends
    for table in tables:
        flip(table)
    assert not (await restored(backups, fresh)).rotten
    assert await read(fresh, "ingest/0") == LARGE


async def test_a_copy_of_which_the_store_gives_other_bytes_once_is_whole(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(root, b"x")
    uri = await Blobs(root).put(LARGE)
    await taking(root, backups).take()
    (copy,) = rot_all(tmp_path / "backups", uri)
    copy_to = Objects.copy_to

    async def spoiled_once(one: Objects, path: str, *rest: Any) -> CopiedObject:
        try:
            return await copy_to(one, path, *rest)
        except DamagedObject:
            flip(copy)
            raise

    monkeypatch.setattr(Objects, "copy_to", spoiled_once)
    assert not (await restored(backups, fresh)).rotten
    assert await Blobs(fresh).get(uri) == LARGE


@pytest.mark.parametrize("name", ["backup.json", "tables.gz", "objects.gz"])
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "rotten"])
async def test_a_backup_that_is_damaged_itself_holds_up_no_later_one(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, name: str, gone: bool
) -> None:
    # Given two backups, the newer one of which is damaged
    await write(root, b"1")
    await taking(root, backups).take()
    await write(root, b"2")
    damaged = await taking(root, backups).take()
    path = tmp_path / "backups" / damaged.folder / name
    data = path.read_bytes()
    path.unlink()
    if not gone:
        path.write_bytes(data[: len(data) // 2])
    if gone and name == "backup.json":
        damaged_count, kept = 0, 1  # What has no record is no backup.
    else:
        damaged_count, kept = 1, 2
    await backups.objects.put("objects/blobs/not-needed", b"x")

    # When the next one is taken, then it says so, and no object is removed: it may be needed
    await write(root, b"3")
    one = taking(root, backups, kept)
    assert (await one.take()).copied_count
    assert (one.removed_count, one.damaged_count) == (1, damaged_count)
    assert await backups.objects.exists("objects/blobs/not-needed") == bool(damaged_count)

    # When it is one of those over what is kept, then all is whole
    await write(root, b"4")
    one = taking(root, backups, kept)
    await one.take()
    assert (one.removed_count, one.damaged_count) == (1, 0)
    assert not await backups.objects.exists("objects/blobs/not-needed")
    assert not (await verified(backups)).missing
    await restored(backups, fresh)
    assert await read(fresh, "ingest/0") == b"4"


async def test_a_restore_of_a_backup_without_its_list_says_what_to_do(
    root: Root, backups: Root, fresh: Root
) -> None:
    await write(root, b"x")
    backup = await taking(root, backups).take()
    await backups.objects.delete(f"{backup.folder}/tables.gz")
    with pytest.raises(FailedPrecondition, match=f"delete {backup.folder}/") as refused:
        await restored(backups, fresh)
    assert refused.value.reason == "BACKUP_DAMAGED"


async def test_a_damaged_table_does_not_replace_a_copy_that_has_rotted_too(
    root: Root, backups: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a backup, copies that have rotted since, and tables that have rotted otherwise
    await write(root, LARGE)
    first = await taking(root, backups).take()
    rot_all(tmp_path / "backups", "compacted")

    def rot_tables() -> None:
        for path in (tmp_path / "data").rglob("compacted/*"):
            data = bytearray(path.read_bytes())
            data[len(data) // 3] ^= 1
            path.write_bytes(data)

    # When the next one checks them, then it says so
    monkeypatch.setattr("services.janitor.backup.taking.in_part", lambda stored, number: True)
    with pytest.raises(FailedPrecondition, match="does not have the digest of its copy"):
        await taking_with(root, backups, rot_tables).take()
    assert await Catalogue(backups.objects).ids() == [first.backup_id]


async def test_copies_of_a_backup_that_did_not_end_are_checked_as_they_are(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    # Given copies that no backup has
    await write(root, LARGE)
    await taking(root, backups).take()
    for path in await backups.objects.list("backups"):
        await backups.objects.delete(path)

    # When the next backup ends without copying them again, then it knows what they are
    backup = await taking(root, backups).take()
    rot_all(tmp_path / "backups", "compacted/")
    assert backup.copied_count < backup.objects_count
    assert (await verified(backups)).rotten
