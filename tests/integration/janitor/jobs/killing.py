"""Kills a driver at a place in its work, also from within its tasks, which are other processes.

What is to happen is in the environment, so that Spark's workers have it, too.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from libs.storage.database.blobs import Blobs
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.archive import DayFolder
from services.janitor.jobs.owners import Owners

PLACE = "JANITOR_TEST_KILL"
DRIVER = "JANITOR_TEST_DRIVER"
GONE_S = 60

DAEMON = {"spark.python.daemon.module": "tests.integration.janitor.jobs.killing_daemon"}
"""For a session whose tasks may kill their driver."""


class Place(NamedTuple):
    """A method, before or after which to kill, and which calls count."""

    owner: type
    name: str
    after: bool
    counts: Callable[[Sequence[Any]], bool] = lambda _: True


def _named(end: str) -> Callable[[Sequence[Any]], bool]:
    return lambda arguments: str(arguments[0]).endswith(end)


PLACES = {
    "before-call": Place(Owners, "call", after=False),
    "after-call": Place(Owners, "call", after=True),
    "after-part": Place(Objects, "put_if_absent", after=True),
    "before-emptying": Place(DayFolder, "_empty", after=False, counts=lambda told: bool(told[0])),
    "after-object": Place(Blobs, "delete", after=True),
    "after-parquet": Place(Objects, "put", after=True, counts=_named("/report.parquet")),
    "after-page": Place(Objects, "put", after=True, counts=_named("/report.html")),
}


def environ(place: str) -> dict[str, str]:
    """What kills at a place, such as "after-call 2"; nothing for no place."""
    return {PLACE: place} if place else {}


def arm() -> None:
    """Have it happen in this process, if it is to."""
    told = os.environ.get(PLACE)
    if not told:
        return
    name, number = told.split()
    place, left = PLACES[name], int(number)
    method = getattr(place.owner, place.name)

    def is_it(arguments: Sequence[Any]) -> bool:
        nonlocal left
        left -= place.counts(arguments)
        return left == 0 and place.counts(arguments)

    if asyncio.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(self: Any, *arguments: Any, **rest: Any) -> Any:
            result = await method(self, *arguments, **rest)
            if is_it(arguments):
                _kill()
            return result

        setattr(place.owner, place.name, awaited)
        return

    @functools.wraps(method)
    def called(self: Any, *arguments: Any, **rest: Any) -> Any:
        it = is_it(arguments)
        if it and not place.after:
            _kill()
        result = method(self, *arguments, **rest)
        if it:
            _kill()
        return result

    setattr(place.owner, place.name, called)


def _kill() -> None:
    """Kill the driver; its JVM ends, and then so does this process, if it is another."""
    os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
    time.sleep(GONE_S)
