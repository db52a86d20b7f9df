"""`python -m benchmarks.suite`: all systems, all workloads; medians, ratios, a JSON file."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.suite import servers, workloads
from benchmarks.suite.servers import NotHere, Server
from benchmarks.suite.workloads import Failed, Measured, Scale

FULL = Scale(50_000, 100_000, 10_000, 10, 10_000)
SHORT = Scale(2_000, 2_000, 200, 1, 500, depths=(2,))

Work = Callable[[Server], Measured]


def works(scale: Scale, chosen: str) -> Iterator[tuple[str, list[Work]]]:
    """Each workload with its variants, of which the best counts."""
    depths = scale.depths
    every: dict[str, list[Work]] = {
        "a": [lambda s, d=d: workloads.in_turn(s, 1024, scale.messages, d) for d in depths],
        "b": [lambda s, d=d: workloads.in_turn(s, 100, scale.small_messages, d) for d in depths],
        "c": [lambda s, d=d: workloads.at_once(s, 1024, scale.messages, d) for d in depths],
        "d": [lambda s: workloads.singles(s, scale.singles, 64)],
        "e500": [lambda s: workloads.latency(s, 500, scale.paced_seconds)],
        "e2000": [lambda s: workloads.latency(s, 2000, scale.paced_seconds)],
        "f": [lambda s, d=d: workloads.fan_out(s, scale.fan_out, 10, d) for d in depths],
    }
    for name, variants in every.items():
        if not chosen or name in chosen.split(",") or name[0] in chosen.split(","):
            yield name, variants


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("--systems", default=",".join(servers.STARTERS))
    parser.add_argument("--workloads", default="", help="e.g. a,c,e500; all of them if left out")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="small counts: for CI, no figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    arguments = parser.parse_args()
    scale = SHORT if arguments.short else FULL
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    settings: dict[str, str] = {}
    failures = 0
    for turn in range(arguments.repeat):
        for system in arguments.systems.split(","):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
                try:
                    server = stack.enter_context(servers.STARTERS[system](folder))
                except NotHere as error:
                    if not turn:
                        print(f"{system}: left out: {error}", flush=True)
                    continue
                settings[system] = server.settings
                for name, variants in works(scale, arguments.workloads):
                    began = time.monotonic()
                    try:
                        measured = [work(server) for work in variants]
                    except Failed as error:
                        print(f"{system} {name}: FAILED: {error}", flush=True)
                        failures += 1
                        continue
                    first = next(iter(measured[0].numbers))
                    best = max(measured, key=lambda one: one.numbers[first])
                    for what, number in best.numbers.items():
                        found.setdefault(name, {}).setdefault(what, {}).setdefault(
                            system, []
                        ).append(number)
                    told = "  ".join(f"{what} {value:,.1f}" for what, value in best.numbers.items())
                    print(
                        f"{turn + 1} {system:9} {name:6} {told}  {best.settings or ''}"
                        f"  ({time.monotonic() - began:.0f} s)",
                        flush=True,
                    )
    print()
    for system, text in settings.items():
        print(f"{system}: {text}")
    for name, by_what in found.items():
        for what, by_system in by_what.items():
            medians = {one: statistics.median(values) for one, values in by_system.items()}
            ours = medians.get("slatemq")
            told = "  ".join(
                f"{one} {value:,.1f}"
                + (f" (×{ours / value:.2f})" if ours and one != "slatemq" else "")
                for one, value in medians.items()
            )
            print(f"{name:6} {what:20} {told}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"settings": settings, "numbers": found}, indent=1) + "\n"
        )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
