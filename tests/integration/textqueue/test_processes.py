"""One queue file, several processes, some of them killed: no message is lost, none done by two."""

import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from slatemq.textqueue import SplitQueue, State, TextQueue, reserve
from tests.forms import examples

REPOSITORY = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


class Starter:
    """Starts processes on one file, and ends those that are left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._all: list[subprocess.Popen[bytes]] = []

    def __call__(self, role: str, *arguments: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.textqueue.worker",
                role,
                str(self.path),
                *map(str, arguments),
            ],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self._all.append(process)
        return process

    def stop(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()

    def journal(self) -> list[tuple[str, str]]:
        lines = Path(f"{self.path}.journal").read_text().splitlines()
        return [(what, text) for what, _, text in (line.partition(" ") for line in lines)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    path = tmp_path / "jobs.tq"
    Path(f"{path}.working").mkdir()
    starter = Starter(path)
    yield starter
    starter.stop()


def ended(*processes: subprocess.Popen[bytes]) -> list[int]:
    return [process.wait(60) for process in processes]


def fill(path: Path, count: int) -> set[str]:
    texts = [f"message-{number}" for number in range(count)]
    variables = {"by": reserve(10), "mutex": reserve(6), "error": reserve(8)}
    TextQueue(path).append_all(texts, variables)
    return set(texts)


def test_each_message_is_worked_on_by_one_though_workers_are_killed(start: Starter) -> None:
    # Given messages, and workers that are killed at any moment and started again
    texts, chance = fill(start.path, 600), random.Random(5)
    workers = [start("work", number) for number in range(4)]
    for number in range(8):
        time.sleep(0.15)
        victim = chance.randrange(4)
        workers[victim].kill()
        workers[victim].wait()
        workers[victim] = start("work", f"again {number}")

    # When all has come to an end, with a last worker for what a killed one had
    assert ended(*workers) == [0] * 4
    assert ended(start("work", "last")) == [0]

    # Then every message is there, finished, and none was with two workers at a time
    queue = TextQueue(start.path)
    assert {entry.text for entry in queue.entries(State.PROCESSED, State.ERROR)} == texts
    assert list(queue) == []
    journal = start.journal()
    assert not [text for what, text in journal if what == "TWICE"]
    finished = Counter(text for what, text in journal if what in ("done", "failed"))
    assert set(finished.values()) == {1}
    # A kill between the mark and the line in the journal is the only way to lack a line
    assert len(texts) - len(finished) <= 8
    # And no mutex is left over
    assert Path(f"{start.path}.mutex").read_bytes().strip() == b""
    assert all(entry.get("error") == "E-1" for entry in queue.entries(State.ERROR))


def test_appending_and_compacting_meanwhile_loses_nothing(start: Starter) -> None:
    # Given writers, workers and compactions at the same time
    start.path.touch()
    writers = [start("write", f"w{number}", 150) for number in range(3)]
    others = [start("work", 1), start("work", 2), start("compact", 2)]

    assert ended(*writers, *others) == [0] * 6
    assert ended(start("work", 3)) == [0]

    # Then each was finished once, by one, and nothing had to be reported
    journal = start.journal()
    finished = Counter(text.split()[0] for what, text in journal if what in ("done", "failed"))
    assert finished == Counter(f"w{number}-{place}" for number in range(3) for place in range(150))
    assert {what for what, _ in journal} == {"done", "failed"}
    assert [entry.text[-3:] for entry in TextQueue(start.path)] == []


def test_readers_beside_writers_see_whole_messages_alone(start: Starter) -> None:
    start.path.touch()
    readers = [start("read", 450) for _ in range(2)]
    writers = [start("write", f"w{number}", 150) for number in range(3)]

    assert ended(*writers, *readers) == [0] * 5

    # And a writer's messages are in its order
    texts = [entry.text.split()[0] for entry in TextQueue(start.path)]
    for number in range(3):
        mine = [text for text in texts if text.startswith(f"w{number}-")]
        assert mine == [f"w{number}-{place}" for place in range(150)]


@pytest.mark.repeated
def test_ten_thousand_random_changes_by_several_processes_are_all_there(start: Starter) -> None:
    """The short form has a fifth of them."""
    # Given processes that mark, set and append at random, each its own part of one file
    texts = {f"message-{number}" for number in range(2000)}
    TextQueue(start.path).append_all(sorted(texts), {"by": "-" + reserve(9)})
    assert ended(*(start("change", part, 4, examples(2500)) for part in range(4))) == [0] * 4

    # Then the file is what all of them together made of it, byte for byte
    expected = {}
    for part in range(4):
        for line in Path(f"{start.path}.{part}.journal").read_text().splitlines():
            state, by, text = line.split()
            expected[text] = (state, by)
    entries = list(TextQueue(start.path, strict=True).entries(*State))
    assert {entry.text: (entry.state.value, entry.get("by")) for entry in entries} == expected
    assert len(entries) == len(expected) > 2000
    assert all(entry.variable("by").width == 10 for entry in entries)


def test_an_editor_that_rewrites_the_file_loses_nothing_silently(start: Starter) -> None:
    # Given workers, and an editor that replaces the file all the time without any lock
    texts = fill(start.path, 300)
    others = [start("edit", 4), *(start("work", number) for number in range(3))]

    assert ended(*others) == [0] * 4
    assert ended(start("work", "last")) == [0]

    # Then every message is still in the file, and was done by somebody; what a rewrite undid was
    # done again, or its worker was told
    queue, journal = TextQueue(start.path), start.journal()
    assert {entry.text for entry in queue.entries(State.PROCESSED, State.ERROR)} == texts
    assert list(queue) == []
    result = {what for what, _ in journal} - {"done", "failed"}
    assert result <= {"Rewritten", "ClaimLost", "AlreadyMarked"}
    assert {text for what, text in journal if what in ("done", "failed")} >= texts - {
        text for what, text in journal if what not in ("done", "failed")
    }


@pytest.mark.repeated
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["edit", "edit_in_place"])
def test_ten_thousand_edits_beside_an_editor_lose_no_message_silently(
    start: Starter, how: str
) -> None:
    """The short form has a fifth of them."""
    # Given processes that claim, mark, set and append at random, and an editor that saves the whole
    # file meanwhile, as it was before: by renaming, or in place
    start.path.write_bytes(b"# edited\n")
    texts = fill(start.path, 2000)
    editor = start(how, 3600)
    changing = [start("change_beside_editor", part, 4, examples(2500)) for part in range(4)]
    assert [process.wait(300) for process in changing] == [0] * 4
    # Not killed: in place it may have emptied the file just then
    Path(f"{start.path}.stop").touch()
    assert editor.wait(60) == 0

    # Then each message is there once, whole, with all its variables
    strict = how == "edit"  # in place, a change in the very moment of a save may leave a hole
    entries = list(TextQueue(start.path, strict=strict).entries(*State))
    messages = [entry for entry in entries if entry.state not in (State.COMMENT, State.UNKNOWN)]
    there = Counter(entry.text for entry in messages)
    assert texts <= set(there)
    assert set(there.values()) == {1}
    widths = {tuple((one.name, one.width) for one in entry.variables) for entry in messages}
    assert widths == {(("by", 10), ("mutex", 6), ("error", 8))}
    # And those that were appended are there as well, or have been told to be gone
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TextQueue(start.path).has_all_appends()
        # Whether a save came between an append and the next was chance; here one does
        older = start.path.read_bytes()
        TextQueue(start.path).append("late")
        start.path.write_bytes(older)
        assert not TextQueue(start.path).has_all_appends()
    journal = start.journal()
    gone = {text for what, text in journal if what == "gone"}
    gone |= {text for one in caught for _, text in getattr(one.message, "appends", ())}
    added = {text for what, text in journal if what == "appending"}
    assert added - set(there) <= gone
    assert gone - set(there) >= {"late"}
    # And those whose messages a rewrite had moved were told
    result = {what for what, _ in journal} - {"gone", "appending"}
    assert "Rewritten" in result or how == "edit_in_place"
    assert result <= {"done", "failed", "Rewritten", "ClaimLost", "AlreadyMarked"}


def test_one_file_for_each_writer_is_one_queue(start: Starter, tmp_path: Path) -> None:
    # Given writers, each with a file of its own
    starters = [Starter(tmp_path / f"jobs.{number}.tq") for number in range(3)]
    processes = [starter("write", f"w{number}", 50) for number, starter in enumerate(starters)]
    assert ended(*processes) == [0] * 3

    queue, texts = SplitQueue(tmp_path / "jobs.*.tq"), set[str]()
    while (claim := queue.claim()) is not None:
        with claim:
            texts.add(claim.text.split()[0])

    assert texts == {f"w{number}-{place}" for number in range(3) for place in range(50)}
