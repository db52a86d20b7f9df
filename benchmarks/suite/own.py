"""(g) to (k) and the limits: what is measured on our own stack alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.suite import servers
from benchmarks.suite.backlog import backlog
from benchmarks.suite.costs import costs
from benchmarks.suite.crew import Failed
from benchmarks.suite.event_queues import (
    BACKENDS,
    FILE,
    MODES,
    STORES,
    Choice,
    event_queues,
)
from benchmarks.suite.limits import limits
from benchmarks.suite.payloads import RANDOM
from benchmarks.suite.results import OURS, Results
from benchmarks.suite.routing import routing
from benchmarks.suite.workloads import Measured
from benchmarks.suite.written import written


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each is run; each field is a flag of the command line."""

    backlog: tuple[int, ...] = (1_000, 100_000, 1_000_000, 10_000_000)
    delayed: tuple[int, ...] = (0, 1_000_000)
    rounds: int = 50
    queues: tuple[int, ...] = (10, 100, 1_000, 10_000)
    routed: int = 200_000
    written: int = 300_000
    rates: tuple[int, ...] = (0, 10, 50, 200, 500, 1_000, 2_000)
    intervals: tuple[int, ...] = (100, 1_000)
    seconds: float = 30.0
    limits: int = 100_000
    event_backends: tuple[str, ...] = tuple(BACKENDS)
    event_modes: tuple[str, ...] = MODES
    event_stores: tuple[str, ...] = STORES
    callers: tuple[int, ...] = (1, 16)
    event_turns: int = 3
    event_seconds: float = 3.0

    @property
    def event_queues(self) -> Choice:
        """What of (k) is measured."""
        return Choice(
            self.event_backends,
            self.event_modes,
            self.event_stores,
            self.callers,
            self.event_turns,
            self.event_seconds,
        )

    def with_given(self, given: Mapping[str, Any]) -> Sizes:
        """The same with what the command line says."""
        names = [one.name for one in fields(self) if given.get(one.name) is not None]
        return replace(self, **{name: given[name] for name in names})


FULL = Sizes()
SHORT = Sizes(
    backlog=(1_000, 3_000),
    delayed=(0, 1_000),
    rounds=2,
    queues=(20,),
    routed=1_000,
    written=5_000,
    rates=(200,),
    intervals=(100,),
    seconds=2.0,
    limits=3_000,
    event_backends=("redis streams",),
    event_modes=("async",),
    event_stores=(FILE,),
    callers=(2,),
    event_turns=1,
    event_seconds=0.3,
)


def run(sizes: Sizes, chosen: str, results: Results) -> None:
    """Those of these workloads that were chosen; all, where nothing was."""
    every: dict[str, Callable[[Path], Measured]] = {
        "limits": lambda _: limits((1024, 100), sizes.limits),
        "g": lambda folder: backlog(folder, sizes.backlog, sizes.delayed, sizes.rounds),
        "h": lambda folder: routing(folder, sizes.queues, sizes.routed),
        "i1024": lambda folder: written(folder, 1024, sizes.written),
        "i1024r": lambda folder: written(folder, 1024, sizes.written, RANDOM),
        "i100": lambda folder: written(folder, 100, sizes.written),
        "icost": lambda folder: costs(folder, sizes.rates, sizes.intervals, sizes.seconds),
        "k": lambda folder: event_queues(folder, sizes.event_queues),
    }
    names = chosen.split(",") if chosen else list(every)
    for name, work in every.items():
        # The starts of (j) need the backlog of (g).
        wanted = (name, name[0] if name != "limits" else name, "j" if name == "g" else name)
        if not set(wanted) & set(names):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            try:
                measured = work(Path(folder))
            except Failed as error:
                results.failures.append(f"{OURS} {name}: {error}")
                print(f"{OURS} {name}: FAILED: {error}", flush=True)
                continue
        results.settings.setdefault(OURS, servers.OURS)
        results.add(name, OURS, measured)
        for failure in measured.failures:
            results.failures.append(f"{OURS} {name}: {failure}")
            print(f"{OURS} {name}: FAILED: {failure}", flush=True)
        print(f"  {OURS} {name} {measured.settings} ({time.monotonic() - began:.0f} s)", flush=True)
