"""Verification of archived dead letters: what a broker lists has its content in the archive."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from libs.storage.database.roots import open_root
from services.janitor.archive_paths import ARCHIVE_FOLDER
from services.janitor.verify import archive
from services.janitor.verify.archive import ArchiveCheck
from services.janitor.verify.brokers import ArchivedMessages, DayOfArchive
from services.janitor.verify.findings import Finding, Findings, Kind

DAY = 20_000
"""2024-10-04."""

IDS = (7, 9)
FAILED_MS = DAY * 86_400_000 + 5


def part_with(*message_ids: int, failed_ms: int = FAILED_MS, group_rows: int = 1_000) -> bytes:
    table = pa.table(
        {
            "message_id": pa.array(message_ids, pa.int64()),
            "failed_at": pa.array([failed_ms * 1000] * len(message_ids), pa.timestamp("us", "UTC")),
            "payload": pa.array([b"the content"] * len(message_ids)),
        }
    )
    out = io.BytesIO()
    pq.write_table(
        table, out, row_group_size=group_rows, compression="none", write_page_checksum=True
    )
    return out.getvalue()


class Archive:
    """Of one queue and day, with the dead letters IDS."""

    def __init__(self, folder: Path) -> None:
        self.root = open_root(folder.as_uri(), sync=False)
        self.folder = folder / ARCHIVE_FOLDER / "queue=orders" / "day=2024-10-04"
        self.folder.mkdir(parents=True)
        (self.folder / "part-000001.parquet").write_bytes(part_with(*IDS))
        self.day = DayOfArchive()
        self.add(*IDS)
        self.reported: list[str] = []

    def add(self, *message_ids: int, failed_ms: int = FAILED_MS) -> None:
        """Have the broker list dead letters."""
        self.day.message_ids.extend(message_ids)
        self.day.failed_ms.extend([failed_ms] * len(message_ids))

    async def found(self, *, sizes_only: bool = False) -> list[Finding]:
        async def check_store() -> None:
            """It is well."""

        findings = Findings()
        check = ArchiveCheck(self.root, findings, check_store, sizes_only, self.reported.append)
        await check.check("broker/0", ArchivedMessages("orders", {DAY: self.day}))
        return findings.all()


@pytest.fixture
def archived(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


NOWHERE: list[Any] = [(), ("no-such-package",)]
"""With pyarrow, and without it."""


@pytest.mark.parametrize("lacking", NOWHERE)
async def test_archived_dead_letters_that_have_their_content_are_no_fault(
    archived: Archive, lacking: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "NEEDED", (*archive.NEEDED, *lacking))
    assert await archived.found() == []


@pytest.mark.parametrize("lacking", NOWHERE)
async def test_a_day_of_the_archive_that_is_gone_is_named_with_its_messages(
    archived: Archive, lacking: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "NEEDED", (*archive.NEEDED, *lacking))
    (archived.folder / "part-000001.parquet").unlink()

    [fault] = await archived.found()
    assert (fault.kind, fault.queue_id, fault.message_ids) == (Kind.OBJECT, "orders", IDS)
    assert "day=2024-10-04 has no content of 2 archived dead letters: 7, 9" in fault.wrong


@pytest.mark.parametrize("lacking", NOWHERE)
async def test_a_part_that_was_cut_is_named(
    archived: Archive, lacking: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "NEEDED", (*archive.NEEDED, *lacking))
    part = archived.folder / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-1])

    assert any("part-000001.parquet is damaged" in one.wrong for one in await archived.found())


async def test_a_dead_letter_that_no_part_has_is_named(archived: Archive) -> None:
    (archived.folder / "part-000001.parquet").write_bytes(part_with(7, 8))
    (archived.folder / "part-000002.parquet").write_bytes(part_with())

    [fault] = await archived.found()
    assert fault.message_ids == (9,)


async def test_content_that_has_rotted_is_found_by_its_checksum(archived: Archive) -> None:
    part = archived.folder / "part-000001.parquet"
    part.write_bytes(part.read_bytes().replace(b"the content", b"the CONTENT"))

    faults = await archived.found()
    assert any("part-000001.parquet is damaged" in one.wrong for one in faults)
    assert await archived.found(sizes_only=True) == []


async def test_a_part_whose_read_failed_once_is_no_fault(
    archived: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = archived.root.objects.open
    failures = [OSError("the connection was closed")]

    def open_later(path: str) -> Any:
        if failures:
            raise failures.pop()
        return opened(path)

    monkeypatch.setattr(archived.root.objects, "open", open_later)

    assert await archived.found() == []
    assert failures == []


async def test_each_failure_of_a_message_is_a_dead_letter_of_its_own(archived: Archive) -> None:
    later_ms = FAILED_MS + 1_000
    archived.add(9, 7, failed_ms=later_ms)
    archived.add(7, failed_ms=later_ms + 1)
    archived.add(8)
    (archived.folder / "part-000002.parquet").write_bytes(part_with(7, 8, failed_ms=later_ms))

    [fault] = await archived.found()
    assert fault.message_ids == (7, 8, 9)


async def test_a_million_dead_letters_in_a_thousand_row_groups_are_compared(
    archived: Archive,
) -> None:
    # What sorts all of them for each group takes longer than any test may.
    ids = np.random.default_rng(0).permutation(np.arange(10, 1_000_000))
    archived.day.message_ids.frombytes(ids.tobytes())
    archived.day.failed_ms.frombytes(np.full(len(ids), FAILED_MS).tobytes())
    part = part_with(*IDS, *range(10, 1_000_000, 10), group_rows=100)
    (archived.folder / "part-000001.parquet").write_bytes(part)

    [fault] = await archived.found(sizes_only=True)
    assert "has no content of 899991 archived dead letters" in fault.wrong


async def test_each_part_is_reported_so_that_a_run_can_end_there(archived: Archive) -> None:
    for number in (2, 3):
        (archived.folder / f"part-00000{number}.parquet").write_bytes(part_with())

    assert await archived.found() == []
    names = [path.rpartition("/")[2] for path in archived.reported]
    assert names == [f"part-00000{number}.parquet" for number in (1, 2, 3)]
