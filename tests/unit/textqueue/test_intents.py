"""An append that is killed half-way leaves no message that was cut short."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slatemq.textqueue import State, TextQueue, render, reserve
from tests.unit.textqueue.claims import claims

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


WRITER = """
import sys
from slatemq.textqueue import TextQueue
queue, text = TextQueue(sys.argv[1]), "x" * 4_000_000 + "end"
print(flush=True)
while True:
    queue.append(text)
"""


@pytest.mark.slow  # a process and some megabytes each time
def test_no_killed_writer_leaves_half_a_message(path: Path) -> None:
    for _ in range(10):
        path.unlink(missing_ok=True)
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
