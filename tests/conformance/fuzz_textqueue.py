"""Random and mangled queue files, read by both readers and changed in place, as long as wanted.

    python -m tests.conformance.fuzz_textqueue --seconds 60 [--seed 7]

Ends with 0 when both always said the same, reading gave back the same bytes however it was cut, and
changes touched nothing else; else it prints the file and the seed, and ends with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slatemq.textqueue import (
    AlreadyMarked,
    DoesNotFit,
    FormatError,
    NotAMessage,
    State,
    TextQueue,
    parse,
    scan,
)
from tests.conformance.naive_reader import Broken, read

CORPUS = Path(__file__).resolve().parent / "textqueue"

PIECES = (
    *(b"-", b"=", b"!", b"#", b" ", b"\\", b"\n", b"\n\n", b"\r\n", b"?", b"\0", b"\t"),
    *(b"\\v=1   \n", b"\\retries=03\n", b"\n continued", b"\xc3", b"\xa9", "é".encode()),
    *(b"\xff", "\u2028".encode(), "\ufeff".encode(), b"\xf0\x9f\x99\x82", b"a=b=c", b"x" * 300),
)


def files(chance: random.Random) -> Iterator[bytes]:
    """Without end: pieces in any order, and files of the corpus with some bytes changed."""
    known = [path.read_bytes()[:2000] for path in sorted(CORPUS.glob("*/*.tq"))]
    while True:
        kind = chance.random()
        if kind < 0.4:
            yield b"".join(chance.choices(PIECES, k=chance.randrange(40)))
            continue
        if kind < 0.5:
            # Mostly of one kind and sound, so that what is fast there is seen
            lines = [b"=done %d" % number for number in range(chance.randrange(100))]
            for _ in range(chance.randrange(4)):
                lines.insert(chance.randrange(len(lines) + 1), chance.choice([b"-q", b"", b"!e"]))
            yield b"\n".join(lines)
            continue
        content = bytearray(chance.choice(known) + chance.choice(known))
        for _ in range(chance.randrange(6)):
            place = chance.randrange(len(content) + 1)
            length = chance.choice([0, 0, 1, 3])
            content[place : place + length] = chance.choice(PIECES)
        yield bytes(content)


def compare(content: bytes, chance: random.Random) -> None:
    """Raises AssertionError where the two readers differ, or bytes got lost."""
    for strict in (False, True):
        ours, theirs = _ours(content, strict), _theirs(content, strict)
        assert ours == theirs, (ours, theirs)
        if isinstance(ours, tuple):
            continue
        assert parse(content, strict=strict).dump() == content
        for control in (b"-", b"=", b"!#", b"-=!#"):
            # Texts are asked for at once here, and later there: they are made in different ways
            parts = scan(pieces(content, chance, 400), strict=strict, controls=control)
            filtered = [(entry.text, entry) for entry in parts]
            whole = parse(content, strict=strict).entries
            assert filtered == [(entry.text, entry) for entry in whole if entry.raw[0] in control]
        cut = scan(pieces(content, chance), strict=strict, chunk_bytes=1)
        assert [(entry.text, entry) for entry in cut] == [
            (entry.text, entry) for entry in parse(content, strict=strict).entries
        ]


def pieces(content: bytes, chance: random.Random, most: int = 9) -> Callable[[int], bytes]:
    """Reads that give a few bytes each."""
    place = 0

    def read_on(_: int) -> bytes:
        nonlocal place
        got = content[place : place + chance.randrange(1, most)]
        place += len(got)
        return got

    return read_on


def change(content: bytes, chance: random.Random, path: Path) -> None:
    """Raises AssertionError where a change touches what it should not."""
    path.write_bytes(content)
    queue = TextQueue(path)
    try:
        entries = list(queue.entries(*State))
    except FormatError:
        return
    for entry in chance.sample(entries, min(3, len(entries))):
        before = path.read_bytes()
        places: set[int] = set()
        try:
            if chance.random() < 0.5:
                queue.done(entry)
                places = {entry.offset}
            elif entry.variables:
                variable = chance.choice(entry.variables)
                queue.set_variable(entry, variable.index, chance.choice(["", "x", "é", "long" * 3]))
                places = {*range(variable.offset, variable.offset + variable.width)}
        except (AlreadyMarked, DoesNotFit, NotAMessage):
            pass
        after = path.read_bytes()
        assert len(after) == len(before)
        assert {n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b} <= places
    parse(path.read_bytes())


def _ours(content: bytes, strict: bool) -> Any:
    try:
        found = parse(content, strict=strict).entries
    except FormatError as error:
        return error.line, error.column
    return [
        [
            *(entry.line, entry.offset, entry.control, entry.state.value, entry.text),
            [(one.name, one.value, one.offset, one.width) for one in entry.variables],
        ]
        for entry in found
    ]


def _theirs(content: bytes, strict: bool) -> Any:
    try:
        found = read(content, strict=strict)
    except Broken as broken:
        return broken.fields["line"], broken.fields["column"]
    return [
        [
            *(entry[name] for name in ("line", "offset", "control", "state", "text")),
            [
                (one["name"], one["value"], one["offset"], one["reserved_bytes"])
                for one in entry["variables"]
            ],
        ]
        for entry in found
    ]


def fuzz(seed: int, until: float, count_max: int, folder: Path) -> int:
    """Runs until that time, or this many files; gives how many there were."""
    chance = random.Random(seed)
    for count, content in enumerate(files(chance)):
        if count >= count_max or time.monotonic() >= until:
            return count
        try:
            compare(content, chance)
            change(content, chance, folder / "fuzz.tq")
        except Exception as error:
            raise AssertionError(f"seed {seed}, file {count}: {content!r}") from error
    raise AssertionError("files come without end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        until = time.monotonic() + given.seconds
        try:
            count = fuzz(given.seed, until, sys.maxsize, Path(folder))
        except AssertionError as error:
            sys.stderr.write(f"{error}: {error.__cause__}\n")
            return 1
    sys.stdout.write(f"{count} files, seed {given.seed}: both readers agree\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
