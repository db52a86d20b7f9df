"""Queue files: how much memory reading, claiming and the like take, with small and large files.

    python -m benchmarks.textqueue_memory [--megabytes 1024] [--endpoint HOST:PORT] [--folder F]

Each runs over the whole file, in a process of its own, whose peak and processor time are printed.
With an endpoint the file is imported into a queue of that instance, and exported from it again; the
queue is deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from slatemq.textqueue import State, TextQueue

SMALL_MEGABYTES = 4

LINE = "something to read, in a line of eighty characters: the photo is to be resized now"
MESSAGE = "-photo {number:09}\n" + f" {LINE}\n" * 100 + "\\retries=03\n\\error=          \n"


def start(path: str) -> None:
    """Nothing: what the interpreter and the modules take."""


def scan(path: str) -> None:
    assert sum(bool(entry.text) for entry in TextQueue(path).entries(*State))


def claim(path: str) -> None:
    queue = TextQueue(path)
    while (claimed := queue.claim()) is not None:
        claimed.done()


def compact(path: str) -> None:
    TextQueue(path).compact()


WORKS: dict[str, Callable[[str], None]] = {
    work.__name__: work for work in (start, scan, claim, compact)
}


class Cost(NamedTuple):
    """Of a process."""

    peak_megabytes: float
    seconds: float


def cost(*arguments: str) -> Cost:
    with subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {process.returncode}")
    return Cost(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime)


def filled(path: Path, megabytes: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range((megabytes << 20) // len(MESSAGE)):
            file.write(MESSAGE.format(number=number))


def costs(path: Path, endpoint: str | None) -> dict[str, Cost]:
    def own(name: str) -> Cost:
        return cost(__spec__.name, "--work", name, str(path))

    fields = {
        "nothing": own("start"),
        "read all": own("scan"),
        "compact, nothing to go": own("compact"),
    }
    if endpoint is not None:
        fields |= through_a_queue(path, ("--endpoint", endpoint))
    return fields | {
        "claim and finish all": own("claim"),
        "compact, all to go": own("compact"),
    }


def through_a_queue(path: Path, where: Sequence[str]) -> dict[str, Cost]:
    """All of the file into a queue, and out of it again."""
    queue, out, slatemq = f"memory-{uuid4().hex[:8]}", path.with_suffix(".out.tq"), "slatemq.cli"
    cost(slatemq, "queue", "create", queue, "--filter", "false", *where)
    try:
        return {
            "import": cost(slatemq, "import", str(path), "--to", queue, "--no-mark", *where),
            "export": cost(
                slatemq, "export", queue, "--state", "available", "--out", str(out), *where
            ),
        }
    finally:
        cost(slatemq, "queue", "delete", queue, "--yes", *where)
        out.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--endpoint")
    parser.add_argument("--folder")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        WORKS[given.work[0]](given.work[1])
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        tables = []
        for megabytes in (SMALL_MEGABYTES, given.megabytes):
            path = Path(folder, f"{megabytes}.tq")
            filled(path, megabytes)
            tables.append(costs(path, given.endpoint))
    sizes = "".join(f"{size:9} MB {'seconds':>9}" for size in (SMALL_MEGABYTES, given.megabytes))
    sys.stdout.write(f"{'peak of memory in MB':26}{sizes}\n")
    for name in tables[0]:
        text = "".join(
            f"{one[name].peak_megabytes:12.1f} {one[name].seconds:9.1f}" for one in tables
        )
        sys.stdout.write(f"{name:26}{text}\n")


if __name__ == "__main__":
    main()
