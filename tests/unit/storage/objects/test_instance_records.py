"""The records of the instance's settings: made once, changed one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import CorruptRecord, StoreUnavailable
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords, WalStoreRecord
from libs.storage.objects.small_objects import Objects

FIRST = InstanceRecord(1, 1_767_225_600_000, {"replay_window_s": 60, "purge_grace_s": 0})
SECOND = FIRST._replace(number=2, settings={"replay_window_s": 90, "purge_grace_s": 0})
PATH = "instance/00000000000000000001.json"


@pytest.fixture(params=["memory", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return open_root("memory:///" if request.param == "memory" else tmp_path.as_uri()).objects


async def test_the_record_of_the_highest_number_holds(objects: Objects) -> None:
    records = InstanceRecords(objects)
    assert await records.latest() is None

    assert await records.create(FIRST)
    assert await records.create(SECOND)

    assert await records.latest() == SECOND


async def test_of_two_writers_of_a_number_one_writes_even_the_same_settings(
    objects: Objects,
) -> None:
    one, other = InstanceRecords(objects), InstanceRecords(objects)

    assert await one.create(FIRST)
    assert not await other.create(FIRST)
    assert not await other.create(FIRST._replace(settings={"replay_window_s": 1}))

    assert await other.latest() == FIRST


async def test_the_record_is_json_that_people_can_read(objects: Objects) -> None:
    await InstanceRecords(objects).create(FIRST)

    content = json.loads(await objects.get(PATH))
    assert len(content.pop("nonce")) == 16
    assert content == {
        "number": 1,
        "written_at_ms": 1_767_225_600_000,
        "settings": {"replay_window_s": 60, "purge_grace_s": 0},
        "wal_store": None,
    }


async def test_the_store_of_the_logs_is_in_the_record(objects: Objects) -> None:
    record = FIRST._replace(wal_store=WalStoreRecord("s3://fast?region=us-east-1", "5d"))
    await InstanceRecords(objects).create(record)

    content = json.loads(await objects.get(PATH))
    assert content["wal_store"] == {"url": "s3://fast?region=us-east-1", "id": "5d"}
    assert await InstanceRecords(objects).latest() == record


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"number": 1, "written_at_ms": 0, "settings": {}}',
        b'{"number": 2, "written_at_ms": 0, "settings": {}, "wal_store": null}',
        b'{"number": 1, "written_at_ms": 0, "settings": {"retention_s": "60"}, "wal_store": null}',
        b'{"number": 1, "written_at_ms": 0, "settings": {"retention_s": true}, "wal_store": null}',
        b'{"number": 1, "written_at_ms": 0, "settings": [1], "wal_store": null}',
        b'{"number": 1, "written_at_ms": 0, "settings": {}, "wal_store": "file:///x"}',
        b'{"number": 1, "written_at_ms": 0, "settings": {}, "wal_store": {"url": 1, "id": "2"}}',
    ],
)
async def test_a_damaged_record_is_named_and_not_guessed_at(objects: Objects, data: bytes) -> None:
    await objects.put(PATH, data)

    with pytest.raises(CorruptRecord, match=PATH):
        await InstanceRecords(objects).latest()


async def test_of_a_damaged_record_only_the_place_of_the_damage_is_said(objects: Objects) -> None:
    await InstanceRecords(objects).create(FIRST)
    stored = await objects.get(PATH)
    await objects.put(PATH, stored[:40] + b"\xf3" + stored[41:])

    with pytest.raises(CorruptRecord, match="byte 0xf3 in position 40") as raised:
        await InstanceRecords(objects).latest()
    assert "replay_window_s" not in str(raised.value)


async def test_a_store_that_is_down_is_not_an_instance_without_a_record(tmp_path: Path) -> None:
    records = InstanceRecords(open_root(tmp_path.as_uri()).objects)
    (tmp_path / "instance").write_bytes(b"a file where the folder should be")

    with pytest.raises(StoreUnavailable):
        await records.create(FIRST)
