"""Texts alone are those of the entries, found in another way."""

import io
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slatemq.textqueue import FormatError, State, TextQueue, parse
from slatemq.textqueue.parsing import scan_texts

LINES = st.sampled_from(
    ["-", "-a", "-b c ", "=", "=done", "!", "!bad", "#", "# note", "é", "?x", "", " ", "  ", " a",
     " -b", "\\", "\\v=1  ", "\\ ", "-\r", " \\x", "\N{SNOWMAN}y", "-" + "l" * 140, " " + "l" * 150,
     "-" + "m" * 400, " " + "m" * 500, "\x1e", "-\x1d", "=\x1e", " \x1e\x1d", "\\\x1e"]
)  # fmt: skip

STATES = [frozenset(some) for size in range(1, 6) for some in combinations(State, size)]


def scanned(content: bytes, states: frozenset[State], **others: Any) -> Iterator[str]:
    def lines_before(end: int) -> int:
        return content.count(b"\n", 0, end)

    return scan_texts(io.BytesIO(content).read, "f", states, lines_before=lines_before, **others)


def texts_of_entries(content: bytes, states: frozenset[State], strict: bool) -> Iterator[str]:
    for entry in parse(content, "f", strict=strict).entries:
        if entry.state in states:
            first, *others = entry.raw.decode().split("\n")
            yield "\n".join([first[1:], *(line[1:] for line in others if line[:1] == " ")])


def outcome(texts: Iterator[str]) -> tuple[list[str], str]:
    given: list[str] = []
    try:
        given.extend(texts)
    except FormatError as error:
        return [], str(error)
    return given, ""


@given(
    lines=st.lists(LINES, max_size=30),
    ends=st.booleans(),
    states=st.sampled_from(STATES),
    strict=st.booleans(),
    chunk_bytes=st.integers(1, 3000),
    torn=st.booleans(),
)
@example(["-a", "", "", " b"], True, STATES[0], False, 300, False)
@example(["-a", "", "", ""], True, STATES[0], False, 300, False)
@example(["=a", "\\v", " late", "-b"], True, STATES[0], False, 300, False)
@example(["-a", "-"], False, STATES[0], False, 300, False)
@example(["=a", " folded", "-b", " folded", "\\v", "-c"], True, STATES[0], False, 300, False)
@example(["=a", "", " apart", "-b", " folded"], True, STATES[0], False, 300, False)
@example(["-a\x1e", " \x1d", "-b"], True, STATES[0], False, 300, False)
@example(["-" + "m" * 400, " " + "m" * 500, "\\v", " late"], True, STATES[0], False, 3000, False)
@example(["?a", " folded", "-b", " c"], True, frozenset({State.UNKNOWN}), False, 300, False)
def test_are_those_of_the_entries(
    lines: list[str],
    ends: bool,
    states: frozenset[State],
    strict: bool,
    chunk_bytes: int,
    torn: bool,
) -> None:
    content = "\n".join(lines).encode() + b"\n" * ends + b"\xc3" * torn

    texts = scanned(content, states, strict=strict, chunk_bytes=chunk_bytes)
    assert outcome(texts) == outcome(texts_of_entries(content, states, strict))


