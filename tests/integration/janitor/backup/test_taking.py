"""Backups of databases that no process serves: what is copied, refused, and removed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore

from libs.serving.process.instance import refuse_lost_instance
from libs.storage.database.addresses import overlap, parse_root
from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import DamagedStore, LostInstance, StoreUnavailable
from libs.storage.layout.ids import SeqBlock, decode_seq_block
from libs.storage.layout.keys import config_key
from libs.storage.layout.own_keys import ID_BLOCK_KEY
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.restores import RESTORING
from libs.storage.objects.small_objects import ObjectInfo, Objects
from libs.storage.objects.topology_entries import entry_path
from libs.storage.records.configs import QueueConfigRecord, encode_config
from services.janitor.backup import turns
from services.janitor.backup.catalogue import Backup, Catalogue, new_backup_id
from services.janitor.backup.renumbering import LEFT_OUT_MIN
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import ShardSnapshots, snapshots_of_stopped
from services.janitor.backup.taking import ATTEMPTS, BackupSource, Taking
from services.janitor.jobs.contract import JobCancelled, Progress
from services.janitor.runs.history import Run, RunRequest, RunStore, State, Trigger, new_run_id
from slatemq.errors import FailedPrecondition, NotFound, Unavailable
from tests.integration.janitor.backup.stopped_instance import (
    KINDS,
    NOW_MS,
    read,
    restored,
    taking,
    write,
)
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url
from tests.made_instances import make_instance


async def test_a_backup_of_a_stopped_instance_leaves_out_no_shard_whose_database_is_lost(
    root: Root, backups: Root
) -> None:
    await write(root, b"first")
    first = await taking(root, backups).take()
    await root.objects.put(entry_path("ingest", 1), b"{}")  # a shard whose database is gone

    with pytest.raises(DamagedStore, match=r"ingest/1 is gone"):
        await taking(root, backups).take()
    assert await Catalogue(backups.objects).get() == first


async def test_shards_that_were_removed_stay_so_in_a_restored_instance(
    root: Root, backups: Root, fresh: Root
) -> None:
    await write(root, b"first")
    for database in ("ingest/7", "broker/3"):
        await RemovedShards(root.objects).add(database, now_ms=1)

    backup = await taking(root, backups).take()
    assert backup == await Catalogue(backups.objects).get()
    await RemovedShards(root.objects).add("ingest/8", now_ms=2)
    await restored(backups, fresh)

    assert await RemovedShards(fresh.objects).all() == {"ingest/7", "broker/3"}
    assert await read(fresh, "broker/0") == b"first"


async def test_each_backup_copies_only_what_is_new_and_can_be_restored_by_itself(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    catalogue = Catalogue(backups.objects)
    await write(root, b"first")
    uri = await Blobs(root).put(os.urandom(100_000))
    first = await taking(root, backups).take()
    await write(root, b"second")
    second = await taking(root, backups).take()
    third = await taking(root, backups).take()

    assert first.copied_bytes >= 100_000
    assert 0 < second.copied_bytes < 100_000
    # What SlateDB compacts meanwhile is new
    before, now = [{*await catalogue.stored(one)} for one in (second, third)]
    assert third.copied_count == len(now - before) < len(now)
    await restored(backups, fresh, first)
    assert await read(fresh, "broker/0") == b"first"
    again = open_root((tmp_path / "again").as_uri(), sync=False)
    await restored(backups, again)
    assert await read(again, "ingest/0") == b"second"
    assert len(await Blobs(again).get(uri)) == 100_000
    assert RESTORING not in await again.objects.list("")


async def test_ids_go_on_behind_all_that_may_have_been_given_out_since(
    root: Root, backups: Root, fresh: Root
) -> None:
    await write(root, b"x", SeqBlock(1, 1 << 20))
    backup = await taking(root, backups).take()
    ten_days_s = 10 * 86_400
    catalogue = Catalogue(backups.objects)
    now_ms = backup.taken_at_ms + ten_days_s * 1000
    await Restoring(catalogue, backup, fresh, now_ms=lambda: now_ms).restore()

    value = await read(fresh, "ingest/0", ID_BLOCK_KEY)
    assert value is not None
    block = decode_seq_block(value)
    assert block.base == (1 << 20) + 1
    assert block.end > LEFT_OUT_MIN
    assert block.size >= ten_days_s * 100_000


async def test_the_oldest_go_with_what_no_other_one_needs(root: Root, backups: Root) -> None:
    catalogue = Catalogue(backups.objects)
    await write(root, b"first")
    uri = await Blobs(root).put(b"gone soon")
    first = await taking(root, backups, kept=2).take()
    await Blobs(root).delete(uri)
    kept = [await taking(root, backups, kept=2).take() for _ in range(2)]

    assert await catalogue.ids() == [one.backup_id for one in reversed(kept)]
    with pytest.raises(NotFound, match=first.backup_id):
        await catalogue.get(first.backup_id)
    there = {*await backups.objects.list("objects")}
    assert f"objects/{uri}" not in there
    for backup in kept:
        assert {one.stored for one in await catalogue.stored(backup)} <= there


async def test_payloads_that_have_gone_since_the_backup_before_are_counted(
    root: Root, backups: Root, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a backup with two payloads
    await write(root, b"x")
    uris = [await Blobs(root).put(payload) for payload in (b"one", b"other")]
    await taking(root, backups).take()

    # When they go, one after the other
    for uri in uris:
        assert "are gone from the instance" not in caplog.text
        await Blobs(root).delete(uri)
        one = taking(root, backups)
        await one.take()

        # Then each is counted, and that none is left is said aloud
        assert one.payloads_gone_count == 1
    assert "are gone from the instance" in caplog.text


async def test_a_backup_is_the_newest_also_when_the_clock_was_set_back(
    root: Root, backups: Root, fresh: Root
) -> None:
    catalogue = Catalogue(backups.objects)
    for hours, value in ((0, b"first"), (-1, b"second"), (-2, b"third"), (-2, b"fourth")):
        await write(root, value)
        one = taking(root, backups, kept=1)
        one.now_ms = lambda hours=hours: NOW_MS + hours * 3_600_000  # type: ignore[misc]
        backup = await one.take()

        assert await catalogue.ids() == [backup.backup_id]
        assert backup.ended_at_ms == one.now_ms()
    await restored(backups, fresh)
    assert await read(fresh, "broker/0") == b"fourth"


def test_ids_of_backups_sort_behind_those_that_there_are_and_differ_by_turn() -> None:
    first = new_backup_id(NOW_MS, [], 1)
    assert new_backup_id(NOW_MS + 5000, [first], 2) == new_backup_id(NOW_MS + 5000, [], 1)
    behind = [new_backup_id(now_ms, [first], 7) for now_ms in (NOW_MS - 5000, NOW_MS, NOW_MS + 1)]
    assert [one > first for one in behind] == [True] * 3
    assert new_backup_id(NOW_MS, [first], 8) > behind[0]
    for by_hand in ("before-upgrade", "20261301-000000-000", "20260101-000000-x", ""):
        assert new_backup_id(NOW_MS, [by_hand], 1) == first


def instantly(one: Taking) -> Taking:
    """It does not wait for what stays as it is."""

    async def sleep(_: float) -> None:
        """No time passes."""

    one.sleep = sleep
    return one


class HaltingObjects(Objects):
    """Halts before such a path is written."""

    def __init__(self, folder: Path, durability: Any, halts_at: str) -> None:
        super().__init__(LocalStore(folder), None, durability)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.halts_at = halts_at

    async def put(self, path: str, data: bytes) -> None:
        await self.halt(path)
        await super().put(path, data)

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        await self.halt(path)
        return await super().put_if_absent(path, data)

    async def halt(self, path: str) -> None:
        if path.endswith(self.halts_at):
            self.reached.set()
            await self.go_on.wait()


@asynccontextmanager
async def halted(
    root: Root, backups: Root, folder: Path, halts_at: str = ".manifest"
) -> AsyncIterator[tuple[asyncio.Task[Backup], HaltingObjects]]:
    """A backup that has copied all that it needs, and has no record."""
    target = open_root(backups.url, sync=False)
    target.objects = objects = HaltingObjects(folder, backups.durability, halts_at)
    going = asyncio.create_task(taking(root, target, kept=1).take())
    reached = asyncio.create_task(objects.reached.wait())
    await asyncio.wait([going, reached], return_when=asyncio.FIRST_COMPLETED)
    assert objects.reached.is_set(), going.result()
    try:
        yield going, objects
    finally:
        objects.go_on.set()
        await asyncio.wait([going])


async def test_a_backup_is_refused_while_another_one_is_taken_which_stays_whole(
    root: Root, backups: Root, tmp_path: Path
) -> None:
    await write(root, b"first")
    await taking(root, backups, kept=1).take()
    uri = await Blobs(root).put(b"of the second")
    async with halted(root, backups, tmp_path / "backups") as (going, objects):
        await Blobs(root).delete(uri)  # What a third one does not need

        with pytest.raises(FailedPrecondition, match="another backup is being taken") as refused:
            await taking(root, backups, kept=1).take()
        assert refused.value.reason == "BACKUP_RUNNING"
        objects.go_on.set()
        second = await going

    catalogue = Catalogue(backups.objects)
    assert await catalogue.ids() == [second.backup_id]
    there = {*await backups.objects.list("objects")}
    stored = {one.stored for one in await catalogue.stored(second)}
    assert f"objects/{uri}" in stored
    assert stored <= there
    await taking(root, backups, kept=1).take()


async def test_a_backup_that_stood_still_until_another_one_was_taken_ends_without_harm(
    root: Root, backups: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(root, b"first")
    monkeypatch.setattr(turns, "RENEW_S", 3600)
    async with halted(root, backups, tmp_path / "backups") as (going, objects):
        other = await instantly(taking(root, backups, kept=1)).take()
        monkeypatch.setattr(turns, "RENEW_S", 0)
        objects.go_on.set()
        with pytest.raises(Unavailable, match="another one has begun since"):
            await going
    assert await Catalogue(backups.objects).ids() == [other.backup_id]


@pytest.mark.parametrize("halts_at", [".manifest", "/objects.gz", "/backup.json"])
async def test_a_backup_that_stood_still_before_a_last_write_has_no_record(
    root: Root,
    backups: Root,
    fresh: Root,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    halts_at: str,
) -> None:
    await write(root, b"first")
    uri = await Blobs(root).put(b"of the one that stands still")
    # It has looked just now whether it has the turn
    monkeypatch.setattr(turns, "RENEW_S", 3600)
    async with halted(root, backups, tmp_path / "backups", halts_at) as (going, objects):
        await Blobs(root).delete(uri)
        await instantly(taking(root, backups, kept=1)).take()
        # What no record names goes with the next older one
        other = await taking(root, backups, kept=1).take()
        assert f"objects/{uri}" not in await backups.objects.list("objects")

        objects.go_on.set()
        with pytest.raises(Unavailable, match="another one has begun since"):
            await going

    assert await Catalogue(backups.objects).ids() == [other.backup_id]
    await restored(backups, fresh, other)
    assert await read(fresh, "broker/0") == b"first"


async def test_a_backup_that_has_lost_its_turn_removes_no_older_one(
    root: Root, backups: Root
) -> None:
    await write(root, b"x")
    for _ in range(3):
        await taking(root, backups).take()
    catalogue = Catalogue(backups.objects)
    before = await catalogue.ids()

    async def lost() -> None:
        raise Unavailable("another one has begun since")

    with pytest.raises(Unavailable):
        await catalogue.prune(1, lost)
    assert await catalogue.ids() == before


async def killed(root: Root, backups: Path, number: int) -> list[str]:
    """Takes a backup in a process that is killed before this write; what it wrote, and this."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.janitor.backup.killed_taking"),
        *(root.url, backups.as_uri(), str(number)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == (-signal.SIGKILL if number else 0)
    return [path.rpartition("/")[2] for path in out.decode().split()]


@pytest.mark.slow
async def test_a_backup_that_was_killed_counts_for_nothing_and_the_next_one_is_whole(
    root: Root, tmp_path: Path
) -> None:
    # Given an instance with payloads of its own
    await write(root, b"x")
    payloads = [os.urandom(1000) for _ in range(10)]
    uris = [await Blobs(root).put(payload) for payload in payloads]

    def copy(number: int) -> Root:
        """A copy of the instance: each opening of its databases adds tables."""
        shutil.copytree(tmp_path / "data", folder := tmp_path / f"data-{number}")
        return open_root(folder.as_uri(), sync=False)

    writes = await killed(copy(0), tmp_path / "undisturbed", 0)
    assert writes[-4:] == ["tables.gz", "objects.gz", "backup.json", "00000001.json"]

    # When a backup of it is killed at its first write, halfway, or at one of its last: those of its
    # record
    for number in (1, 2, len(writes) // 2, *range(len(writes) - 3, len(writes))):
        folder = tmp_path / f"backups-{number}"
        source = copy(number)
        assert (await killed(source, folder, number))[-1] == writes[number - 1]
        backups = open_root(folder.as_uri(), sync=False)
        catalogue = Catalogue(backups.objects)
        assert await catalogue.ids() == []

        # Then the next one has all, and copies only what the first did not
        backup = await instantly(taking(source, backups)).take()
        assert await catalogue.ids() == [backup.backup_id]
        assert (backup.copied_count < backup.objects_count) is (number > 2)
        fresh = open_root((tmp_path / f"new-{number}").as_uri(), sync=False)
        await restored(backups, fresh, backup)
        assert [await Blobs(fresh).get(uri) for uri in uris] == payloads
        assert [await read(fresh, name) for name in KINDS] == [b"x", b"x"]


class FleetingObjects(Objects):
    """Removes a body as soon as it was listed."""

    async def describe(
        self, prefix: str, after: str | None = None, matching: re.Pattern[str] | None = None
    ) -> Sequence[ObjectInfo]:
        found = await super().describe(prefix, after, matching)
        for info in found:
            if info.path.endswith("/applied"):
                await self.delete(info.path)
        return found


async def test_bodies_of_tasks_that_are_applied_meanwhile_are_left_out(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    await write(root, b"x")
    for name in ("waiting", "applied"):
        await root.objects.put(f"tasks/ingest-0/redis/{name}", b"body")
    fleeting = FleetingObjects(LocalStore(tmp_path / "data"), None, root.durability)
    root.objects = fleeting

    await taking(root, backups).take()

    assert await fleeting.list("tasks") == ["tasks/ingest-0/redis/waiting"]
    await restored(backups, fresh)
    assert await fresh.objects.list("tasks") == ["tasks/ingest-0/redis/waiting"]


@pytest.mark.parametrize("job", ["retention", "unreferenced", "dead-letters", "restore", "repair"])
async def test_a_job_that_removes_meanwhile_has_the_snapshots_taken_again(
    root: Root, backups: Root, job: str
) -> None:
    await write(root, b"x")
    store = RunStore(root.objects)
    taken = 0

    async def run_job() -> None:
        run_id = new_run_id(job, NOW_MS)
        ask, facts = RunRequest(job), {"janitor": 1, "process": "another"}
        times = {"created_at_ms": NOW_MS, "started_at_ms": NOW_MS, "ended_at_ms": NOW_MS + 1}
        run = Run(run_id, ask, Trigger.SCHEDULE, State.DONE, **facts, **times)  # type: ignore[arg-type]
        await store.create(run)

    def snapshots(runs_until: int) -> Callable[[], AsyncIterator[ShardSnapshots]]:
        @asynccontextmanager
        async def take() -> AsyncIterator[ShardSnapshots]:
            nonlocal taken
            taken += 1
            async with snapshots_of_stopped(root, NOW_MS) as found:
                if taken <= runs_until:
                    await run_job()
                yield found

        return take  # type: ignore[return-value]

    one = taking(root, backups)
    one.source = BackupSource(root, snapshots(1), store)  # type: ignore[arg-type]
    await one.take()
    assert taken == 2

    taken = 0
    one.source = BackupSource(root, snapshots(99), store)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=f"run .*{job}.* at another time"):
        await one.take()
    assert taken == ATTEMPTS


async def test_what_lacks_or_is_in_the_way_is_named(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    with pytest.raises(FailedPrecondition, match="there is no database below"):
        await taking(root, backups).take()
    with pytest.raises(NotFound, match="newest"):
        await Catalogue(backups.objects).get()

    # Another instance below the same backup root
    await write(root, b"x")
    uri = await Blobs(root).put(b"y")
    backup = await taking(root, backups).take()
    other = open_root((tmp_path / "other").as_uri(), sync=False)
    await write(other, b"x")
    with pytest.raises(FailedPrecondition, match="a backup root of its own"):
        await taking(other, backups).take()

    # An instance where there is one
    with pytest.raises(FailedPrecondition, match="restore to an empty root"):
        await restored(backups, other)

    # An object that is lost: found before anything is written
    await backups.objects.delete(f"objects/{uri}")
    with pytest.raises(FailedPrecondition, match=rf"lacks 1 payload \(objects/{uri}\)"):
        await restored(backups, fresh)
    assert await fresh.objects.folders("") == []
    assert not await fresh.objects.exists(RESTORING)

    # A later format
    newer = Backup(**{**vars(backup), "format": 99})
    with pytest.raises(FailedPrecondition, match="restore it with the version that made it"):
        await restored(backups, open_root((tmp_path / "third").as_uri()), newer)


async def test_an_instance_that_has_lost_its_record_is_not_backed_up(
    root: Root, backups: Root, fresh: Root
) -> None:
    await write(root, b"first")
    first = await taking(root, backups, kept=1).take()
    await root.objects.delete_folder("instance")

    with pytest.raises(LostInstance, match="restore the folder `instance/`"):
        await taking(root, backups, kept=1).take()

    assert await Catalogue(backups.objects).ids() == [first.backup_id]
    await restored(backups, fresh)
    await refuse_lost_instance(fresh)


async def test_a_restore_that_was_interrupted_goes_on(
    root: Root, backups: Root, fresh: Root
) -> None:
    await write(root, b"x")
    for _ in range(30):
        await Blobs(root).put(os.urandom(1000))
    backup = await taking(root, backups).take()
    catalogue = Catalogue(backups.objects)
    first = Restoring(catalogue, backup, fresh)

    def stop_at_two(progress: Progress) -> None:
        if progress.tasks_done == 2:
            first.cancelled.set()

    first.report = stop_at_two
    with pytest.raises(JobCancelled):
        await first.restore()

    second = await restored(backups, fresh, backup)
    stored = await catalogue.stored(backup)
    assert 0 < second.copied_count < len(stored)
    assert await read(fresh, "broker/0") == b"x"


class ShortGet:
    """What a store gives for an object, without its last byte."""

    def __init__(self, found: Any) -> None:
        self.meta, self._found = found.meta, found

    async def bytes_async(self) -> bytes:
        return bytes(await self._found.bytes_async())[:-1]

    async def stream(self, min_chunk_size: int) -> AsyncIterator[bytes]:
        data = await self.bytes_async()
        for start in range(0, len(data), min_chunk_size):
            yield data[start : start + min_chunk_size]


class ShortStore(LocalStore):
    """Once, it gives less of an object than the object has, or keeps less than it was given."""

    async def get_async(self, path: str, **options: Any) -> Any:
        found = await super().get_async(path, **options)
        if self.short_get != path:
            return found
        self.short_get = ""
        return ShortGet(found)

    async def put_async(self, path: str, file: Any, **options: Any) -> Any:
        if self.short_put == path:
            self.short_put, file = "", file[:-1]
        return await super().put_async(path, file, **options)

    short_get = short_put = ""


@pytest.mark.parametrize("size_bytes", [1000, 9 << 20], ids=["whole", "in pieces"])
async def test_a_restore_from_a_store_that_gives_a_part_of_an_object_fails_and_can_be_repeated(
    root: Root, backups: Root, fresh: Root, tmp_path: Path, size_bytes: int
) -> None:
    await write(root, b"x")
    uri = await Blobs(root).put(payload := os.urandom(size_bytes))
    backup = await taking(root, backups).take()
    store = ShortStore(tmp_path / "backups")
    store.short_get = f"objects/{uri}"
    backups.objects = Objects(store, None, backups.durability)

    with pytest.raises(StoreUnavailable, match=f"gave {size_bytes - 1} of {size_bytes} bytes"):
        await restored(backups, fresh, backup)
    assert await fresh.objects.list(uri.partition("/")[0]) == []
    assert not await fresh.objects.list("ingest/0/manifest")

    await restored(backups, fresh, backup)
    assert await Blobs(fresh).get(uri) == payload


async def test_a_restore_to_a_store_that_keeps_a_part_of_an_object_fails_and_can_be_repeated(
    root: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    await write(root, b"x")
    uri = await Blobs(root).put(payload := os.urandom(1000))
    backup = await taking(root, backups).take()
    store = ShortStore(tmp_path / "new", mkdir=True)
    store.short_put = uri
    fresh.objects = Objects(store, None, fresh.durability)

    with pytest.raises(StoreUnavailable, match=f"{uri} was copied .* repeat the restore"):
        await restored(backups, fresh, backup)
    assert not await fresh.objects.list("ingest/0/manifest")

    await restored(backups, fresh, backup)
    assert await Blobs(fresh).get(uri) == payload


@pytest.mark.parametrize("marker", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000])
async def test_a_root_whose_marker_names_no_backup_is_not_empty(
    root: Root, backups: Root, fresh: Root, marker: bytes
) -> None:
    await write(root, b"x")
    backup = await taking(root, backups).take()
    await fresh.objects.put(RESTORING, marker)

    with pytest.raises(FailedPrecondition, match="restore to an empty root"):
        await restored(backups, fresh, backup)


async def test_a_prepared_root_takes_a_later_backup_and_no_other_once_it_is_an_instance(
    root: Root, backups: Root, fresh: Root
) -> None:
    await write(root, b"x")
    await Blobs(root).put(os.urandom(100_000))
    catalogue = Catalogue(backups.objects)
    await Restoring(catalogue, await taking(root, backups).take(), fresh, prepare=True).restore()
    assert not await fresh.objects.list("broker/0/manifest")
    await write(root, b"later")
    later = await taking(root, backups).take()

    done = await restored(backups, fresh, later)
    assert done.copied_bytes < 100_000
    assert await read(fresh, "ingest/0") == b"later"
    with pytest.raises(FailedPrecondition, match="restore to an empty root"):
        await restored(backups, fresh, later)


@pytest.mark.s3
async def test_an_instance_moves_from_a_folder_to_s3(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    await write(root, b"x")
    large = os.urandom(20 << 20)  # copied in pieces
    uri = await Blobs(root).put(large)
    with moto() as port:
        backups, there = (open_root(root_url(port, name)) for name in ("backups", "there"))
        await taking(root, backups).take()
        await restored(backups, there)
        assert await read(there, "broker/0") == b"x"
        assert await Blobs(there).get(uri) == large
        with pytest.raises(FailedPrecondition, match="restore to an empty root"):
            await restored(backups, there)


async def test_a_queue_that_two_brokers_have_is_named(
    root: Root, backups: Root, fresh: Root, caplog: pytest.LogCaptureFixture
) -> None:
    await make_instance(root)
    for name in ("broker/0", "broker/1"):
        database = await root.database(name, Kind.BROKER)
        batch = Batch()
        batch.put(config_key("moved"), encode_config(QueueConfigRecord("true", 5, 0)))
        await database.commit(batch)
        await database.close()
    await taking(root, backups).take()
    await restored(backups, fresh)
    assert "the queue moved is on broker 1 and on broker 0: delete it on one of them" in caplog.text
    assert (await QueueNames(fresh.objects).get("moved")).broker_shards == (0,)


async def test_a_dry_run_counts_and_writes_nothing(root: Root, backups: Root) -> None:
    await write(root, b"x")
    await Blobs(root).put(b"y" * 70_000)
    dry = taking(root, backups)
    dry.dry_run = True
    assert (await dry.take()).copied_bytes > 70_000
    assert await backups.objects.list("") == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("file:///a/b", "file:///a/b/c", True),
        ("file:///a/bc", "file:///a/b", False),
        ("s3://x/a", "s3://x", True),
        ("s3://x/a", "s3://x/ab", False),
        ("s3://x/a", "s3://y/a", False),
        ("s3://x/a", "gs://x/a", False),
        ("s3://x/a?region=b", "s3://x/a", True),
        ("s3://x/a?endpoint=http://one", "s3://x/a?endpoint=http://two", False),
    ],
)
def test_roots_overlap_where_one_lies_below_the_other(one: str, other: str, expected: bool) -> None:
    assert overlap(parse_root(one), parse_root(other)) is expected
    assert overlap(parse_root(other), parse_root(one)) is expected
