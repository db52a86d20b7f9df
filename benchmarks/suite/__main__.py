"""`python -m benchmarks.suite`: all systems, all workloads; medians, ratios, JSON, a page."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from benchmarks.suite import comparison, own, report, servers
from benchmarks.suite.event_queues import BACKENDS, MODES, STORES
from benchmarks.suite.profiling import FORMATS, Profiling
from benchmarks.suite.results import Results, machine, read


def _number(text: str) -> int:
    return int(float(text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    made.add_argument(
        "--systems",
        default=",".join(servers.STARTERS),
        help=f"and {','.join(servers.SECURED)}: slatemq with TLS, and with tokens and a policy too",
    )
    made.add_argument(
        "--workloads",
        default="",
        help="e.g. a,c,e500,g,limits; all of them if left out",
    )
    made.add_argument("--repeat", type=int, default=3, help="turns of a to f")
    made.add_argument("--depths", type=_numbers, help="pipeline depths to try: 2,4,8")
    made.add_argument("--processes", type=_numbers, help="numbers of client processes: 1,2")
    made.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="SYSTEM=URL",
        help="a system that is running already",
    )
    made.add_argument("--backlog", type=_numbers, help="g: 1e3,1e5,1e6,1e7 waiting messages")
    made.add_argument("--delayed", type=_numbers, help="g: delayed messages beside them: 0,1e6")
    made.add_argument("--rounds", type=_number, help="g: rounds of 1,000 claims: 50")
    made.add_argument("--queues", type=_numbers, help="h: 10,100,1000,10000")
    made.add_argument("--routed", type=_number, help="h: messages in each of its rounds: 200000")
    made.add_argument("--written", type=_number, help="i: messages written: 300000")
    made.add_argument("--rates", type=_numbers, help="i: messages a second; 0 is an idle stack")
    made.add_argument("--intervals", type=_numbers, help="i: commit intervals in ms: 100,1000")
    made.add_argument("--seconds", type=float, help="i: how long each point of the curve is held")
    made.add_argument("--limits", type=_number, help="limits: messages each: 100000")
    made.add_argument("--event-backends", type=_names, help=f"k: {','.join(BACKENDS)}")
    made.add_argument("--event-modes", type=_names, help=f"k: {','.join(MODES)}")
    made.add_argument("--event-stores", type=_names, help=f"k: {','.join(STORES)}")
    made.add_argument("--callers", type=_numbers, help="k: publishes under way at once: 1,16")
    made.add_argument("--event-turns", type=_number, help="k: turns of each point: 3")
    made.add_argument("--event-seconds", type=float, help="k: how long a turn is: 3")
    made.add_argument("--short", action="store_true", help="small counts: for CI, no figures")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    made.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="rewrite this page's table and picture",
    )
    made.add_argument(
        "--from",
        type=Path,
        nargs="+",
        metavar="FILE",
        dest="earlier",
        help="run none: put the JSON of earlier runs together, for --write",
    )
    made.add_argument("--profile", type=Path, metavar="DIR", help="py-spy on our processes: a to f")
    made.add_argument("--profile-format", choices=FORMATS, default="raw")
    made.add_argument("--profile-native", action="store_true", help="with native frames")
    return made


def _command(arguments: list[str]) -> str:
    """What was asked for, without the places where it is written: those are this machine's."""
    kept = list(arguments)
    for name in ("--json", "--write", "--profile"):
        if name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return shlex.join(["python", "-m", "benchmarks.suite", *kept])


def _run(given: argparse.Namespace) -> Results:
    results = Results(command=_command(sys.argv[1:]), machine=machine())
    base = comparison.SHORT if given.short else comparison.FULL
    scale = base.with_ways(given.depths, given.processes)
    profile = (
        Profiling(given.profile, given.profile_format, given.profile_native)
        if given.profile
        else None
    )
    urls = dict(text.split("=", 1) for text in given.url)
    compared = comparison.Comparison(
        given.systems.split(","), given.workloads, scale, results, urls, profile
    )
    if any(True for _ in comparison.works(scale, given.workloads)):
        compared.run(1 if given.short else given.repeat)
    if "slatemq" in compared.systems:
        sizes = own.SHORT if given.short else own.FULL
        own.run(sizes.with_given(vars(given)), given.workloads, results)
    return results


def main() -> None:
    """Runs what was asked for."""
    given = parser().parse_args()
    # The servers that were started are stopped, however this process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = read(given.earlier) if given.earlier else _run(given)
    print()
    print("\n".join(results.lines()))
    if given.json and not given.earlier:
        results.write(given.json)
    if given.write:
        report.write(results, given.write)
    sys.exit(bool(results.failures))


if __name__ == "__main__":
    main()
