"""What the jobs of the janitor cost as an instance grows: one table, for instances of every size.

python -m benchmarks.volume.series /tmp/series                       # 1e5, 1e6 and 1e7 messages
python -m benchmarks.volume.series /tmp/series --sizes 2e4

Each instance is generated for the run: a fifth of its messages is past its retention, seven in ten
are done, one in a hundred failed, and the others wait. The jobs run one after the other, each in a
Spark of its own: `retention` and `unreferenced` first as dry runs (?), then for real, and once more
as dry runs when nine in ten messages are gone. FOLDER/SIZE is removed when its rows are printed,
unless it is to be kept.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.suite import servers
from benchmarks.volume import Volume, write
from benchmarks.volume.jobs import (
    DRIVER,
    EXECUTORS,
    JVM,
    WORKERS,
    Cost,
    cost_of,
    parser_of,
    refuse_large_driver,
    renew_peaks,
)

MILLION = 1_000_000
SIZES = "1e5,1e6,1e7"
QUEUES = 4
WINDOW_S = 3600
"""How far back new queues may start: the newest message came before that."""

STEPS = (
    "retention?",
    "retention",
    "unreferenced?",
    "unreferenced",
    "retention?",
    "unreferenced?",
)

COLUMNS = (
    "messages",
    "job",
    "to go",
    "s",
    "of which Spark's start",
    "s for a million",
    "in Spark, processor s",
    "ingest, broker, processor s",
    "JVM, Python workers, driver, peak MB",
    "ingest, broker, peak MB",
)


def volume_of(size: int) -> Volume:
    """An instance of `size` messages."""
    expired, done, failed = size // 5, size * 7 // 10, size // 100
    return Volume(
        expired=expired,
        done=done,
        failed=failed,
        waiting=size - expired - done - failed,
        queues=QUEUES,
        scattered=True,
    )


class Row(NamedTuple):
    """One job over one instance.

    Attributes:
        messages: How many the log had before.
        job: Its name; with ? a dry run.
        cost: What it took.
    """

    messages: int
    job: str
    cost: Cost

    @property
    def gone(self) -> int:
        """Messages that went, or would."""
        return self.cost.result.counts.get("messages_purged", 0)

    def cells(self) -> Iterator[str]:
        """As COLUMNS has them."""
        result, cost = self.cost.result, self.cost
        starting = result.phases[0][1]
        spark = sum(cost.cpu_s[part] for part in (JVM, EXECUTORS, WORKERS, DRIVER))
        yield f"{self.messages:,}"
        yield f"`{self.job}`"
        yield f"{self.gone:,}"
        yield f"{cost.seconds:.0f}"
        yield f"{starting:.0f}"
        yield f"{(cost.seconds - starting) * MILLION / self.messages:.1f}"
        yield f"{spark:.0f}"
        yield ", ".join(f"{cost.cpu_s[one]:.1f}" for one in ("ingest", "broker"))
        yield ", ".join(f"{cost.peak_mb[one]:.0f}" for one in (JVM, WORKERS, DRIVER))
        yield ", ".join(f"{cost.peak_mb[one]:.0f}" for one in ("ingest", "broker"))


def line(cells: Iterator[str] | tuple[str, ...]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def rows_of(folder: Path, size: int, master: str, driver_mb_max: float) -> Iterator[Row]:
    """All steps over one new instance."""
    began = time.monotonic()
    url = (folder / "data").as_uri()
    asyncio.run(write(url, volume_of(size), replay_window_s=WINDOW_S))
    print(f"{size:,} generated in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    with servers.slatemq(folder) as server:
        left = size
        for job in STEPS:
            services = dict(server.named())
            renew_peaks({name: services[name] for name in ("ingest", "broker")})
            cost = cost_of(folder, job, server, master, WINDOW_S)
            yield (row := Row(left, job, cost))
            refuse_large_driver(job, cost, driver_mb_max)
            if not job.endswith("?"):
                left -= row.gone


@contextmanager
def folder_of(parent: Path, size: int, keep: bool) -> Iterator[Path]:
    """A folder for one instance."""
    folder = parent / str(size)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


def _sizes(text: str) -> list[int]:
    return [int(float(one)) for one in text.split(",")]


def main() -> None:
    """Prints the table, row by row."""
    parser = parser_of("benchmarks.volume.series", __doc__)
    parser.add_argument("folder", type=Path, help="for the instances; 3 GB for ten million")
    parser.add_argument("--sizes", type=_sizes, default=_sizes(SIZES), help=f"messages; {SIZES}")
    parser.add_argument("--keep", action="store_true", help="leave the instances where they are")
    given = parser.parse_args()
    print(line(COLUMNS))
    print(line(("---",) * len(COLUMNS)), flush=True)
    for size in given.sizes:
        with folder_of(given.folder.resolve(), size, given.keep) as folder:
            for row in rows_of(folder, size, given.master, given.driver_mb_max):
                print(line(row.cells()), flush=True)


if __name__ == "__main__":
    main()
