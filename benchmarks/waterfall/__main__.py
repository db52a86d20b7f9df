"""Where the time of single messages goes, from the publish to the delivery, hop by hop.

python -m benchmarks.waterfall --rates 50,500,2000 --seconds 10 --draw waterfall.svg

One client publishes single messages of 1 KiB at a steady rate, another one consumes them on a
stream. Ingest, router and broker are processes as `make up` starts them, which note when each
message passes certain functions. Beside them, on the same disk, one durable commit is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import slatemq
from benchmarks import commit_latency
from benchmarks.suite import servers
from benchmarks.waterfall import load

SERVICES = ("ingest", "router", "broker")
POLL_S = 0.2
HOPS = (
    ("accepted", "client and network to ingest, parsed"),
    ("commit begun", "waits for ingest's commit to begin"),
    ("stored", "ingest's commit: written and synced"),
    ("read by router", "tail: ingest to router"),
    ("judged", "router judges, and calls the broker"),
    ("assigned", "network to the broker, parsed"),
    ("payload there", "the broker fetches the payload from ingest"),
    ("claimed", "matches and claim, in memory"),
    ("claim stored", "the broker's commit: written and synced"),
    ("delivered", "encoded, network to the client, read"),
)
"""The marks in the order in which a message passes them, and what comes before each."""

Spans = list[tuple[int, int, float]]
"""Of one mark: last ID, first ID and time, ascending."""


class Message(NamedTuple):
    """Of one message: when the client published it, had its answer, and got it."""

    message_id: int
    published_s: float
    answered_s: float
    delivered_s: float


@contextmanager
def services(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Ingest, router and broker, which write their marks when they end.

    Yields the address of ingest and the processes.
    """
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for name in SERVICES:
            ready = folder / f"{name}.ready"
            command = [sys.executable, "-m", "benchmarks.waterfall.marked"]
            command += [str(folder / f"{name}.marks"), f"services.{name}"]
            command += ["--root", (folder / "data").as_uri(), "--ready-file", str(ready)]
            log = folder / f"{name}.log"
            process = stack.enter_context(servers.started(command, log, cwd=servers.REPOSITORY))
            processes.append(process)
            while not ready.exists():
                if process.poll() is not None:
                    raise servers.NotHere(log.read_text()[-300:])
                time.sleep(0.05)
        yield json.loads((folder / "ingest.ready").read_text())["address"], processes


def run(rate: float, seconds: float) -> tuple[list[Message], dict[str, Spans]]:
    """Hold the rate. Returns the messages and the marks of the services.

    Raises RuntimeError if a service or a client ends early.
    """
    count = max(1, int(rate * seconds))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="waterfall-") as name:
        folder = Path(name)
        with services(folder) as (address, processes):
            asyncio.run(_create(address))
            results: list[Any] = []
            for work, arguments in ((load.consume, (count,)), (load.publish, (rate, count))):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=load.in_process, args=(work, theirs, address, *arguments)
                )
                process.start()
                theirs.close()
                results.append((ours, process))
            try:
                came, published = (
                    _received(pipe, dict(zip(SERVICES, processes, strict=True)), folder)
                    for pipe, _ in results
                )
            finally:
                for _, process in results:
                    process.terminate()
                    process.join()
        marks: dict[str, Spans] = {}
        for service in SERVICES:
            for line in (folder / f"{service}.marks").read_text().splitlines():
                mark, when, first, last = json.loads(line)
                marks.setdefault(mark, []).append((last, first, when))
    for spans in marks.values():
        spans.sort()
    messages = [
        Message(one, began, answered, came[one])
        for one, (began, answered) in sorted(published.items())
    ]
    return messages, marks


def _received(
    pipe: Any, services: Mapping[str, subprocess.Popen[bytes]], folder: Path
) -> dict[int, Any]:
    """What a client sends. Raises RuntimeError if it or a service ends before."""
    while not pipe.poll(POLL_S):
        for name, service in services.items():
            if service.poll() is not None:
                log = (folder / f"{name}.log").read_text()
                raise RuntimeError(f"{name} ended while it was measured: {log[-300:].strip()}")
    try:
        found: dict[int, Any] = pipe.recv()
    except EOFError:
        raise RuntimeError("a client ended early: its error is above") from None
    return found


