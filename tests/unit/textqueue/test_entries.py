"""An entry that a scan gave: a place in a page, and all that can be asked of it."""

import pickle
from pathlib import Path

import pytest

from slatemq.textqueue import FormatError, State, TextQueue
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.parsing import CHUNK_BYTES, scan

MIXED = (
    b"-a\n second\n\\v=1 \n\\w\n\n=b\n!\n#c\n\n \n\\v=2\n"
    + "?d\n→e\n ünï\n-".encode()
    + b"x" * 50
    + b"\n"
)
"""Entries of each kind, in 17 lines."""

TEXTS = ["a\nsecond", "b", "", "c\n", "d", "e\nünï", "x" * 50]


@pytest.fixture
def queue(path: Path) -> TextQueue:
    """A file of several pages."""
    path.write_bytes(MIXED * (3 * CHUNK_BYTES // len(MIXED)))
    return TextQueue(path)


def test_each_entry_has_its_text_bytes_and_place_whenever_it_is_asked(queue: TextQueue) -> None:
    content = Path(queue.path).read_bytes()

    # When some ask for the texts while they read, and others when all is read
    at_once = [(entry.text, entry) for entry in queue.entries(*State)]
    later = list(queue.entries(*State))

    # Then all is the same, and what stands in the file
    assert [text for text, _ in at_once] == TEXTS * (len(content) // len(MIXED))
    assert [(entry.text, entry) for entry in later] == at_once
    assert b"".join(entry.raw for entry in later) == content
    offset, line = 0, 1
    for entry in later:
        assert (entry.offset, entry.line) == (offset, line)
        offset, line = entry.end, line + entry.raw.count(b"\n")
    assert [entry.state for entry in later[:7]] == [
        *(State.QUEUED, State.PROCESSED, State.ERROR, State.COMMENT),
        *(State.UNKNOWN, State.UNKNOWN, State.QUEUED),
    ]


@pytest.mark.parametrize("states", [(), (State.PROCESSED,), (State.ERROR, State.COMMENT)])
@pytest.mark.parametrize(
    "piece",
    [
        MIXED,
        b"-one\n" * 40,  # all alike
        b"=two\n-one\n" * 40,  # each a line
        b"=two\n" * 30 + b"-one\n #\n",  # hardly any
        b"=two\n" * 30 + b"-one\n",
    ],
)
def test_the_wanted_entries_are_the_same_among_all(
    path: Path, piece: bytes, states: tuple[State, ...]
) -> None:
    path.write_bytes(piece * (3 * CHUNK_BYTES // len(piece)))
    queue, wanted = TextQueue(path), states or (State.QUEUED,)
    expected = [entry for entry in queue.entries(*State) if entry.state in wanted]

    assert list(queue.entries(*states)) == expected
    assert [entry.text for entry in queue.entries(*states)] == [entry.text for entry in expected]


def test_an_entry_is_a_value(queue: TextQueue) -> None:
    first, second = list(queue.entries())[:2]
    other = next(queue.entries())

    assert (first, hash(first)) == (other, hash(other))
    assert first != second
    assert first != first.raw
    for copy in (first.detached(), pickle.loads(pickle.dumps(first))):
        assert copy == first
        assert (copy.text, copy.variables, copy.state) == (TEXTS[0], first.variables, State.QUEUED)
    assert repr(second) == f"Entry(raw={second.raw!r}, offset={second.offset}, line={second.line})"
    with pytest.raises(AttributeError, match="no 'txt'"):
        getattr(first, "txt")  # noqa: B009


def test_what_is_kept_of_an_entry_alone_is_its_own_bytes(queue: TextQueue) -> None:
    kept = [pickle.dumps(entry) for entry in queue]

    assert max(map(len, kept)) < 500


def test_after_a_broken_entry_the_sound_ones_before_it_have_come() -> None:
    content = b"-a\n" * CHUNK_BYTES + b"-b\xff\n" + b"-c\n"
    reads = iter([content])
    found: list[Entry] = []

    with pytest.raises(FormatError, match=f"{CHUNK_BYTES + 1}:3: not UTF-8"):
        found.extend(scan(lambda _: next(reads, b"")))

    assert {entry.text for entry in found} == {"a"}
    assert len(found) == CHUNK_BYTES


def test_an_entry_that_is_kept_does_not_hold_a_huge_neighbour(tmp_path: Path) -> None:
    path = tmp_path / "jobs.tq"
    path.write_bytes(b"-before\n-" + b"x" * (3 << 20) + b"\n" + b"-after\n" * 200_000)
    kept = [entry for entry in TextQueue(path) if len(entry.text) < 10]
    assert [len(kept), kept[0].text, kept[-1].text] == [200_001, "before", "after"]
    assert max(len(entry._page.content) for entry in kept) <= 1 << 20
