"""Joining the instance: its settings are made once, and every process runs with them."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from libs.serving.process.config import load
from libs.serving.process.exits import EXIT_USAGE
from libs.serving.process.instance import (
    Contradiction,
    Instance,
    InstanceSettings,
    StatedSetting,
    join_instance,
    refuse_lost_instance,
)
from libs.serving.server import cause_of
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.wal_stores import WalStore
from libs.storage.errors import (
    CorruptRecord,
    LostInstance,
    OtherFormat,
    OtherWalStore,
    StoreUnavailable,
)
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords, WalStoreRecord
from libs.storage.objects.small_objects import Objects
from services.janitor.config import JanitorConfig
from services.janitor.runs.history import Run, RunRequest, State, Trigger
from services.janitor.service import JanitorProcess

HOUR = StatedSetting("replay_window_s", 3600, "--replay-window-s")
DAY = StatedSetting("replay_window_s", 86_400, "SLATEMQ_REPLAY_WINDOW_S")
GRACE = StatedSetting("purge_grace_s", 5, "SLATEMQ_PURGE_GRACE_S")


def memory() -> Objects:
    return open_root("memory:///").objects


class LostAnswer:
    """A store of which the first write succeeds, but not its answer."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lost = False

    async def list(self, prefix: str) -> list[str]:
        return await self._objects.list(prefix)

    async def get(self, path: str) -> bytes:
        return await self._objects.get(path)

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        written = await self._objects.put_if_absent(path, data)
        if not self._lost:
            self._lost = True
            raise StoreUnavailable("the answer got lost")
        return written


async def test_the_first_process_makes_the_instance_as_it_states_and_the_others_join() -> None:
    objects = memory()

    first = await join_instance(InstanceRecords(objects), [HOUR])
    second = await join_instance(InstanceRecords(objects), [])
    third = await join_instance(InstanceRecords(objects), [HOUR])

    assert first == second == third == Instance(1, InstanceSettings(replay_window_s=3600))


async def test_a_process_that_contradicts_the_instance_stops_and_changes_nothing() -> None:
    objects = memory()
    await join_instance(InstanceRecords(objects), [HOUR])
    before = await InstanceRecords(objects).latest()

    with pytest.raises(Contradiction) as stopped:
        await join_instance(InstanceRecords(objects), [DAY, GRACE])

    assert stopped.value.cause.code == EXIT_USAGE
    assert stopped.value.cause.message == (
        "SLATEMQ_REPLAY_WINDOW_S is 86400, but the instance has replay_window_s=3600. Remove "
        "SLATEMQ_REPLAY_WINDOW_S, or change the instance: slatemq instance set "
        "replay_window_s=86400\n"
        "SLATEMQ_PURGE_GRACE_S is 5, but the instance has purge_grace_s=60. Remove "
        "SLATEMQ_PURGE_GRACE_S, or change the instance: slatemq instance set purge_grace_s=5"
    )
    assert await InstanceRecords(objects).latest() == before


async def test_of_processes_that_make_the_instance_at_once_one_does_and_the_rest_agree(
    tmp_path: Path,
) -> None:
    makers = [InstanceRecords(open_root(tmp_path.as_uri()).objects) for _ in range(20)]

    ends = await asyncio.gather(
        *(join_instance(maker, [(HOUR, DAY)[at % 2]]) for at, maker in enumerate(makers)),
        return_exceptions=True,
    )

    assert len(list((tmp_path / "instance").iterdir())) == 1
    joined = [end for end in ends if isinstance(end, Instance)]
    assert len(joined) == 10
    assert len(set(joined)) == 1
    assert sum(isinstance(end, Contradiction) for end in ends) == 10


async def test_a_process_whose_first_write_lost_its_answer_joins_what_it_wrote() -> None:
    objects = memory()
    store = LostAnswer(objects)
    with pytest.raises(StoreUnavailable):
        await join_instance(InstanceRecords(store), [HOUR])  # type: ignore[arg-type]

    # Started again by its supervisor
    joined = await join_instance(InstanceRecords(store), [HOUR])  # type: ignore[arg-type]

    assert joined == Instance(1, InstanceSettings(replay_window_s=3600))
    assert len(await objects.list("instance")) == 1


async def joined(root: Root) -> WalStoreRecord | None:
    """The store that a process has its WALs in once it has joined the instance."""
    await join_instance(InstanceRecords(root.objects), [], await root.new_wal_store())
    return (await root.wal_store()).record


