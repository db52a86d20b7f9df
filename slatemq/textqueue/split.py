"""Several files read as one queue: each writer appends to a file of its own, without waiting."""

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
"""Suffixes of files beside a queue."""


class SplitQueue:
    """All files that match a pattern, as one queue; new files are included.

    Claims take from the files in turn, so that no writer's messages wait for those of all others.
    Order is kept only within a file. Claims and entries are finished through the claim itself, or
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
        """Read files that match `pattern`, such as `jobs.*.tq`; append to the file `writer`.

        The writer's file should match the pattern. The other arguments are those of TextQueue.
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
        """A queue for each file that exists now, by name."""
        import glob

        names = sorted(name for name in glob.glob(self._pattern) if not name.endswith(BESIDE))
        self._queues = {name: self._queues.get(name) or self._open(name) for name in names}
        return list(self._queues.values())

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def entries(self, *states: State, hold_back: bool = False) -> Iterator[Entry]:
        """The entries of all files, one file after another. Raises FormatError, OSError."""
        for queue in self.queues:
            # A file that was just removed has none.
            with suppress(FileNotFoundError):
                yield from queue.entries(*states, hold_back=hold_back)

    def texts(self, *states: State, hold_back: bool = False) -> Iterator[str]:
        """Only their texts, up to three times as fast. Raises FormatError, OSError."""
        for queue in self.queues:
            with suppress(FileNotFoundError):
                yield from queue.texts(*states, hold_back=hold_back)

    def append(self, text: str, variables: Variables = ()) -> Entry:
        """Append to the writer's own file. Raises BadText, OSError, ValueError without a writer."""
        if self._writer is None:
            raise ValueError("this queue has no writer's file: open it with writer=")
        return self._writer.append(text, variables)

    def claim(self, lease: timedelta = LEASE, *, tied: bool = True) -> Claim | None:
        """Claim a message of the next file that has one.

        Raises FormatError, Rewritten, OSError where no file has one and one cannot be read.
        """
        queues, problem = self.queues, None
        for step in range(len(queues)):
            place = (self._turn + step) % len(queues)
            try:
                claim = queues[place].claim(lease, tied=tied)
            except FileNotFoundError:
                continue  # just removed
            except (TextQueueError, OSError) as error:
                problem = problem or error
                continue
            if claim is not None:
                self._turn = place + 1
                return claim
        if problem is not None:
            raise problem
        return None
