"""The watchdog on the tests' own event loops: what took long goes into the run's summary.

Servers that a test runs in its own process share its loop. A step of theirs over `FAILING_MS` fails
the test: it takes that long on no machine unless work was not cut into steps. Steps of the tests
themselves, and those that load modules, are listed alone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from libs.serving.process.watchdog import Watchdog

BOUND_MS = 50

FAILING_MS = 1_000
"""Processor time of a server's step that fails a test. A step that was cut takes some ten; that
of a payload of 64 MiB takes 350 on a machine that has nine times as much to do as it can."""

OURS = re.compile(r"(?:^|[ /])(?:services|libs)/")
NOT_OURS = re.compile(r"(?:^|[ /])tests/|importlib\._bootstrap")

PROPERTY = "slow step"
"""Of a test's report: reports also come from the processes that run tests side by side."""

Found = tuple[str, int, int, str]
"""What ran, how often it took long, processor time of the longest in ms, and where it was."""


class WatchedLoops:
    """Makes loops that are watched."""

    def __init__(self) -> None:
        self._watchdogs: list[Watchdog] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        watchdog = Watchdog(BOUND_MS)
        self._watchdogs.append(watchdog)
        return watchdog.new_event_loop(asyncio.new_event_loop)

    def take(self) -> list[Found]:
        """The slow steps since the last call."""
        found = [
            (name, steps.count, steps.worst_ms, steps.stack)
            for watchdog in self._watchdogs
            for name, steps in watchdog.slow.items()
        ]
        for watchdog in self._watchdogs:
            watchdog.slow.clear()
        return found


def too_long(found: Iterable[Found]) -> list[str]:
    """A line for each step of a server that took so long that the test fails."""
    return [
        f"a step of {name} took {worst_ms} ms of processor time, over {FAILING_MS}, in\n{stack}"
        for name, _, worst_ms, stack in found
        if worst_ms > FAILING_MS and OURS.search(stack) and not NOT_OURS.search(stack)
    ]


def summary(reports: Iterable[Any]) -> list[str]:
    """A line for each name in these reports of tests, the longest steps first."""
    counts: dict[str, int] = {}
    worst: dict[str, tuple[int, str, str]] = {}
    for report in reports:
        for key, (name, count, worst_ms, stack) in getattr(report, "user_properties", ()):
            if key == PROPERTY:
                counts[name] = counts.get(name, 0) + count
                worst[name] = max(worst.get(name, (0, "", "")), (worst_ms, report.nodeid, stack))
    return [
        f"{worst_ms:>6} ms, {counts[name]} times: {name}, longest in {test}\n{stack}".rstrip()
        for name, (worst_ms, test, stack) in sorted(
            worst.items(), key=lambda item: item[1], reverse=True
        )
    ]
