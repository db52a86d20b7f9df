"""A large file: read, claimed from and compacted in memory that does not grow with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slatemq.textqueue import TextQueue
from tests.forms import examples

REPOSITORY = Path(__file__).resolve().parents[3]

FILE_BYTES = examples(256) << 20

GROWTH_BYTES_MAX = 24 << 20

PROGRAM = """
import resource, sys
from collections import Counter
from slatemq.textqueue import State, TextQueue

def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

queue = TextQueue(sys.argv[1])
before = peak()
counts = Counter(entry.state for entry in queue.entries(*State))
claim = queue.claim()
assert claim is not None and claim.text == "the last"
claim.done()
compacted = queue.compact()
print(counts[State.PROCESSED], compacted.removed_count, peak() - before)
"""


@pytest.mark.repeated
@pytest.mark.slow  # writes and reads a quarter of a gigabyte, in short a fifth of it
def test_a_large_file_takes_constant_memory(tmp_path: Path) -> None:
    # Given a file of many processed messages, and one that is queued at its end
    path = tmp_path / "large.tq"
    block = b"=" + b"x" * 1000 + b"\n and more\n\\by=worker 1   \n"
    blocks = b"#" + b"y" * 500 + b"\n" + block * 1000
    count = FILE_BYTES // len(blocks)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(blocks)
        file.write(b"-the last\n")

    # When another process reads all of it, claims, and compacts
    out = subprocess.check_output(
        [sys.executable, "-c", PROGRAM, str(path)], cwd=REPOSITORY, text=True
    )

    # Then it saw all, and its memory has hardly grown
    seen, removed, growth = map(int, out.split())
    assert (seen, removed) == (count * 1000, count * 1000 + 1)
    assert growth < GROWTH_BYTES_MAX
    assert path.stat().st_size == count * 502


def test_claiming_reads_no_more_than_a_few_long_messages_ahead(tmp_path: Path) -> None:
    # Given many long messages
    path = tmp_path / "long.tq"
    TextQueue(path).append_all(str(number) + "x" * (1 << 20) for number in range(96))

    # When a process claims and finishes some of them
    program = """
import resource, sys
from slatemq.textqueue import TextQueue
queue = TextQueue(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(5):
    queue.claim().done()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = subprocess.check_output([sys.executable, "-c", program, str(path)], cwd=REPOSITORY)

    # Then it had a few in memory
    assert int(grown) < 32 << 10


LONG_BYTES = 12 << 20

os_pread = os.pread

PEAK = """
import re, sys
from pathlib import Path
from slatemq.cli import app
from slatemq.cli.tq import commands as textqueue
from slatemq.textqueue import TextQueue

def run(*words):
    try:
        app.slatemq(["tq", words[0], sys.argv[1], *words[1:]])
    except SystemExit as end:
        assert not end.code, end

def peak() -> int:
    # Of this program alone: ru_maxrss may be that of the process that started it
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

queue = TextQueue(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = peak()
{call}
print(peak() - before, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("list(queue)", 2),
        ("queue.entry(0).text", 3),
        ("list(queue.texts())", 3),
        ("queue.claim().text", 4),
        ("run('ls'); run('next')", 3),
        ("run('ls', '--json'); run('next', '--json'); run('next', '--claim', '--json')", 4),
        ("queue.append('{text}' * ({size} // len('{text}')))", 4),
    ],
    ids=["counted", "read", "texts", "claimed", "shown", "as JSON", "appended"],
)
@pytest.mark.parametrize("text", ["x", "a line of some words" + r"\n"], ids=["line", "lines"])
def test_a_long_message_is_in_memory_a_few_times_at_most(
    tmp_path: Path, text: str, call: str, most: int
) -> None:
    # Given a file of one long message, or of none where one is appended
    path = tmp_path / "long.tq"
    written = text.replace(r"\n", "\n ").encode()
    message = b"-" + written * (LONG_BYTES // len(written)) + b"\n"
    path.write_bytes(b"" if "append" in call else message)

    # When another process reads, shows or writes it
    call = call.replace("{size}", str(LONG_BYTES)).replace("{text}", text)
    program = PEAK.replace("{call}", call)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=REPOSITORY, capture_output=True, check=True
    )

    # Then all its copies together were no larger than this many messages, of which the last is one
    # that the allocator had not given back, and half of one: that depends on where things lie
    assert int(done.stderr) << 10 < (most + 0.5) * LONG_BYTES


@pytest.mark.parametrize("call", ["queue.done(entry)", "queue.set_variable(entry, 'v', 'b')"])
def test_a_long_message_is_changed_without_copies_of_it(tmp_path: Path, call: str) -> None:
    # Given a message of 32 MiB, which someone has read
    path = tmp_path / "long.tq"
    TextQueue(path).append("x" * (32 << 20), {"v": "a"})

    program = f"""
import resource, sys
from slatemq.textqueue import TextQueue
queue = TextQueue(sys.argv[1])
entry = queue.entry(0)
read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{call}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - read)
"""
    grown = subprocess.check_output([sys.executable, "-c", program, str(path)], cwd=REPOSITORY)

    # Then it was in memory three times at most: as it was, read again, and changed
    assert int(grown) < 40 << 10


def test_marking_reads_as_much_in_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a small and a large file
    def bytes_read_to_mark(count: int) -> list[int]:
        path = tmp_path / f"{count}.tq"
        path.write_bytes(b"-message\n" * count)
        queue = TextQueue(path)
        entries = [queue.entry(9 * (count - place)) for place in range(1, 101)]
        lengths: list[int] = []

        def pread(descriptor: int, length: int, offset: int) -> bytes:
            content = os_pread(descriptor, length, offset)
            lengths.append(len(content))
            return content

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", pread)
            for entry in entries:
                queue.done(entry)
        return lengths

    # When their last messages are marked, then the same reads are made
    small, large = map(bytes_read_to_mark, (200, 1_000_000))
    assert small == large
    assert sum(small) < 100 * 64
