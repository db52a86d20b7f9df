"""An append that is killed half-way leaves no message that was cut short."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slatemq.textqueue import NoSuchEntry, State, TextQueue, render, reserve
from tests.forms import seeds
from tests.unit.textqueue.claims import as_a_reader, claims

KEPT = b"-kept\n\\error=        \n"

KILLED = render("first\nof two lines", {"error": reserve(4)}) + render("second", ["v=1"])

SECOND = KILLED.index(b"-second")

CALLS: list[Callable[[TextQueue], object]] = [
    list,
    TextQueue.claim,
    TextQueue.compact,
    TextQueue.has_all_appends,
    lambda queue: queue.append("next"),
]


def leave(path: Path, written: bytes, line: bytes | None = None) -> None:
    """What a writer leaves that was killed when so much of its append was there."""
    if not path.exists():
        path.write_bytes(KEPT)
        TextQueue(path).append("older")
    size = path.stat().st_size
    intent = {"first": size, "end": size + len(KILLED), "head": KILLED[:64].hex()}
    with Path(f"{path}.appended").open("ab") as log:
        log.write(b"~" + json.dumps(intent).encode() + b"\n" if line is None else line)
    with path.open("ab") as file:
        file.write(written)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("length", range(len(KILLED) + 1))
def test_what_was_written_to_its_end_stays_and_the_last_message_goes(
    path: Path, call: Callable[[TextQueue], object], length: int
) -> None:
    leave(path, KILLED[:length])

    call(TextQueue(path))

    texts = [entry.text for entry in TextQueue(path).entries(*State) if entry.text != "next"]
    whole = ["first\nof two lines"] if length > SECOND else []
    whole += ["second"] if length == len(KILLED) else []
    assert texts == ["kept", "older", *whole]
    # And nothing is cut off that comes later
    TextQueue(path).append("later")
    assert [entry.text for entry in TextQueue(path)][-1] == "later"
    assert TextQueue(path).has_all_appends()


@pytest.mark.parametrize(
    "line", [b"~", b'~{"first": 2', b"~{}\n", b'~{"first":1,"end":2,"head":"x"}\n']
)
def test_an_intent_that_was_not_written_to_its_end_means_that_nothing_was(
    path: Path, line: bytes
) -> None:
    leave(path, b"", line)

    assert claims(TextQueue(path)) == ["kept", "older"]

    assert b"~" not in Path(f"{path}.appended").read_bytes()


def test_what_a_person_has_put_there_is_not_cut_off(path: Path) -> None:
    # Given a writer that was killed before it wrote anything, and a person who wrote since
    leave(path, b"-a line of mine")

    assert claims(TextQueue(path)) == ["kept", "older", "a line of mine"]


def test_a_reader_that_does_not_wait_leaves_the_last_entry_out(path: Path) -> None:
    leave(path, KILLED[: SECOND + 4])

    texts = [entry.text for entry in TextQueue(path).entries(hold_back=True)]

    assert texts == ["kept", "older", "first\nof two lines"]


@pytest.mark.parametrize("hold_back", [False, True])
@pytest.mark.parametrize("length", [1, SECOND - 3, SECOND, SECOND + 4])
def test_a_reader_in_the_midst_of_the_file_gets_no_half_message(
    path: Path, hold_back: bool, length: int
) -> None:
    # Given a reader that has begun, and then a writer that is killed
    path.write_bytes(KEPT)
    queue = TextQueue(path)
    queue.append("older")
    reader = queue.entries(hold_back=hold_back)
    assert next(reader).text == "kept"
    leave(path, KILLED[:length])

    # Then the rest has what is whole
    whole = ["first\nof two lines"] if length > SECOND else []
    assert [entry.text for entry in reader] == ["older", *whole]


def test_a_reader_without_a_lock_does_not_go_on_in_another_message(path: Path) -> None:
    # Given a reader that has come to a message which a killed writer has begun
    leave(path, KILLED[: SECOND + 4])
    reader = TextQueue(path).entries(hold_back=True)
    assert next(reader).text == "kept"

    # When that is taken out, and others come in its place
    for number in range(9):
        TextQueue(path).append(f"another {number}", state=State.COMMENT)

    # Then there is no message made of two
    assert [entry.text for entry in reader] == ["older", "first\nof two lines"]


def test_an_entry_that_was_not_finished_cannot_be_had_by_its_place(path: Path) -> None:
    leave(path, KILLED[: SECOND + 4])

    with pytest.raises(NoSuchEntry):
        TextQueue(path).entry(path.stat().st_size - 4)


def test_who_may_only_read_gets_no_half_message_and_takes_nothing_out() -> None:
    # Given what a killed writer left, in files that are someone else's: both, or one of them
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "jobs.tq")
        leave(path, KILLED[: SECOND + 4])
        content, listed = path.read_bytes(), Path(f"{path}.appended")
        for theirs in ([path], [listed], [path, listed]):
            for file in (path, listed):
                file.chmod(0o444 if file in theirs else 0o666)
            with as_a_reader(*theirs):
                queue = TextQueue(path)

                # Then it reads what is whole, and looks whether all is there, as often as it likes
                for _ in range(2):
                    texts = [entry.text for entry in queue]
                    assert texts == ["kept", "older", "first\nof two lines"]
                    assert queue.has_all_appends()

            # And the owner finds it as it was
            assert path.read_bytes() == content
            assert b"~" in listed.read_bytes()


def test_nothing_of_linux_alone_is_asked_for_to_take_it_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a system without a folder of a process's open files
    def without(name: str | int, length: int) -> None:
        assert not str(name).startswith("/proc")
        truncate(name, length)

    truncate = os.truncate
    monkeypatch.setattr(os, "truncate", without)
    leave(path, KILLED[:4])

    assert [entry.text for entry in TextQueue(path)] == ["kept", "older"]

    assert path.read_bytes().endswith(b"-older\n")


WRITER = """
import sys
from slatemq.textqueue import TextQueue
queue, text = TextQueue(sys.argv[1]), "x" * 4_000_000 + "end"
print(flush=True)
while True:
    queue.append(text)
"""


@pytest.mark.slow  # a process and some megabytes each time
@pytest.mark.parametrize("_number", seeds(10))
def test_no_killed_writer_leaves_half_a_message(path: Path, _number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while not path.exists() or path.stat().st_size < 40_000_000:
            pass
        writer.kill()

    assert {entry.text[-3:] for entry in TextQueue(path)} == {"end"}
