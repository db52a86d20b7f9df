"""Mixed work for hours at a third of what the clients can do, with the janitor's jobs beside it.

Samples of memory, open files, objects of the store and latency go to a file as JSON lines, and into
a picture. After a warm-up they must be flat.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, linear_regression, median, quantiles
from typing import Final

from tests.acceptance.local_stack import LocalStack
from tests.faults.mixed_work import Work, judged, run_work
from tests.faults.verified import faults_of
from tests.faults.zombies import HISTORY

CAPACITY_S: Final = 15.0
SHARE: Final = 1 / 3
UNBOUNDED: Final = 1e6
"""Messages a second of a producer that never waits."""

SAMPLES: Final = 300
JOBS: Final = 12
"""How often the janitor's jobs run."""

WARM_UP: Final = 1 / 3
"""Of the run, that is not judged."""

GROWTH: Final = 0.15
"""Of memory and open files, over what is judged, of their mean."""

FILLING_S: Final = 1800.0
"""Caches, windows of request IDs and rings of finished leases fill for so long: until then memory
may grow by FILLING, which still is far less than a leak of each message makes."""

FILLING: Final = 0.4

SLOWDOWN: Final = 2.0
"""Of the median latency in the last part, to that in the middle."""

FILES_JUDGED_S: Final = 3600.0
"""Files of the store grow until retention and garbage collection go round: judged from then on."""

KEPT_S: Final = {"wal": 330.0, "manifest": 21_630.0, "compactions": 21_630.0}
"""How long files of these folders are kept, on average: what of them is younger is no growth.

They are collected each minute, once they are 300 s old, and the others, in folders, six hours:
libs/storage/database/settings.py. So there are more of them while commits are faster."""

SERVICES: Final = ("ingest", "router", "broker", "janitor")


@dataclass(frozen=True)
class Sample:
    """How a stack is at a moment: by service, of the store, and of what clients see.

    Attributes:
        numbered: How many files of each folder of KEPT_S there have been so far.
    """

    at_s: float
    memory_mib: dict[str, float]
    open_files: dict[str, int]
    store_files: int
    store_mib: float
    numbered: dict[str, int]
    answered: int
    p50_ms: float
    p99_ms: float


def _memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def file_sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes[path] = path.stat().st_size
        except FileNotFoundError:
            continue  # It has gone since it was listed.
    return sizes


def numbered(files: Iterable[Path]) -> dict[str, int]:
    """By the name of their folders, the sum of the highest numbers: files are numbered from 1 on.

    Each database has a folder of each name.
    """
    highest: dict[Path, int] = defaultdict(int)
    for file in files:
        if file.parent.name in KEPT_S and file.stem.isdigit():
            highest[file.parent] = max(highest[file.parent], int(file.stem))
    sums = dict.fromkeys(KEPT_S, 0)
    for folder, number in highest.items():
        sums[folder.name] += number
    return sums