async def test_a_new_instance_is_bound_to_no_store_that_cannot_have_its_wals(
    tmp_path: Path,
) -> None:
    # Given a URL where no folder can be, and the store of another instance
    (tmp_path / "file").touch()
    other, wal = (tmp_path / "other").as_uri(), (tmp_path / "wal").as_uri()
    await joined(open_root(other, wal))
    data = (tmp_path / "data").as_uri()

    # When the first process of an instance is given either, then it makes no instance
    with pytest.raises(StoreUnavailable, match="making the folder of the WALs"):
        await joined(open_root(data, (tmp_path / "file/wal").as_uri()))
    with pytest.raises(OtherWalStore, match=r"of another instance, or .* an empty store"):
        await joined(open_root(data, wal))
    assert await InstanceRecords(open_root(data).objects).latest() is None

    # And the store that it is given then is the instance's
    named = await joined(open_root(data, right := (tmp_path / "right").as_uri()))
    assert named is not None
    assert named.url == right


async def test_a_process_joins_an_instance_that_another_one_makes_while_it_tries_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, wal = (tmp_path / "data").as_uri(), (tmp_path / "wal").as_uri()
    first, second = open_root(data, wal), open_root(data, wal)
    try_store = second.try_wal_store

    async def overtaken(named: WalStoreRecord) -> WalStore:
        await joined(first)
        return await try_store(named)

    monkeypatch.setattr(second, "try_wal_store", overtaken)

    assert await joined(second) == await joined(first)


async def test_where_databases_have_lost_their_record_no_process_makes_another(
    tmp_path: Path,
) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    await refuse_lost_instance(root)
    await join_instance(InstanceRecords(root.objects), [HOUR])
    await (await root.database("broker/0", Kind.BROKER)).close()
    await refuse_lost_instance(root)
    shutil.rmtree(tmp_path / "instance")

    with pytest.raises(LostInstance, match="restore the folder `instance/`") as refused:
        await refuse_lost_instance(root)

    assert cause_of(refused.value).code == EXIT_USAGE
    assert not (tmp_path / "instance").exists()


async def test_folders_without_a_file_of_a_database_are_none(tmp_path: Path) -> None:
    # Given a volume that is mounted where a shard will be, and one that has no file any more
    (tmp_path / "ingest" / "0" / "lost+found").mkdir(parents=True)
    (tmp_path / "broker" / "0" / "manifest").mkdir(parents=True)
    (tmp_path / "broker" / "0" / ".snapshot").write_bytes(b"")
    root = open_root(tmp_path.as_uri(), sync=False)

    await refuse_lost_instance(root)

    (tmp_path / "broker" / "0" / "manifest" / f"{1:020}.manifest").write_bytes(b"")
    with pytest.raises(LostInstance):
        await refuse_lost_instance(root)


async def test_a_record_with_settings_of_a_newer_version_is_not_guessed_at() -> None:
    records = InstanceRecords(memory())
    await records.create(InstanceRecord(1, 0, {"purge_grace_s": 1, "speed": 1}))

    with pytest.raises(OtherFormat, match="speed"):
        await join_instance(records, [])


@pytest.mark.parametrize(
    ("name", "value"), [("retention_s", -604_800), ("request_id_window_s", 200)]
)
async def test_a_record_with_a_setting_out_of_its_bounds_is_damaged(name: str, value: int) -> None:
    records = InstanceRecords(memory())
    await records.create(InstanceRecord(1, 0, {name: value}))

    with pytest.raises(CorruptRecord, match=rf"instance/0+1\.json: {name} .*, and is {value}"):
        await join_instance(records, [])


async def test_a_setting_that_an_older_record_lacks_is_at_its_default() -> None:
    records = InstanceRecords(memory())
    await records.create(InstanceRecord(1, 0, {"purge_grace_s": 1}))

    assert (await join_instance(records, [])).settings == InstanceSettings(purge_grace_s=1)


async def test_a_process_runs_with_the_latest_change() -> None:
    records = InstanceRecords(memory())
    await join_instance(records, [HOUR])
    settings = InstanceSettings(replay_window_s=86_400)
    await records.create(InstanceRecord(2, time.time_ns() // 1_000_000, asdict(settings)))

    assert await join_instance(records, [DAY]) == Instance(2, settings)
    with pytest.raises(Contradiction):
        await join_instance(records, [HOUR])


async def test_the_janitor_judges_by_the_settings_of_the_instance() -> None:
    # Given an instance with a window and a grace of its own
    root = open_root("memory:///")
    await join_instance(InstanceRecords(root.objects), [HOUR, GRACE])

    # When a janitor that states neither joins it, and begins a run
    config = load(JanitorConfig, "janitor", ["--root", "memory:///"], {})
    joined = await join_instance(InstanceRecords(root.objects), config.stated)
    process = JanitorProcess(replace(config, instance=joined.settings), Telemetry(), root)
    ask = RunRequest("unreferenced")
    task = process._task_of(Run("r", ask, Trigger.REQUEST, State.WAITING, 0, "p", 0))

    # Then the run removes by the instance's
    options = task["options"]
    assert (options["replay_window_s"], options["grace_s"]) == (3600, 5)
