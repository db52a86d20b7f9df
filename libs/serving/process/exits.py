"""Why a service process ends, and with which exit code.

A supervisor (the local stack, systemd, Kubernetes) decides by the code alone whether to start the
process again, so these numbers are part of the interface.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

EXIT_CLEAN = 0
"""Drained and stopped because it was asked to."""

EXIT_FAILED = 1
"""Something broke (a commit failed, say): start it again, it recovers from disk."""

EXIT_USAGE = 2
"""A setting is wrong, or the shard's database is gone: starting it again cannot help until that is
changed."""

EXIT_STORE_DOWN = 75
"""The store cannot be used now: start it again for as long as that lasts, at intervals. 75 is
"temporary failure" in sysexits.h."""

EXIT_FENCED = 77
"""Another process owns the shard now. NEVER restart it: the two would fence each other for ever.
77 is "permission denied" in sysexits.h, which is what the store said."""


@dataclass(frozen=True)
class ExitCause:
    """Why the process ends: the exit code, a stable word for logs, and a sentence for people."""

    code: int
    event: str
    message: str

    @classmethod
    def clean(cls, message: str) -> ExitCause:
        return cls(EXIT_CLEAN, "stopped", message)

    @classmethod
    def failed(cls, message: str) -> ExitCause:
        """Memory is ahead of the disk, or a part failed: restart from disk."""
        return cls(EXIT_FAILED, "failed", message)

    @classmethod
    def store_down(cls, message: str) -> ExitCause:
        """The store is down, or refuses: it may serve the next start."""
        return cls(EXIT_STORE_DOWN, "store_down", message)

    @classmethod
    def fenced(cls, message: str) -> ExitCause:
        """Another process owns the shard: stop and stay down."""
        return cls(EXIT_FENCED, "fenced", message)

    @classmethod
    def usage(cls, message: str) -> ExitCause:
        """A setting is wrong, which shows only in use."""
        return cls(EXIT_USAGE, "wrong_setting", message)

    @classmethod
    def lost(cls, message: str) -> ExitCause:
        """A database or record is gone: it does not come back by starting again."""
        return cls(EXIT_USAGE, "lost_database", message)

    def log(self, logger: logging.Logger) -> None:
        """Log it. By its `exit_code` the local stack finds this record among others."""
        facts = {"event": self.event, "exit_code": self.code}
        level = logging.INFO if self.code == EXIT_CLEAN else logging.ERROR
        logger.log(level, "%s: %s", self.event, self.message, extra=facts)


class FatalError(Exception):
    """Raised by a service's `start`: the process must end for this cause."""

    def __init__(self, cause: ExitCause) -> None:
        super().__init__(cause.message)
        self.cause = cause

    @classmethod
    def usage(cls, message: str) -> FatalError:
        return cls(ExitCause.usage(message))


async def first_cause(*causes: Coroutine[Any, Any, ExitCause]) -> ExitCause:
    """The first cause; of several at the same time the one listed first explains the others."""
    ends = [asyncio.create_task(cause) for cause in causes]
    try:
        ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return next(end for end in ends if end in ended).result()
    finally:
        for end in ends:
            end.cancel()


def exit_with(code: int) -> NoReturn:
    """End this process with this code, whatever the threads of the store's clients do.

    They outlive the event loop. One that calls back while the interpreter is taken apart aborts the
    process, and its supervisor sees another code. So nothing is taken apart once the functions have
    run that are registered for the exit.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:  # A full disk, a reader that is gone, a closed file.
        if sys.stderr is not None:
            sys.stderr.write(f"the output is not whole: {error}\n")
        code = code or EXIT_FAILED
    atexit.register(_leave, code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # those that were registered earlier
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(code)
