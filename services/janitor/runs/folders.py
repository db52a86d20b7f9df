"""Folders for the temporary files of a run: made for it, and removed with it.

=================  ============================================================================
of the janitor     of a run
=================  ============================================================================
TMPDIR, or /tmp    a folder in it, also for Java, unless an option of all Javas names another
SPARK_LOCAL_DIRS   a folder in each of them, where they are set: they have Spark's shuffle data
=================  ============================================================================

A run that is killed removes nothing, and its janitor may be killed with it. So a janitor holds a
shared lock on the folders of its run, and each janitor removes those that it can lock for itself
alone, when it starts and after each run: nothing needs them any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Final

log = logging.getLogger(__name__)

PREFIX: Final = "slatemq-run-"

_JAVA_FOLDER: Final = "-Djava.io.tmpdir="

_JAVA_OPTIONS: Final = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")
"""Options of all Javas; SPARK_SUBMIT_OPTS, of a driver's Java, would win over them."""


@contextmanager
def run_folders(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Folders for a run, as the variables that it needs to use them. Raises OSError."""
    places = _places(environ)
    with ExitStack() as stack:
        # After the others. A daemon: there may be gigabytes, and not even an exit waits for them.
        stack.callback(Thread(target=_remove_left_in, args=(places,), daemon=True).start)
        own, *local = (_make(place, stack) for place in places)
        variables = {"TMPDIR": own}
        if local:
            variables["SPARK_LOCAL_DIRS"] = ",".join(local)
        if not any(_JAVA_FOLDER in environ.get(name, "") for name in _JAVA_OPTIONS):
            given = environ.get("SPARK_SUBMIT_OPTS", "")  # Last, since the last option wins.
            variables["SPARK_SUBMIT_OPTS"] = f"{shlex.quote(_JAVA_FOLDER + own)} {given}"
        yield variables


def remove_left(environ: Mapping[str, str]) -> None:
    """Remove the folders of runs whose janitor is gone. Raises OSError without any TMPDIR."""
    _remove_left_in(_places(environ))


def _remove_left_in(places: Iterable[Path]) -> None:
    for place in places:
        for path in place.glob(f"{PREFIX}*"):
            # It may be in use, or of another user, or another janitor may just be removing it.
            with suppress(OSError), _locked(path, fcntl.LOCK_EX):
                log.info("removing what a killed run has left: %s", path)
                shutil.rmtree(path, ignore_errors=True)


def _places(environ: Mapping[str, str]) -> list[Path]:
    """Where a run has folders: its own, then those of Spark's shuffle data."""
    local = filter(None, environ.get("SPARK_LOCAL_DIRS", "").split(","))
    return [Path(tempfile.gettempdir()), *map(Path, local)]


def _make(place: Path, stack: ExitStack) -> str:
    place.mkdir(parents=True, exist_ok=True)
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        try:
            stack.enter_context(_locked(path, fcntl.LOCK_SH))
        except (FileNotFoundError, BlockingIOError):
            continue  # Another janitor has removed it in the moment before it was locked.
        # What Spark's workers still write meanwhile goes by `remove_left`, after a run.
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        return str(path)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock on a folder. Raises OSError where it is locked, or not there any more."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, how | fcntl.LOCK_NB)
        path.stat()
        yield
    finally:
        os.close(folder)