def _sample(stack: LocalStack, data: Path, work: Work, at_s: float) -> Sample:
    pids = {name: stack.pids[name] for name in SERVICES}
    latencies, work.latencies_ms = sorted(work.latencies_ms), []
    cuts = quantiles(latencies, n=100) if len(latencies) > 1 else [0.0] * 99
    sizes = file_sizes(data)
    return Sample(
        at_s,
        {name: _memory_mib(pid) for name, pid in pids.items()},
        {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
        len(sizes),
        sum(sizes.values()) / (1 << 20),
        numbered(sizes),
        work.answered_count,
        cuts[49],
        cuts[98],
    )


def run_soak(folder: Path, seconds: float, seed: int, samples_file: Path) -> list[str]:
    """The faults of a run of so long, of its history and of its store."""
    every_s = f"{max(10, round(seconds / JOBS))}s"
    stated = {
        "SLATEMQ_RETENTION_S": str(max(60, round(seconds / 4))),
        "SLATEMQ_RETENTION_SCHEDULE": every_s,
        "SLATEMQ_UNREFERENCED_SCHEDULE": every_s,
        "SLATEMQ_DONE_SCHEDULE": every_s,
        "SLATEMQ_SPARK_MASTER": "local[1]",
    }
    samples_file.parent.mkdir(parents=True, exist_ok=True)
    before = dict(os.environ)
    os.environ.update(stated)
    try:
        with LocalStack(folder) as stack:
            samples = asyncio.run(_sampled(stack, folder, seconds, seed, samples_file))
            root = stack.root
    finally:
        os.environ.clear()
        os.environ.update(before)
    picture = samples_file.with_suffix(".svg")
    picture.write_text(draw(samples), encoding="utf-8")
    print(f"{len(samples)} samples in {samples_file}, drawn in {picture}")
    return [*growth(samples), *judged(folder / HISTORY), *faults_of(root)]


async def _sampled(
    stack: LocalStack, folder: Path, seconds: float, seed: int, samples_file: Path
) -> list[Sample]:
    samples: list[Sample] = []

    async def soak(work: Work) -> None:
        work.rate = UNBOUNDED
        await asyncio.sleep(CAPACITY_S)
        capacity = work.answered_count / CAPACITY_S
        work.rate = capacity * SHARE / work.producers_count
        print(f"{capacity:.0f} messages/s at most; {work.rate * 2:.0f} messages/s from now on")
        began = time.monotonic()
        with samples_file.open("w", encoding="utf-8") as out:
            while (at_s := time.monotonic() - began) < seconds:
                await asyncio.sleep(max(1.0, seconds / SAMPLES))
                sample = await asyncio.to_thread(_sample, stack, folder / "data", work, at_s)
                samples.append(sample)
                out.write(json.dumps(asdict(sample)) + "\n")
                out.flush()

    await run_work(folder / HISTORY, stack.endpoint, seed, soak)
    return samples


# --- Flat, and drawn --------------------------------------------------------


def growth(samples: Sequence[Sample]) -> list[str]:
    """What grows after the warm-up, and should not."""
    kept = samples[int(len(samples) * WARM_UP) :]
    if len(kept) < 10:
        return [f"only {len(kept)} samples after the warm-up"]
    times = [one.at_s for one in kept]
    found = []
    memory_growth = GROWTH if times[-1] >= FILLING_S else FILLING
    for name in SERVICES[:3]:
        memory = [one.memory_mib[name] for one in kept]
        found += _grown(f"memory of {name}", times, memory, memory_growth)
        files = [float(one.open_files[name]) for one in kept]
        found += _grown(f"open files of {name}", times, files, GROWTH)
    if times[-1] >= FILES_JUDGED_S:
        stored = fmean(one.store_files for one in kept)
        unexplained = unexplained_files(samples)[-len(kept) :]
        found += _grown("files of the store", times, unexplained, GROWTH, stored)
    middle, last = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    slow, slower = (median(one.p50_ms for one in part) for part in (middle, last))
    if slower > SLOWDOWN * slow:
        found.append(f"latency grew from {slow:.0f} to {slower:.0f} ms")
    return found


def unexplained_files(samples: Sequence[Sample]) -> list[float]:
    """Of each sample, the files of the store but for those that are too young to be collected."""
    times = [one.at_s for one in samples]
    unexplained = []
    for one in samples:
        young = 0
        for name, kept_s in KEPT_S.items():
            older = bisect_right(times, one.at_s - kept_s)
            young += one.numbered[name] - (samples[older - 1].numbered[name] if older else 0)
        unexplained.append(float(one.store_files - young))
    return unexplained


def _grown(
    what: str,
    times: Sequence[float],
    values: Sequence[float],
    most: float,
    whole: float | None = None,
) -> list[str]:
    """`whole`: what growth is a part of, where it is not the mean of these values."""
    slope = linear_regression(times, values).slope
    grown = slope * (times[-1] - times[0]) / (whole or fmean(values) or 1)
    return [f"{what} grew by {grown:.0%}"] if grown > most else []


_WIDTH, _HEIGHT, _LEFT, _GAP = 720, 110, 70, 34
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def draw(samples: Sequence[Sample]) -> str:
    """A picture as SVG: a panel for each thing that should be flat."""
    panels: list[tuple[str, dict[str, list[float]]]] = [
        ("memory, MiB", {n: [s.memory_mib[n] for s in samples] for n in SERVICES}),
        ("open files", {n: [float(s.open_files[n]) for s in samples] for n in SERVICES}),
        ("files of the store", {"files": [float(s.store_files) for s in samples]}),
        ("MiB in the store", {"MiB": [s.store_mib for s in samples]}),
        (
            "latency, ms",
            {"p50": [s.p50_ms for s in samples], "p99": [s.p99_ms for s in samples]},
        ),
    ]
    times = [one.at_s / 60 for one in samples]
    parts = [_panel(place, title, times, lines) for place, (title, lines) in enumerate(panels)]
    height = len(panels) * (_HEIGHT + _GAP) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + f'\n<text x="{_LEFT}" y="{height - 6}">minutes, 0 to {times[-1]:.0f}</text>\n</svg>\n'
    )


def _panel(place: int, title: str, times: Sequence[float], lines: dict[str, list[float]]) -> str:
    top = place * (_HEIGHT + _GAP) + 22
    most = max(max(values) for values in lines.values()) * 1.1 or 1
    parts = [
        f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{title}</text>',
        f'<path d="M{_LEFT} {top}v{_HEIGHT}h{_WIDTH - _LEFT - 90}" fill="none" stroke="#888"/>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{_LEFT - 6}" y="{top + _HEIGHT}" text-anchor="end">0</text>',
    ]
    for color, (name, values) in zip(_COLORS, lines.items(), strict=False):
        points = " ".join(_points(top, times, values, most))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        y = top + 12 + 14 * list(lines).index(name)
        parts.append(f'<text x="{_WIDTH - 82}" y="{y}" fill="{color}">{name}</text>')
    return "\n".join(parts)


def _points(
    top: int, times: Sequence[float], values: Sequence[float], most: float
) -> Iterable[str]:
    for at, value in zip(times, values, strict=True):
        x = _LEFT + (_WIDTH - _LEFT - 90) * at / (times[-1] or 1)
        yield f"{x:.1f},{top + _HEIGHT * (1 - value / most):.1f}"