async def _create(address: str) -> None:
    async with slatemq.connect(address) as client:
        await client.create_queue(load.QUEUE)


def when(spans: Spans, message_id: int) -> float | None:
    """When the message passed a mark; None where it did not."""
    at = bisect_left(spans, (message_id,))
    if at == len(spans) or spans[at][1] > message_id:
        return None
    return spans[at][2]


def hops_of(message: Message, marks: Mapping[str, Spans]) -> dict[str, float]:
    """Milliseconds of each hop. One that a message did not take has none."""
    found: dict[str, float] = {}
    last = message.published_s
    for mark, _ in HOPS:
        now = message.delivered_s
        if mark != "delivered":
            passed = when(marks.get(mark, []), message.message_id)
            if passed is None:
                continue
            now = passed
        found[mark] = (now - last) * 1000
        last = now
    return found


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Point(NamedTuple):
    """The hops of all messages at one rate, and from the publish to the answer and the delivery."""

    hops: dict[str, list[float]]
    answered: list[float]
    delivered: list[float]


def measure(rate: float, seconds: float) -> Point:
    messages, marks = run(rate, seconds)
    hops: dict[str, list[float]] = {mark: [] for mark, _ in HOPS}
    for message in messages:
        for mark, took in hops_of(message, marks).items():
            hops[mark].append(took)
    answered = [(one.answered_s - one.published_s) * 1000 for one in messages]
    delivered = [(one.delivered_s - one.published_s) * 1000 for one in messages]
    return Point(hops, answered, delivered)


def commit_ms() -> tuple[float, float]:
    """One durable commit on the same disk: its median and p99 in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="waterfall-") as folder:
        took = asyncio.run(commit_latency.durations(Path(folder), sync=True))
    return percentile(took, 0.5), percentile(took, 0.99)


def write_table(points: Mapping[float, Point], commit: tuple[float, float]) -> None:
    rates = " | ".join(f"{rate:,.0f}/s" for rate in points)
    print(f"| p50, p99 in ms | {rates} |")
    print("|---|" + "---|" * len(points))

    def row(what: str, values: Sequence[Sequence[float]]) -> None:
        items = [f"{percentile(v, 0.5):.2f}, {percentile(v, 0.99):.2f}" for v in values]
        print(f"| {what} | {' | '.join(items)} |")

    for mark, what in HOPS:
        row(what, [point.hops[mark] for point in points.values()])
    row("**publish to delivered**", [point.delivered for point in points.values()])
    row("publish to answered", [point.answered for point in points.values()])
    print(
        f"\none durable commit on the same disk, beside no load: {commit[0]:.2f}, {commit[1]:.2f}"
    )


def draw(points: Mapping[float, Point], path: Path) -> None:
    """The medians of the hops as bars; the same numbers give the same bytes."""
    # Loaded where there is something to draw: matplotlib comes with `make bench` only.
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "slatemq", "font.size": 8}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(points), figsize=(12, 4), layout="constrained")
    for axis, (rate, point) in zip(
        [axes] if len(points) == 1 else axes, points.items(), strict=True
    ):
        began = 0.0
        for at, (mark, what) in enumerate(HOPS):
            took = percentile(point.hops[mark], 0.5)
            colour = "#c0392b" if "commit: " in what else "#2c5f8a"
            axis.barh(len(HOPS) - at, took, left=began, color=colour)
            axis.text(began + took, len(HOPS) - at, f" {what}", va="center")
            began += took
        axis.set_xlim(0, 2.2 * began)
        axis.set_yticks([])
        axis.set_title(f"{rate:,.0f} messages a second: medians in ms")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.waterfall")
    parser.add_argument("--rates", default="50,500,2000", help="messages a second")
    parser.add_argument("--seconds", type=float, default=10, help="how long each rate is held")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="a picture of the medians, SVG")
    given = parser.parse_args()
    if given.draw and find_spec("matplotlib") is None:
        parser.error("--draw takes matplotlib: pip install -r requirements/bench.txt")
    rates = [float(rate) for rate in given.rates.split(",")]
    points = {rate: measure(rate, given.seconds) for rate in rates}
    write_table(points, commit_ms())
    if given.draw:
        draw(points, given.draw)


if __name__ == "__main__":
    main()
