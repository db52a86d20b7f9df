"""(a) to (f): the same workloads through every system, in turns; each at the best of its variants.

Every turn runs every variant (pipeline depths, numbers of client processes). A system's figure is
the median of its best variant's turns: that with the best median, so that no lucky turn chooses it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.suite import servers, workloads
from benchmarks.suite.crew import Failed
from benchmarks.suite.payloads import RANDOM
from benchmarks.suite.profiling import Profiling
from benchmarks.suite.results import Results, is_lower_better
from benchmarks.suite.servers import NotHere, Server, Starter
from benchmarks.suite.workloads import Measured, Scale

FULL = Scale(50_000, 100_000, 10_000, 10, 10_000)
SHORT = Scale(2_000, 2_000, 200, 1, 500, queues=3, depths=(2,), processes=(2,))

Work = Callable[[Server], Measured]


def _run(workload: Callable[..., Measured], *args: int, **more: str) -> Work:
    return lambda server: workload(server, *args, **more)


def works(scale: Scale, chosen: str) -> Iterator[tuple[str, list[Work]]]:
    """Each workload with its variants."""
    ways = list(product(scale.depths, scale.processes))
    many = [1, 2, 4] if len(scale.depths) > 1 else [2]
    every: dict[str, list[Work]] = {
        "a": [_run(workloads.in_turn, 1024, scale.messages, *w) for w in ways],
        "ar": [_run(workloads.in_turn, 1024, scale.messages, *w, kind=RANDOM) for w in ways],
        "b": [_run(workloads.in_turn, 100, scale.small_messages, *w) for w in ways],
        "c": [_run(workloads.at_once, 1024, scale.messages, *w) for w in ways],
        "d": [_run(workloads.singles, scale.singles, 64, n) for n in many],
        "e500": _paced(scale, 500),
        "e2000": _paced(scale, 2000),
        "f": [_run(workloads.fan_out, scale.fan_out, scale.queues, *w) for w in ways],
    }
    for name, variants in every.items():
        if not chosen or name in chosen.split(",") or name[0] in chosen.split(","):
            yield name, variants


def _paced(scale: Scale, rate: int) -> list[Work]:
    return [
        lambda s, d=d: workloads.latency(s, rate, scale.paced_seconds, d)  # type: ignore[misc]
        for d in scale.depths
    ]


@dataclass(slots=True)
class Comparison:
    """One run. `urls`: of systems that run already; `profile`: records our processes."""

    systems: list[str]
    workloads: str
    scale: Scale
    results: Results
    urls: dict[str, str]
    profile: Profiling | None = None
    _measured: dict[tuple[str, str], list[list[Measured]]] = field(default_factory=dict)
    """By workload and system, the turns of each variant."""

    def run(self, turns: int) -> None:
        """Runs all systems, one after the other, `turns` times."""
        try:
            for turn, system in product(range(turns), self.systems):
                if system not in self.results.left_out:
                    self._attempt(system, turn)
        finally:
            for (name, system), variants in self._measured.items():
                for best in _best(variants):
                    self.results.add(name, system, best)

    def _attempt(self, system: str, turn: int) -> None:
        try:
            self._turn(system, turn)
        except NotHere as error:
            self.results.left_out[system] = str(error)
            print(f"{system}: left out: {error}", flush=True)

    def _turn(self, system: str, turn: int) -> None:
        missing = servers.client_missing(system)
        if missing:
            raise NotHere(missing)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            server = stack.enter_context(self._starter(system)(folder))
            self.results.settings[system] = server.settings
            for name, variants in works(self.scale, self.workloads):
                began = time.monotonic()
                try:
                    with self._profiled(server, name):
                        measured = [variant(server) for variant in variants]
                except Failed as error:
                    self.results.failures.append(f"{system} {name}: {error}")
                    print(f"{system} {name}: FAILED: {error}", flush=True)
                    continue
                turns = self._measured.setdefault((name, system), [[] for _ in variants])
                for one, item in zip(turns, measured, strict=True):
                    one.append(item)
                (item,) = _best([[item] for item in measured])
                numbers = "  ".join(f"{what} {n:,.1f}" for what, n in item.numbers.items())
                took_s = time.monotonic() - began
                print(
                    f"{turn + 1} {system:9} {name:6} {numbers}  {item.settings}  ({took_s:.0f} s)",
                    flush=True,
                )

    def _starter(self, system: str) -> Starter:
        if system in self.urls:
            return servers.running(system, self.urls[system])
        return {**servers.STARTERS, **servers.SECURED}[system]

    def _profiled(self, server: Server, name: str) -> AbstractContextManager[None]:
        if self.profile is None or not server.named():
            return nullcontext()
        return self.profile.of(server.named(), name)


def _best(variants: list[list[Measured]]) -> list[Measured]:
    """The turns of the variant whose first number has the best median."""
    what = next(iter(variants[0][0].numbers))
    pick = min if is_lower_better(what) else max
    return pick(variants, key=lambda turns: median(one.numbers[what] for one in turns))