@given(
    often=st.lists(LINES, min_size=1, max_size=4),
    times=st.integers(1, 40) | st.just(700),
    once=st.lists(LINES, max_size=4),
    at=st.integers(0, 150) | st.just(2500),
    states=st.sampled_from(STATES),
)
@example(["-a"], 700, ["=done"], 690, frozenset({State.QUEUED}))
@example(["-a"], 700, ["=done", " of two"], 690, frozenset({State.QUEUED}))
@example(["-a"], 700, ["=done", " of two"], 0, frozenset({State.QUEUED}))
@example(["-a"], 700, ["=done", "\\v", " late"], 0, frozenset({State.QUEUED}))
@example(["-a"], 700, ["\\v=1", " late"], 690, frozenset({State.QUEUED}))
@example(["-a"], 700, ["\\v=1", "-b", " of two", "\\v"], 690, frozenset({State.QUEUED}))
@example(["-a"], 700, [" b", "", "", " c", "\\v"], 690, frozenset({State.QUEUED}))
@example(["-a"], 700, [" b", "", "\\v", "", " late"], 690, frozenset({State.QUEUED}))
@example(["-a"], 700, ["=done", "-b", ""], 690, frozenset({State.QUEUED, State.PROCESSED}))
@example(["-a"], 700, ["é", "\\v", "=x", " y"], 690, frozenset({State.QUEUED, State.UNKNOWN}))
@example(["-a"], 700, ["", ""], 700, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["=done", " of two"], 20, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["=done", " of two"], 0, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["", " of two"], 1390, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["\\v"], 1390, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["\\v", "", " late"], 1390, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["", "\\v=1"], 20, frozenset({State.UNKNOWN}))
@example(["-a", " b"], 700, ["=c", " d", "\\v", "", "\\w", "", " late"], 20, STATES[0])
@example(["?a", " b"], 700, ["?c", "", "?d"], 20, frozenset({State.UNKNOWN}))
@example(["?a", " b"], 700, ["?c", "", "-d"], 1390, frozenset(State))
@example(["?a", "=b"], 700, ["\\v", "", "-d", " e", "\\w", " late"], 1390, frozenset(State))
@example(["-a", "=b"], 700, ["-c", " d", "", " e"], 20, frozenset({State.QUEUED}))
@example(["-a", "=b"], 700, ["", "", "=c", " d", ""], 1390, frozenset({State.QUEUED}))
@example(["-a", " b", "", " c", "=d"], 700, ["\\v", "", " late"], 20, frozenset({State.QUEUED}))
@example(["-a", " b", "", "", " c", "\\v"], 700, ["", "-d"], 1390, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["=c", "", " d", "\\v", "-e", "\\w"], 20, frozenset({State.QUEUED}))
@example(["-a", " b"], 700, ["#", " c", "-", "\\v", "", " late"], 1390, frozenset({State.QUEUED}))
@example(["-a", ""], 700, ["-b", "-c"], 1390, frozenset({State.QUEUED}))
@example(["-a", ""], 700, ["-b", " c"], 1390, frozenset({State.QUEUED}))
@example(["-a", ""], 700, ["", ""], 1390, frozenset({State.QUEUED}))
@example(["-" + "l" * 140], 30, ["é" + "x" * 140, " é"], 20, frozenset({State.UNKNOWN}))
@example(["-" + "m" * 400, " m"], 30, ["\\v=1", " late"], 20, frozenset({State.QUEUED}))
@example(["-" + "m" * 400, " " + "m" * 400], 30, [], 0, frozenset({State.QUEUED}))
@example(["-" + "m" * 400, " " + "m" * 400, "\\v"], 30, [], 0, frozenset({State.QUEUED}))
@example(["é" + "m" * 400, " " + "é" * 400], 30, [], 0, frozenset({State.UNKNOWN}))
def test_are_those_of_the_entries_where_most_are_alike(
    often: list[str], times: int, once: list[str], at: int, states: frozenset[State]
) -> None:
    lines = often * times
    content = "\n".join([*lines[:at], *once, *lines[at:], ""]).encode()

    texts = scanned(content, states)

    assert outcome(texts) == outcome(texts_of_entries(content, states, strict=False))


@pytest.mark.parametrize("states", [frozenset({State.QUEUED}), frozenset({State.UNKNOWN})])
@pytest.mark.parametrize(
    "piece",
    [
        b"\n",
        b"=no\n",
        b"-a\n\n b\n",
        b"-a\n\\v=1\n",
        b"?\n\n\n",
        b"-\n \n",
        b" \n",
        b" \x1e\n",
        b"\\v\n",
        b"-\n" * 7 + b" \n",
    ],
)
def test_of_a_large_file_of_one_kind_of_line(piece: bytes, states: frozenset[State]) -> None:
    # What is tried again from every line would take minutes
    content = b"-first\n" + piece * 50_000 + b"-last\n"

    texts = list(scanned(content, states, chunk_bytes=1 << 20))

    assert texts == list(texts_of_entries(content, states, strict=False))


def test_of_many_blank_lines() -> None:
    # What is tried again from every line would take minutes
    content = b"-one" + b"\n" * 500_000 + b"-two\n\n e\n=three\n-four\n-five\n"

    texts = list(scanned(content, frozenset([State.QUEUED]), chunk_bytes=1 << 20))

    assert texts == ["one", "two\ne", "four", "five"]


def test_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs.tq"
    path.write_bytes(b"-one\n two\n\\v=1\n=done\n# note\n-three")
    queue = TextQueue(path)

    assert list(queue.texts()) == ["one\ntwo", "three"]
    assert list(queue.texts(State.PROCESSED, State.COMMENT)) == ["done", " note"]
    assert list(queue.texts(hold_back=True)) == ["one\ntwo"]


def test_names_the_place_of_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "jobs.tq"
    path.write_bytes(b"-one\n" * 100_000 + b"-two\n\\v=1\n late\n")

    with pytest.raises(FormatError, match=r"jobs\.tq.*100003"):
        list(TextQueue(path).texts())


@pytest.mark.parametrize(
    "damage", [b"-\xff\n", b"-late\n\\v\n continued\n", b"\n-x\n\\v=\xc3\n"], ids=repr
)
@pytest.mark.parametrize("lines_count", [0, 1, 5_000, 50_000])
def test_an_error_far_into_a_file_names_its_line(
    tmp_path: Path, lines_count: int, damage: bytes
) -> None:
    path = tmp_path / "far.tq"
    path.write_bytes(b"-a line\n more of it\n\n" * lines_count + damage + b"-after\n")
    queue = TextQueue(path)
    with pytest.raises(FormatError) as raised:
        deque(queue.texts(), maxlen=0)
    with pytest.raises(FormatError) as expected:
        deque(queue.entries(), maxlen=0)
    assert str(raised.value) == str(expected.value)
    assert raised.value.line > 3 * lines_count
