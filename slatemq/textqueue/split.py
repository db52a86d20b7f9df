"""Several files read as one queue: each writer appends to a file of its own, nobody waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

from slatemq.textqueue.appends import appended
from slatemq.textqueue.compacting import beside
from slatemq.textqueue.controls import State
from slatemq.textqueue.entries import Entry, Variables
from slatemq.textqueue.errors import TextQueueError
from slatemq.textqueue.holders import sidecar
from slatemq.textqueue.queue import LEASE, Claim, TextQueue, wall_ms

BESIDE = (sidecar(""), beside(""), appended(""))
"""How the names of files end that are not queues, but beside one."""


class SplitQueue:
    """All files that a pattern matches, as one queue; new ones join as they come.

    Claims take from each file in turn, so that no writer's messages wait for those of all others.
    Order is kept within a file only. Claims and entries are finished through the claim itself, or
    through the queue of their file.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        writer: str | os.PathLike[str] | None = None,
        fsync: bool = False,
        strict: bool = False,
        owner: str = "",
        clock_ms: Callable[[], int] = wall_ms,
    ) -> None:
        """Read what the pattern matches, as in `jobs.*.tq`; append to `writer`, if one is given.

        The writer's file should match the pattern. The others are as for TextQueue.
        """
        self._pattern = os.fspath(pattern)

        def open_file(path: str) -> TextQueue:
            return TextQueue(path, fsync=fsync, strict=strict, owner=owner, clock_ms=clock_ms)

        self._open = open_file
        self._writer = None if writer is None else self._open(os.fspath(writer))
        self._queues: dict[str, TextQueue] = {}
        self._turn = 0

    @property
    def queues(self) -> list[TextQueue]:
        """One for each file that is there now, by name."""
        import glob

        names = sorted(name for name in glob.glob(self._pattern) if not name.endswith(BESIDE))
        self._queues = {name: self._queues.get(name) or self._open(name) for name in names}
        return list(self._queues.values())

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def entries(self, *states: State, hold_back: bool = False) -> Iterator[Entry]:
        """Those of all files, one file after the other. Raises FormatError, OSError."""
        for queue in self.queues:
            # One that somebody has just taken away has none.
            with suppress(FileNotFoundError):
                yield from queue.entries(*states, hold_back=hold_back)

    def texts(self, *states: State, hold_back: bool = False) -> Iterator[str]:
        """Their texts alone, up to three times as fast. Raises FormatError, OSError."""
        for queue in self.queues:
            with suppress(FileNotFoundError):
                yield from queue.texts(*states, hold_back=hold_back)

    def append(self, text: str, variables: Variables = ()) -> Entry:
        """Append to the writer's own file. Raises BadText, OSError, ValueError without a writer."""
        if self._writer is None:
            raise ValueError("this queue was opened without a writer's file")
        return self._writer.append(text, variables)

    def claim(self, lease: timedelta = LEASE, *, tied: bool = True) -> Claim | None:
        """A message of the next file that has one.

        Where none has, but one cannot be read, raises FormatError, Rewritten, OSError.
        """
        queues, problem = self.queues, None
        for step in range(len(queues)):
            place = (self._turn + step) % len(queues)
            try:
                claim = queues[place].claim(lease, tied=tied)
            except FileNotFoundError:
                continue  # somebody has just taken it away
            except (TextQueueError, OSError) as error:
                problem = problem or error
                continue
            if claim is not None:
                self._turn = place + 1
                return claim
        if problem is not None:
            raise problem
        return None
