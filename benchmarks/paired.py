"""What has become faster or slower since a commit: `python -m benchmarks.paired COMMIT`.

Starts a stack of this checkout and one of that commit beside it, each with clients of its own code,
and runs each workload of the suite on both, one after the other, as often as `--rounds` says. Each
goes first in every second round, and each stack is the first to be started in one of two passes: so
what the machine does to both cancels out. Prints the medians, and the ratio of the neighbours with
its quartiles: over 1, this checkout is the better one. Both use the packages that are installed
here.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from benchmarks.processor_time import services_s
from benchmarks.suite.comparison import FULL, SHORT, Work, works
from benchmarks.suite.results import is_lower_better
from benchmarks.suite.servers import REPOSITORY, Server, checkout_of, slatemq

ROUNDS_MIN = 3

BUSY = ("ingest", "router", "broker")
SPENT = "processor ms"

Numbers = dict[str, float]


def measure(server: Server, work: Work) -> Numbers:
    """One run: what the workload gives, and the processor time of each service."""
    before = services_s(server)
    numbers = work(server).numbers
    after = services_s(server)
    spent_ms = {
        f"{name} {SPENT}": 1000 * (sum(after[name].values()) - sum(before[name].values()))
        for name in BUSY
    }
    return {**numbers, **spent_ms, f"together {SPENT}": sum(spent_ms.values())}


def run(order: Sequence[Path], work: Work, rounds_count: int) -> list[dict[Path, Numbers]]:
    """One pass, whose stacks start in this order; without its first round, which warms up."""
    with ExitStack() as stack:
        servers = {}
        for checkout in order:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            servers[checkout] = stack.enter_context(slatemq(folder, checkout=checkout))
        rounds = list[dict[Path, Numbers]]()
        for number in range(rounds_count + 1):
            turns = order if number % 2 else order[::-1]
            rounds.append({checkout: measure(servers[checkout], work) for checkout in turns})
    return rounds[1:]


def compare(workload: str, rounds: Sequence[Mapping[Path, Numbers]], other: Path) -> None:
    """Prints each number of both, and the ratios."""
    values = defaultdict[str, list[tuple[float, float]]](list)
    for one in rounds:
        for what, value in one[REPOSITORY].items():
            values[what].append((value, one[other][what]))
    for what, pairs in values.items():
        lower = is_lower_better(what) or what.endswith(SPENT)
        ratios = [
            theirs / ours if lower else ours / theirs for ours, theirs in pairs if ours and theirs
        ]
        if len(ratios) < 2:
            continue  # less processor time than the system counts
        low, middle, high = quantiles(ratios, n=4)
        ours, theirs = (median(column) for column in zip(*pairs, strict=True))
        print(
            f"{workload:5} {what:21} {ours:>11,.1f} beside {theirs:>11,.1f}: "
            f"{middle:.3f}, quartiles {low:.3f} {high:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--workloads", default="", help="e.g. a,d,e500; a to f if left out")
    parser.add_argument("--depth", type=int, default=8, help="batches in flight: 8")
    parser.add_argument("--processes", type=int, default=2, help="client processes: 2")
    parser.add_argument("--rounds", type=int, default=8, help="in each of two passes: 8")
    parser.add_argument("--short", action="store_true", help="small counts: for CI, no figures")
    chosen = parser.parse_args()
    # The stacks are stopped, however this process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if chosen.rounds < ROUNDS_MIN:
        parser.error(f"--rounds takes {ROUNDS_MIN} or more")
    scale = (SHORT if chosen.short else FULL).with_ways([chosen.depth], [chosen.processes])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        try:
            other = stack.enter_context(checkout_of(chosen.commit, folder / "checkout"))
        except subprocess.CalledProcessError:
            parser.error(f"git has no commit {chosen.commit!r}")
        for workload, (work,) in works(scale, chosen.workloads):
            rounds = run((REPOSITORY, other), work, chosen.rounds)
            rounds += run((other, REPOSITORY), work, chosen.rounds)
            compare(workload, rounds, other)


if __name__ == "__main__":
    main()
