"""Queue files: scanning beside reading lines in Python, marking beside the length of the file.

    python -m benchmarks.textqueue_scan [--megabytes 64] [--rounds 5]

Each round measures all, one after another; the best round of each counts. Time is that of the
processor, so that what else runs on the machine hardly matters; the files are in memory. The last
three columns are those of texts, of entries and of entries with their texts, beside lines.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slatemq.textqueue import Entry, State, TextQueue

SOME = random.Random(5)
"""The same in every run."""


def chosen(often: bytes, seldom: bytes, share: float = 0.1) -> bytes:
    """Lines or entries, one in ten of them another."""
    return b"".join(seldom if SOME.random() < share else often for _ in range(1000))


def line(length: int, begin: bytes = b"-") -> bytes:
    return begin + b"x" * (length - 2) + b"\n"


def varied(first: int, last: int, counts: range) -> bytes:
    """Texts of this many lines, each of this length."""
    return b"".join(
        line(SOME.randint(first, last), b" " if place else b"-")
        for _ in range(1000)
        for place in range(SOME.choice(counts))
    )


def mixture() -> bytes:
    """Entries of all kinds as people and programs write them: some 35 bytes a line."""
    words = ["resize", "photo", "order", "invoice", "again", "customer", "1234", "77", "the", "to"]
    lines: list[str] = []
    for _ in range(1000):
        text = " ".join(SOME.choices(words, k=SOME.randint(3, 12)))
        lines.append(SOME.choice("-------==!##") + text)
        if SOME.random() < 0.3:
            lines += [f" {text[::-1]}"] * SOME.randint(1, 3)
        if SOME.random() < 0.3:
            lines += ["\\retries=03", "\\error=          "][: SOME.randint(1, 2)]
        if SOME.random() < 0.1:
            lines.append("")
    return "\n".join(lines).encode() + b"\n"


CORPUS = Path(__file__).resolve().parents[1] / "tests/conformance/textqueue/read"

SHAPES = {
    "the format's example": (CORPUS / "seed-example.tq").read_bytes(),
    "all kinds, mixed": mixture(),
    "short messages": b"-message of some thirty bytes 1\n",
    "messages with variables": b"-resize photo 7\n\\retries=03\n\\error=          \n",
    "two lines, two variables": b"-photo 7\n and a frame\n\\retries=03\n\\error=          \n",
    "half processed": b"=done long ago\n-still to be done\n",
    "mostly processed": b"=done long ago\n" * 99 + b"-queued\n",
    "blank lines between": b"-message of some thirty bytes 1\n\n",
    "short, 1 in 100 a comment": chosen(line(32), line(32) + b"# why it is here\n", 0.01),
    "paragraphs, blank between": b"-a subject\n a line of text\n\n and another\n\\retries=03\n",
    "a line of 100 bytes": line(100),
    "a line of 150 bytes": line(150),
    "a line of 250 bytes": line(250),
    "a line of 1,000 bytes": line(1000),
    "100, 1 in 10 processed": chosen(line(100), line(100, b"=")),
    "100, 1 in 10 a comment": chosen(line(100), line(100) + b"# why it is here\n"),
    "100, 1 in 10 and a blank": chosen(line(100), line(100) + b"\n"),
    "100, 1 in 10 of two lines": chosen(line(100), line(100) + line(100, b" ")),
    "100, two variables": line(100) + b"\\retries=03\n\\error=          \n",
    "100, not ASCII": "-{}\n".format("Übergröße, 20 €; " * 5).encode(),
    "two lines of 60 bytes": line(60) + line(60, b" "),
    "two lines of 100 bytes": line(100) + line(100, b" "),
    "three lines of 200 bytes": line(200) + line(200, b" ") * 2,
    "1-3 lines of 20-100 bytes": varied(20, 100, range(1, 4)),
    "2-5 lines of 150-400 bytes": varied(150, 400, range(2, 6)),
}


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def lines(path: Path) -> None:
    with path.open(encoding="utf-8", newline="\n") as stream:
        for _ in stream:
            pass


def scan(path: Path, *states: State) -> None:
    for _ in TextQueue(path).entries(*states):
        pass


def texts(path: Path) -> None:
    for _ in TextQueue(path).texts():
        pass


def read(path: Path) -> None:
    for entry in TextQueue(path):
        assert entry.text is not None


def scanning(folder: Path, size: int, rounds: int) -> None:
    path = folder / "scan.tq"
    works: dict[str, Callable[[], object]] = {
        "lines": partial(lines, path),
        "texts": partial(texts, path),
        "entries": partial(scan, path),
        "and texts": partial(read, path),
        "all": partial(scan, path, *State),
    }
    text = "".join(f"{name:>11}" for name in works)
    shares = "".join(f"{'÷ lines':>10}" for _ in range(3))
    sys.stdout.write(f"{'MB/s':26}{text}{shares}\n")
    for name, piece in SHAPES.items():
        path.write_bytes(piece * (size // len(piece)))
        best = [float("inf")] * len(works)
        for _ in range(rounds):
            best = [
                min(known, seconds(work)) for known, work in zip(best, works.values(), strict=True)
            ]
        rates = [path.stat().st_size / one / 1e6 for one in best]
        text = "".join(f"{rate:11.0f}" for rate in rates)
        shares = "".join(f"{rate / rates[0]:10.2f}" for rate in rates[1:4])
        sys.stdout.write(f"{name:26}{text}{shares}\n")


def mark_all(queue: TextQueue, entries: list[Entry]) -> None:
    for entry in entries:
        queue.done(entry)


def marking(folder: Path, rounds: int) -> None:
    sys.stdout.write(f"\n{'messages in the file':32} {'µs to mark one at its end':>28}\n")
    for count in (100, 10_000, 1_000_000, 10_000_000):
        path = folder / "mark.tq"
        best = float("inf")
        for _ in range(rounds):
            path.write_bytes(b"-message\n" * count)
            queue = TextQueue(path)
            entries = [queue.entry(9 * (count - place)) for place in range(1, 101)]
            best = min(best, seconds(partial(mark_all, queue, entries)) / len(entries))
        sys.stdout.write(f"{count:32,} {best * 1e6:28.1f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scanning(Path(folder), given.megabytes << 20, given.rounds)
        marking(Path(folder), given.rounds)


if __name__ == "__main__":
    main()
