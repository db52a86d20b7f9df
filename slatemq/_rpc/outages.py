"""Outages of servers that a client waits for: in the log, and bounded where that is wanted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from slatemq._rpc.peers import PEER_SILENT, SILENCE_S
from slatemq.errors import (
    INGEST_DOWN,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.models import Duration, seconds

log = logging.getLogger("slatemq.outage")

WARN_S = 5.0
"""An outage is logged when it has lasted for so long: a restart may take some seconds."""

PROVEN_S = 1.0
"""A connection that brought nothing and broke sooner does not end an outage."""


class Outage(NamedTuple):
    """An outage: when it began, by the monotonic clock, which server is down, and why."""

    since_s: float
    server: str
    error: SlateMQError

    def check(self, give_up_s: float) -> None:
        """Raises Unavailable when it has lasted for so long."""
        lasted_s = time.monotonic() - self.since_s
        if lasted_s >= give_up_s:
            what = _outage_of(self.error)
            raise Unavailable(
                f"{self.server} {what} for {lasted_s:.0f} s: {self.error.message}",
                reason=self.error.reason,
            )


def _outage_of(error: SlateMQError | None) -> str:
    """What a server does or does not, by the error of the last try."""
    return "refuses calls" if isinstance(error, ResourceExhausted) else "has not answered"


def broker_of(queue_id: str) -> str:
    """What the log calls the broker of a queue."""
    return f"the broker of queue {queue_id!r}"


def timeout_of(outage_timeout: Duration | None) -> float | None:
    """The option in seconds; None waits for ever. Raises InvalidArgument."""
    return None if outage_timeout is None else seconds(outage_timeout, "outage_timeout")


class OutageWatch:
    """Times the outage of one server.

    Logs at WARNING when it has lasted for `WARN_S`, and when it is over after that; calls
    `on_timeout` once when it has lasted for `timeout_s` without progress.
    """

    def __init__(
        self,
        server: str,
        timeout_s: float | None = None,
        on_timeout: Callable[[Unavailable], None] = lambda _: None,
        has_work: Callable[[], bool] = lambda: False,
    ) -> None:
        """No outage yet. `server` is what the log calls it; `has_work` counts as progress."""
        self._server = server
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._has_work = has_work
        self._since_s: float | None = None
        self._progress_s = 0.0
        self._answered_s = float("-inf")
        self._error: SlateMQError | None = None
        self._warned = False
        self._timers: list[asyncio.TimerHandle] = []
        self._proof: asyncio.TimerHandle | None = None

    @property
    def outage(self) -> Outage | None:
        """The outage; None while there is none, or before the first try has failed."""
        if self._since_s is None or self._error is None:
            return None
        return Outage(self._progress_s, self._server, self._error)

    def begin(self, error: SlateMQError | None = None, since_s: float | None = None) -> None:
        """The server does not answer; `error` says why, None before the first try.

        `since_s`: since when, by the monotonic clock; None: now, or since the last sign of life of
        a server that no longer answers pings.
        """
        self._drop_proof()
        self._error = error or self._error
        if self._since_s is not None:
            return
        now_s = time.monotonic()
        if since_s is None:
            is_silent = error is not None and error.reason == PEER_SILENT
            since_s = now_s - SILENCE_S if is_silent else now_s
        self._since_s = self._progress_s = max(since_s, self._answered_s)
        lasted_s = now_s - self._since_s
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(max(WARN_S - lasted_s, 0), self._warn)]
        if self._timeout_s is not None:
            left_s = max(self._timeout_s - lasted_s, 0)
            self._timers.append(loop.call_later(left_s, self._give_up))

    def end(self) -> None:
        """The server has answered."""
        self._answered_s = time.monotonic()
        self._drop_proof()
        if self._since_s is None:
            return
        if self._warned:
            lasted_s = time.monotonic() - self._since_s
            again = "accepts calls" if isinstance(self._error, ResourceExhausted) else "answers"
            log.warning("%s %s again, after %.0f s", self._server, again, lasted_s)
        self.close()

    def progress(self) -> None:
        """Something came in spite of the outage: its timeout counts from here."""
        self._progress_s = time.monotonic()

    def end_soon(self) -> None:
        """There is a connection: the outage is over if that lasts for `PROVEN_S`."""
        self._answered_s = time.monotonic()
        if self._error is None:
            self.end()
        elif self._since_s is not None and self._proof is None:
            self._proof = asyncio.get_running_loop().call_later(PROVEN_S, self.end)

    def close(self) -> None:
        """Forgets the outage, without a word."""
        self._drop_proof()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._since_s, self._error, self._warned = None, None, False

    def _drop_proof(self) -> None:
        if self._proof is not None:
            self._proof.cancel()
            self._proof = None

    def _why(self) -> str:
        return self._error.message if self._error is not None else "no connection yet"

    def _warn(self) -> None:
        self._warned = True
        assert self._since_s is not None
        lasted_s = time.monotonic() - self._since_s
        what = _outage_of(self._error)
        log.warning("%s %s for %.0f s: %s", self._server, what, lasted_s, self._why())

    def _give_up(self) -> None:
        assert self._timeout_s is not None
        if self._has_work():
            self.progress()
        left_s = self._progress_s + self._timeout_s - time.monotonic()
        if self._proof is not None:  # It may be over.
            left_s = max(left_s, PROVEN_S)
        if left_s > 0:
            self._timers.append(asyncio.get_running_loop().call_later(left_s, self._give_up))
            return
        what = _outage_of(self._error)
        problem = Unavailable(
            f"{self._server} {what} for outage_timeout, {self._timeout_s:g} s: {self._why()}",
            reason="OUTAGE_TIMEOUT",
        )
        self.close()
        self._on_timeout(problem)


class IngestWatch(OutageWatch):
    """Times for how long messages of a queue wait for ingests, and others pass them."""

    def __init__(
        self,
        queue_id: str,
        timeout_s: float | None,
        on_timeout: Callable[[Unavailable], None],
        has_work: Callable[[], bool],
    ) -> None:
        """As OutageWatch: `on_timeout` is for when no message comes at all."""
        server = f"an ingest that messages of queue {queue_id!r} wait for"
        super().__init__(server, timeout_s, on_timeout, has_work)

    def note(self, shards: Collection[int]) -> None:
        """What an answer of the broker says: messages wait for these."""
        if shards:
            named = ", ".join(map(str, shards))
            down = f"ingest {named} is down, or still reading payloads"
            self.begin(Unavailable(down, reason=INGEST_DOWN))
        else:
            self.end()
