"""The results as a picture: six panels in one SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.suite.costs import SQS_BATCHED_DOLLARS
from benchmarks.suite.results import OURS, Results

BARS = ("a", "b", "c", "d", "f")
BYTES = ("WAL", "L0", "compaction")
COLOURS = ("#c0392b", "#7f8c8d", "#2c5f8a", "#27836b", "#d68910")


def draw(results: Results, path: Path) -> None:
    """Writes the picture; the same numbers give the same bytes."""
    # Loaded where there is something to draw: matplotlib comes with `make bench` only.
    import matplotlib as mpl
    from cycler import cycler

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "slatemq", "font.size": 8}
    mpl.rcParams["axes.prop_cycle"] = cycler(color=COLOURS)
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    _rates(axes[0][0], results)
    _latency(axes[0][1], results)
    _lines(axes[0][2], results, "g", ("claim+ack/s", "drain/s"), "(g) by messages waiting")
    _lines(axes[1][0], results, "h", ("routed/s, to all", "routed/s, to ten"), "(h) by queues")
    _costs(axes[1][1], results)
    _bytes(axes[1][2], results)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _grouped(axis: Any, groups: list[str], heights: dict[str, list[float]]) -> None:
    width = 0.8 / max(len(heights), 1)
    for at, (label, values) in enumerate(heights.items()):
        axis.bar([place + at * width for place in range(len(groups))], values, width, label=label)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups)
    if heights:
        axis.legend()


def _rates(axis: Any, results: Results) -> None:
    measured = [name for name in BARS if name in results.numbers]
    firsts = [next(iter(results.medians(name).values())) for name in measured]
    heights = {
        system: [first.get(system, 0.0) / 1000 for first in firsts] for system in results.settings
    }
    _grouped(axis, [f"({name})" for name in measured], heights if measured else {})
    axis.set_title("(a)-(d), (f): thousand messages/s")


def _latency(axis: Any, results: Results) -> None:
    groups = {
        f"{what.split()[0]}, {what.split()[-1]}": medians
        for name in ("e500", "e2000")
        for what, medians in results.medians(name).items()
        if what.split()[0] in ("p50", "p99")
    }
    heights = {
        system: [medians.get(system, 0.0) for medians in groups.values()]
        for system in results.settings
    }
    _grouped(axis, list(groups), heights if groups else {})
    axis.set_yscale("log")
    axis.set_title("(e) publish to delivered, ms")


def _series(results: Results, workload: str, row: str) -> tuple[list[int], list[float]]:
    found = {
        int(what.rsplit("@", 1)[1]): medians[OURS]
        for what, medians in results.medians(workload).items()
        if what.startswith(f"{row} @") and OURS in medians
    }
    points = sorted(point for point in found if point > 0)
    return points, [found[point] for point in points]


def _lines(axis: Any, results: Results, workload: str, rows: tuple[str, ...], title: str) -> None:
    for row in rows:
        points, values = _series(results, workload, row)
        if points:
            axis.plot(points, values, marker="o", label=row)
    axis.set_title(title)
    if axis.lines:
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.legend()


def _costs(axis: Any, results: Results) -> None:
    mark = "$ a million, "
    rows = dict.fromkeys(
        what.rsplit(" @", 1)[0] for what in results.medians("icost") if what.startswith(mark)
    )
    for row in rows:
        points, values = _series(results, "icost", row)
        axis.plot(points, values, marker="o", label=f"commit {row.removeprefix(mark)}")
    axis.set_title("(i) $ a million messages, by messages/s")
    if axis.lines:
        axis.axhline(SQS_BATCHED_DOLLARS, color="black", linestyle=":", label="SQS, batches of 10")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.legend()


def _bytes(axis: Any, results: Results) -> None:
    sizes = [size for size in (1024, 100) if f"i{size}" in results.numbers]
    bottoms = [0.0] * len(sizes)
    for purpose in BYTES:
        heights = [
            results.medians(f"i{size}")
            .get(f"{purpose} bytes for a payload byte, {size} B", {})
            .get(OURS, 0.0)
            for size in sizes
        ]
        axis.bar([f"{size} B" for size in sizes], heights, 0.5, bottom=bottoms, label=purpose)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axis.set_title("(i) bytes written for a byte of payload")
    if sizes:
        axis.legend()
