"""What an edit of archived letters notes in its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slatemq._admin.entry_models import Archived, Entry, EntryState
from slatemq._admin.settling import ArchivedOutcome, DropDeadLetter, RedriveDeadLetter
from slatemq.cli.files.queue_files import Content
from slatemq.cli.repair.archive_settling import ArchiveSettler
from slatemq.cli.repair.dead_letter_plans import PlannedSettlement
from slatemq.client import Client
from slatemq.textqueue import TextQueue

HANDLE = "orders/1/f2"


def drop(file: Path, offset: int, handle: str = HANDLE) -> PlannedSettlement:
    content = Content(b"", {}, handle=handle)
    return PlannedSettlement(str(file), offset, 1, content, (), DropDeadLetter(handle))


@pytest.fixture
def settler() -> ArchiveSettler:
    return ArchiveSettler(Client("127.0.0.1:1"), "ann")


def test_what_was_done_is_noted_under_the_dead_letter_alone(
    tmp_path: Path, settler: ArchiveSettler
) -> None:
    file = tmp_path / "a.tq"
    variables = [f"handle={HANDLE}", "settled=no"]
    entries = [TextQueue(file).append(text, variables) for text in ("one", "two")]

    settler._report(drop(file, entries[1].offset), None)
    settler._report(drop(file, entries[0].offset), "it is past its retention")
    settler._report(drop(file, entries[0].offset, "orders/1/other"), None)

    assert [one.get("settled") for one in TextQueue(file)] == ["no", "ok"]
    assert settler.counts == {"drop": 2, "conflict": 1}


def test_what_is_under_way_is_noted_until_there_is_an_answer(
    tmp_path: Path, settler: ArchiveSettler
) -> None:
    # Given letters of which a call is under way
    file = tmp_path / "a.tq"
    entries = [
        TextQueue(file).append("letter", [f"handle={HANDLE}", f"settled={settled}"])
        for settled in ("no", "no", "no", "..")
    ]
    sent = [drop(file, entry.offset) for entry in entries]
    sent[3] = replace(sent[3], content=Content(b"", {}, handle=HANDLE, settled=".."))
    settler._sent(sent)
    assert [one.get("settled") for one in TextQueue(file)] == [".."] * 4

    # When it is answered
    gone = ArchivedOutcome.GONE
    settler._answered(sent, [ArchivedOutcome.DONE, gone, ArchivedOutcome.EXPIRED, gone])

    # Then what was not done is noted so, but for what an earlier run had under way
    assert [one.get("settled") for one in TextQueue(file)] == ["ok", "no", "no", "ok"]
    assert settler.counts == {"drop": 1, "conflict": 2, "already": 1}


def test_a_file_that_cannot_be_noted_in_is_reported_once(
    tmp_path: Path, settler: ArchiveSettler, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        settler._report(drop(tmp_path / "gone.tq", 0), None)

    assert capfd.readouterr().err.count("cannot be noted in") == 1
    assert settler.counts == {"drop": 3}


async def test_content_that_cannot_be_sent_fails_its_dead_letter_alone(
    tmp_path: Path, settler: ArchiveSettler, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.tq"
    offset = TextQueue(file).append("one", [f"handle={HANDLE}", "settled=no"]).offset
    entry = Entry(HANDLE, "orders", 1, EntryState.ARCHIVED, archived=Archived("run", 1, 1))
    content = Content(b"one", {"a": "\ud800"}, handle=HANDLE)
    step = PlannedSettlement(
        str(file), offset, 1, content, (), RedriveDeadLetter(HANDLE), now=entry
    )

    await settler._bring_back([step])

    assert (
        "line 1, message without an ID: not done: dead_letters[0].headers" in capfd.readouterr().err
    )
    assert settler.counts == {"conflict": 1}
