"""Files of a store that rot: what is damaged is named, and never served as good."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.errors import DamagedStore
from tests.faults.rot import (
    FOLDERS,
    LOST_FOLDERS,
    Damage,
    Outcome,
    damage_of,
    files_of,
    fill,
    run_rot,
    suffer,
)
from tests.faults.verified import faults_of

WAYS = ("flip", "cut", "empty", "delete", "exchange")


def test_each_kind_of_file_that_is_damaged_in_each_way_is_named_and_not_served(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    stored = asyncio.run(fill(store))
    assert faults_of((store / "data").as_uri()) == []
    chance = random.Random(1)
    files = files_of(store / "data")
    outcomes: list[Outcome] = []
    for folder in FOLDERS:
        # The newest: of the WAL those before are in tables already.
        names = files[folder][-1:] if folder != "wal" else files[folder][-3:-2]
        for what in WAYS:
            damage = damage_of(store / "data", names[0], what, chance)
            outcomes.append(asyncio.run(suffer(store, stored, damage)))

    lost = [asyncio.run(suffer(store, stored, Damage(path, "lose"))) for path in LOST_FOLDERS]

    assert [fault for outcome in outcomes + lost for fault in outcome.faults] == []
    assert [outcome.word for outcome in lost] == ["refused, named"] * len(lost)
    # A manifest has no checksum: what an owner cannot notice there is named all the same.
    flipped = [one for one in outcomes if one.damage.what == "flip" and not one.silent]
    assert len(flipped) == len(FOLDERS) - 1
    assert all(one.refused or one.is_harmless for one in flipped)


def test_an_owner_does_not_start_while_a_file_of_its_wal_is_missing(tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path))
    data = tmp_path / "data"
    files = [path for path in files_of(data)["wal"] if path.startswith("broker/")]
    needed = files[-2]
    (data / needed).unlink()

    root = open_root(data.as_uri(), sync=False)
    with pytest.raises(DamagedStore, match=needed):
        asyncio.run(root.database("broker/0", Kind.BROKER))
    (data / needed).write_bytes(b"")  # gives up its commits
    asyncio.run(_open(data))


async def _open(data: Path) -> None:
    database = await open_root(data.as_uri(), sync=False).database("broker/0", Kind.BROKER)
    await database.close()


@pytest.mark.proof
def test_damage_of_any_file_of_a_store_is_named_and_not_served(tmp_path: Path) -> None:
    assert run_rot(tmp_path, rounds=400, seed=1) == []
