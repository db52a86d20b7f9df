"""What a process finds of its stores and disks, for `slatemq doctor`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from libs.serving.examination import Examiner
from libs.serving.process.config import ServingConfig
from libs.serving.process.instance import join_instance
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.objects.instance_records import InstanceRecords, WalStoreRecord


@pytest.mark.parametrize("is_owner", [True, False])
async def test_a_store_of_the_wals_that_is_gone_is_found_and_stays_gone(
    tmp_path: Path, is_owner: bool
) -> None:
    # Given a process of an instance whose WALs are in another folder
    logs = tmp_path / "logs"
    root = open_root((tmp_path / "data").as_uri())
    wal_store = WalStoreRecord.new(logs.as_uri())
    await join_instance(InstanceRecords(root.objects), [], wal_store)
    database = await root.database("broker/0", Kind.BROKER)
    config = ServingConfig(root=root.url)
    examiner = Examiner(
        "broker-0", root, config, lambda: database if is_owner else None, lambda: None
    )
    assert (await examiner.examine()).wal_store_problem == ""

    # When that folder is gone
    shutil.move(logs, tmp_path / "away")

    # Then it is said of the store, and the folder stays away for what is mounted there
    found = await examiner.examine()
    assert found.wal_store == logs.as_uri()
    assert ("has no wal-store.json" if is_owner else "No such file") in found.wal_store_problem
    assert found.store_problem == ""
    assert found.disk_size_bytes > 0
    assert not logs.exists()
    shutil.move(tmp_path / "away", logs)
    await database.close()
