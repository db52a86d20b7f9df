"""Kills a driver, or its Java alone, at a stage of its work, also from within its tasks.

What is to happen is in the environment, so that Spark's workers, other processes, have it, too.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from libs.storage.database.blobs import Blobs
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.archive import DayFolder
from services.janitor.jobs.owners import Owners

STAGE = "JANITOR_TEST_KILL"
"""The variable that has a phase, or a place and which time, such as "after-call 2"."""

DRIVER = "JANITOR_TEST_DRIVER"
JAVA = "jvm"
"""Before a stage: the Java of the driver is killed there, and not the driver."""

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


def _below(folder: str) -> Callable[[Sequence[Any]], bool]:
    return lambda arguments: str(arguments[0]).startswith(folder)


PLACES = {
    "before-call": Place(Owners, "call", after=False),
    "after-call": Place(Owners, "call", after=True),
    "after-part": Place(Objects, "put_if_absent", after=True),
    "before-emptying": Place(DayFolder, "_empty", after=False, counts=lambda value: bool(value[0])),
    "after-object": Place(Blobs, "delete", after=True),
    "after-removal": Place(Objects, "delete", after=True, counts=_below("blobs/")),
    "before-freeing": Place(QueueNames, "free", after=False),
    "after-freeing": Place(QueueNames, "free", after=True),
    "after-parquet": Place(Objects, "put", after=True, counts=_named("/report.parquet")),
    "after-page": Place(Objects, "put", after=True, counts=_named("/report.html")),
}


def begin(phase: str) -> None:
    """A phase begins: have it happen now, if it is to."""
    kill, stage = _wanted()
    if phase == stage:
        kill()


def arm() -> None:
    """Have it happen in this process, if it is to, and at a place."""
    kill, stage = _wanted()
    name, _, number = stage.rpartition(" ")
    if name not in PLACES:
        return
    place, left = PLACES[name], int(number)
    method = getattr(place.owner, place.name)

    def is_it(arguments: Sequence[Any]) -> bool:
        nonlocal left
        left -= place.counts(arguments)
        return left == 0 and place.counts(arguments)

    if asyncio.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(self: Any, *arguments: Any, **rest: Any) -> Any:
            it = is_it(arguments)
            if it and not place.after:
                kill()
            result = await method(self, *arguments, **rest)
            if it and place.after:
                kill()
            return result

        setattr(place.owner, place.name, awaited)
        return

    @functools.wraps(method)
    def called(self: Any, *arguments: Any, **rest: Any) -> Any:
        it = is_it(arguments)
        if it and not place.after:
            kill()
        result = method(self, *arguments, **rest)
        if it and place.after:
            kill()
        return result

    setattr(place.owner, place.name, called)


def _wanted() -> tuple[Callable[[], None], str]:
    """What kills, and at which stage."""
    stage = os.environ.get(STAGE, "")
    if stage.startswith(f"{JAVA} "):
        return _kill_java, stage.removeprefix(f"{JAVA} ")
    return _kill_driver, stage


def _kill_driver() -> None:
    """Kill the driver; its JVM ends, and then so does this process, if it is another."""
    os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
    time.sleep(GONE_S)


def _kill_java() -> None:
    """Kill the driver's JVM, unless it has gone; this process goes on until it misses it."""
    pid = int(os.environ[DRIVER])
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended since it was listed.
        if int(rest.split()[1]) == pid and name.endswith("(java"):
            with suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)
