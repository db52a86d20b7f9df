"""Requests of a process that starts: they outlast a store that is down for some seconds.

A request of a process that serves fails soon, since a caller waits for it. A start sends some
thirty requests, one after the other. Were it to end with the first that fails, then no process
could start on a store that is there for less time than a start takes, however often it is started
again.

::

    request ── done ─────────────────────────────────────► its answer
       ▲  └── the store did not serve it ── for WAIT_S ──► the error
       └──────────── every second ◄──────┘
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

from obstore.exceptions import BaseError

from libs.storage.errors import lacks_credentials, readable

_log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S: Final = 30.0
"""For how long one request of a start is sent again. A supervisor that starts the process again
waits for up to minutes before that, and everything begins again."""

AGAIN_S: Final = 1.0
"""From a failed request to the next one, and down to half of that, at random."""

_PASSING: Final = re.compile(r"HTTP error|after \d+ retries")
"""In errors of a store's client that was not answered, or repeated the request: not in those of a
bucket that is not there, or of a caller that may not do this."""


@dataclass(eq=False)
class _Patience:
    """Attributes: wait_s: As WAIT_S. is_over: Whether the start has ended."""

    wait_s: float
    is_over: bool = False


_OF_START: Final[ContextVar[_Patience | None]] = ContextVar("patience", default=None)


@contextmanager
def patiently(wait_s: float | None = None) -> Iterator[None]:
    """Requests of this task, and of those that it begins, are patient until the context ends."""
    patience = _Patience(WAIT_S if wait_s is None else wait_s)
    token = _OF_START.set(patience)
    try:
        yield
    finally:
        patience.is_over = True
        _OF_START.reset(token)


def patience_s() -> float:
    """For how long a request is sent again now; 0: it is not."""
    patience = _OF_START.get()
    return 0.0 if patience is None or patience.is_over else patience.wait_s


async def repeated(request: Callable[[], Awaitable[T]]) -> T:
    """What the request gives, sent again while a process starts and the store does not serve it."""
    until = None
    while True:
        try:
            return await request()
        except BaseError as error:
            wait_s, said = patience_s(), str(error)
            if not wait_s or not _PASSING.search(said) or lacks_credentials(said):
                raise
            now = time.monotonic()
            if until is None:
                until = now + wait_s
                _log.warning("the start waits for the store, %g s: %s", wait_s, readable(said))
            if now >= until:
                raise
        await asyncio.sleep(AGAIN_S * random.uniform(0.5, 1))
