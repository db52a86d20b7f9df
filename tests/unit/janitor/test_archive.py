"""The archive of dead letters: no letter twice, whoever is killed when, and however many write."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from services.janitor.archive_paths import ARCHIVE_FOLDER, EMPTY_BYTES, day_path
from services.janitor.jobs import archive
from services.janitor.jobs.archive import DEAD_LETTERS, DayFolder, emptied_parts

DAY = date(2026, 1, 2)
AT = datetime(2026, 1, 2, tzinfo=UTC)
DAY_MS = 24 * 3600 * 1000

T = TypeVar("T")


class Killed(BaseException):
    """The process ends here."""


class Waits:
    """Waits, until it is killed: after this many changes of the store."""

    def __init__(self, lives: int = 1_000_000) -> None:
        self.lives = lives

    def run(self, work: Awaitable[T]) -> T:
        async def waited() -> T:
            return await work

        name = getattr(work, "__name__", "")
        done = asyncio.run(waited())
        if name in ("put", "put_if_absent", "delete"):
            self.lives -= 1
            if self.lives == 0:
                raise Killed
        return done


def dead_letters(
    *ids: int, payload: bytes = b"x", headers: Sequence[tuple[str, str]] | None = None
) -> pa.Table:
    rows: list[dict[str, Any]] = [
        {
            "message_id": one,
            "failed_at": AT,
            "broker_shard": 0,
            "created_revision": 1,
            "attempts": 1,
            "priority": 128,
            "reason": "boom",
            "headers": [("n", str(one))] if headers is None else headers,
            "history": [{"attempt": 1, "consumer": "worker", "outcome": "nack: boom"}],
            "payload_bytes": len(payload),
            "payload": payload,
            "run": "run",
        }
        for one in ids
    ]
    return pa.Table.from_pylist(rows, schema=DEAD_LETTERS)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return open_root(tmp_path.as_uri(), sync=False).objects


def test_a_queue_with_the_longest_name_has_a_folder_of_its_own_on_every_file_system(
    objects: Objects,
) -> None:
    for name in ("x" * 255, "x" * 254 + "y"):
        folder = DayFolder(Waits(), objects, name, DAY)
        folder.add(dead_letters(1))

        assert folder.added == [f"{folder.path}/part-000001.parquet"]
    assert day_path("x" * 240, DAY) == f"{ARCHIVE_FOLDER}/queue={'x' * 240}/day=2026-01-02"


def folder_of(objects: Objects, waits: Waits | None = None) -> DayFolder:
    return DayFolder(waits or Waits(), objects, "orders", DAY)


def archived(folder: Path) -> list[int]:
    """What any reader of Parquet finds."""
    table = pq.read_table(folder / ARCHIVE_FOLDER, partitioning="hive")
    return sorted(table["message_id"].to_pylist())


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ARCHIVE_FOLDER).rglob("*.parquet"))


def test_a_dead_letter_is_read_back_as_it_was_with_queue_and_day_from_its_place(
    objects: Objects, tmp_path: Path
) -> None:
    folder_of(objects).add(dead_letters(7, payload=b"\x00payload"))

    (row,) = pq.read_table(tmp_path / ARCHIVE_FOLDER, partitioning="hive").to_pylist()
    (again,) = folder_of(objects).rows_of(dead_letters(7), ("payload", "headers"))

    assert (row["queue"], row["day"]) == ("orders", DAY.isoformat())
    assert (row["message_id"], row["failed_at"], row["payload"]) == (7, AT, b"\x00payload")
    assert row["headers"] == [("n", "7")]
    assert row["history"][0]["outcome"] == "nack: boom"
    assert again.to_pylist() == [{name: row[name] for name in again.column_names}]


def test_what_is_there_is_not_added_again(objects: Objects, tmp_path: Path) -> None:
    folder_of(objects).add(dead_letters(1, 2, 3))
    again = folder_of(objects)

    assert again.missing(dead_letters(2, 3, 4))["message_id"].to_pylist() == [4]
    again.add(dead_letters(2, 3, 4))
    again.add(dead_letters(1, 2))

    assert archived(tmp_path) == [1, 2, 3, 4]


def sizes_of_parts(folder: Path) -> list[int]:
    """Of those that have dead letters, as they are in memory."""
    tables = [pq.read_table(path) for path in (folder / ARCHIVE_FOLDER).rglob("*.parquet")]
    return [table.nbytes for table in tables if table.num_rows]


@pytest.mark.parametrize("alike", [False, True])
def test_small_parts_are_put_together_and_large_ones_are_left(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """Also of dead letters that are alike, whose files are far smaller than what they have."""
    monkeypatch.setattr(archive, "SMALL_BYTES", 30_000)
    noise = random.Random(0)

    sizes = []
    for number in range(16):
        payload = b"x" * 7500 if alike else noise.randbytes(7500)
        folder_of(objects).add(dead_letters(number, payload=payload))
        sizes.append(sizes_of_parts(tmp_path))

    assert archived(tmp_path) == list(range(16))
    assert all(sum(size < 30_000 for size in some) <= 1 for some in sizes)
    assert max(map(max, sizes)) < 40_000
    assert 3 < len(sizes[-1]) < 6


def test_who_looked_before_another_added_looks_again(objects: Objects, tmp_path: Path) -> None:
    first, second, third = (folder_of(objects) for _ in range(3))

    first.add(dead_letters(1, 2))
    second.add(dead_letters(2, 3))  # absorbs the part of the first
    third.add(dead_letters(1, 3, 4))  # looked before both: 1 and 2 are taken

    assert archived(tmp_path) == [1, 2, 3, 4]


def test_an_emptied_part_keeps_its_number_for_a_day(objects: Objects, tmp_path: Path) -> None:
    late = folder_of(objects)
    for number in range(4):
        folder_of(objects).add(dead_letters(number))
    emptied = [f"{late.path}/part-00000{number}.parquet" for number in (1, 2, 3)]

    late.add(dead_letters(0, 9))

    assert archived(tmp_path) == [0, 1, 2, 3, 9]
    emptied.append(f"{late.path}/part-000004.parquet")
    before_ms = int(time.time() * 1000)
    assert asyncio.run(emptied_parts(objects, before_ms - DAY_MS)) == []
    found = asyncio.run(emptied_parts(objects, before_ms + DAY_MS))
    assert [info.path for info in found] == emptied


def test_parts_that_were_emptied_are_found_in_the_folders_of_all_queues_and_days(
    objects: Objects, tmp_path: Path
) -> None:
    folders = [DayFolder(Waits(), objects, queue, DAY) for queue in ("orders", "x" * 255)]
    for folder in folders:
        folder.add(dead_letters(1))
        folder.add(dead_letters(2))
    (tmp_path / folders[0].path / "part-000003.parquet").write_bytes(b"damaged")
    (tmp_path / ARCHIVE_FOLDER / "a note").write_bytes(b"")

    found = asyncio.run(emptied_parts(objects, int(time.time() * 1000) + DAY_MS))

    assert [info.path for info in found] == [f"{one.path}/part-000001.parquet" for one in folders]


def test_a_part_of_one_dead_letter_is_larger_than_an_empty_one(
    objects: Objects, tmp_path: Path
) -> None:
    letter = dead_letters(1, payload=b"", headers=[])
    for column in ("reason", "run"):
        place = letter.column_names.index(column)
        letter = letter.set_column(place, DEAD_LETTERS.field(column), pa.array([""]))
    folder = folder_of(objects)
    folder.add(letter)
    (part,) = (tmp_path / folder.path).iterdir()
    one_bytes = part.stat().st_size
    folder.add(dead_letters(2))

    assert part.stat().st_size < EMPTY_BYTES < one_bytes


@pytest.mark.parametrize("lives", range(1, 9))
def test_who_is_killed_leaves_nothing_that_the_next_run_does_not_make_good(
    objects: Objects, tmp_path: Path, lives: int
) -> None:
    def work(waits: Waits) -> None:
        for ids in ((1, 2), (2, 3), (4, 5), (1, 6)):
            folder_of(objects, waits).add(dead_letters(*ids))

    killed = _is_killed(lambda: work(Waits(lives)))
    work(Waits())

    assert archived(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert killed == (lives <= 7)  # four parts are added, three are emptied


def _is_killed(work: Callable[[], None]) -> bool:
    try:
        work()
    except Killed:
        return True
    return False


# --- Parts that are damaged -------------------------------------------------

CONTENT, ROTTEN = b"the content", b"the CONTENT"


def put_damaged(folder: Path, *ids: int, number: int = 1, group_rows: int = 100) -> Path:
    """A part in which a payload has other bytes than those that were written."""
    path = folder / day_path("orders", DAY) / f"part-{number:06}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = dead_letters(*ids, payload=CONTENT).replace_schema_metadata({"slatemq.bytes": "1000"})
    pq.write_table(
        table, path, row_group_size=group_rows, compression="none", write_page_checksum=True
    )
    whole = path.read_bytes()
    assert CONTENT in whole
    path.write_bytes(whole.replace(CONTENT, ROTTEN))
    return path


def test_a_damaged_part_is_not_absorbed_and_what_is_new_is_archived_beside_it(
    objects: Objects, tmp_path: Path
) -> None:
    part = put_damaged(tmp_path, 1, 2)
    before = part.read_bytes()
    folder = folder_of(objects)

    folder.add(dead_letters(3))
    folder.add(dead_letters(4))

    assert part.read_bytes() == before
    (path, why) = folder.damaged.popitem()
    assert tmp_path / path == part
    assert "checksum" in why
    newest = max((tmp_path / ARCHIVE_FOLDER).rglob("*.parquet"))
    assert pq.read_table(newest)["message_id"].to_pylist() == [3, 4]


def test_a_part_that_is_no_parquet_any_more_keeps_its_place_and_stops_nothing(
    objects: Objects, tmp_path: Path
) -> None:
    folder_of(objects).add(dead_letters(1))
    (part,) = (tmp_path / ARCHIVE_FOLDER).rglob("*.parquet")
    part.write_bytes(part.read_bytes()[:-1])
    longer = time.time() - 2 * 24 * 3600
    os.utime(part, (longer, longer))

    for number in (2, 3):
        folder = folder_of(objects)
        folder.add(dead_letters(number))
        assert [tmp_path / path for path in folder.damaged] == [part]

    assert part.exists()
    assert parts(tmp_path) == [f"part-00000{number}.parquet" for number in (1, 2, 3)]
    rows = folder_of(objects).rows_of(dead_letters(1, 2, 3), ("payload",))
    assert [one for table in rows for one in table["message_id"].to_pylist()] == [2, 3]


def test_damaged_content_is_not_read_back_and_the_rest_is(objects: Objects, tmp_path: Path) -> None:
    # Given a part whose first row group is damaged, and another one
    part = put_damaged(tmp_path, 1, 2, 3, group_rows=1)
    whole = part.read_bytes()
    part.write_bytes(whole.replace(ROTTEN, CONTENT).replace(CONTENT, ROTTEN, 1))
    folder_of(objects).add(dead_letters(4, payload=CONTENT))
    folder = folder_of(objects)

    rows = [
        row
        for table in folder.rows_of(dead_letters(*range(6)), ("payload",))
        for row in table.to_pylist()
    ]

    assert sorted(row["message_id"] for row in rows) == [2, 3, 4]
    assert all(row["payload"] == CONTENT for row in rows)
    assert [tmp_path / path for path in folder.damaged] == [part]


def test_what_only_a_damaged_part_has_is_archived_again(objects: Objects, tmp_path: Path) -> None:
    put_damaged(tmp_path, 1, 2)
    folder = folder_of(objects)
    assert folder.missing(dead_letters(1))["message_id"].to_pylist() == []

    folder.add(dead_letters(3))

    assert folder.missing(dead_letters(1))["message_id"].to_pylist() == [1]
    folder.add(dead_letters(1, payload=CONTENT))
    (rows,) = folder.rows_of(dead_letters(1), ("payload",))
    assert rows["payload"].to_pylist() == [CONTENT]
