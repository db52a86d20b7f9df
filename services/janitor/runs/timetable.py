"""Begins the jobs that are due by their schedules, those for which there is work.

A job is due every so often, or by a cron expression:

1h    30m    1d                 after the last time
17 3 * * *    */20 8-17 * * 1-5 minute, hour, day, month, weekday, in UTC
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from cronsim import CronSim, CronSimError

from libs.storage.errors import StorageError
from services.janitor.runs.change_detector import has_changed
from services.janitor.runs.history import (
    STALE_MS,
    Run,
    RunRequest,
    RunStore,
    State,
    Trigger,
    seen_now,
)
from slatemq.errors import FailedPrecondition, SlateMQError

_SPAN: Final = re.compile(r"(\d{1,9})(s|m|h|d)", re.ASCII)
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_EVERY_MS_MIN: Final = 1_000
_EVERY_MS_MAX: Final = 366 * _UNIT_MS["d"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


class Schedule(Protocol):
    """When a job is due. Times in ms since 1970."""

    def after(self, last_ms: int) -> int:
        """The first time after this one."""

    def first(self, now_ms: int) -> int:
        """The first time for a job that was never done."""

    def spread_ms(self, most_ms: int) -> int:
        """How much later it may begin by chance, of at most `most_ms`."""


@dataclass(frozen=True)
class Every:
    """This long after the last run; immediately for a job that never ran."""

    length_ms: int

    def after(self, last_ms: int) -> int:
        return last_ms + self.length_ms

    def first(self, now_ms: int) -> int:
        return now_ms

    def spread_ms(self, most_ms: int) -> int:
        return min(most_ms, self.length_ms // 4)


@dataclass(frozen=True)
class Cron:
    """At times of the clock, in UTC."""

    expression: str

    def after(self, last_ms: int) -> int:
        return (next(CronSim(self.expression, _EPOCH + last_ms * _MS)) - _EPOCH) // _MS

    def first(self, now_ms: int) -> int:
        return self.after(now_ms)

    def spread_ms(self, most_ms: int) -> int:
        return most_ms


def parse_schedule(text: str) -> Schedule | None:
    """The schedule of a setting; None for an empty one: never. Raises ValueError, saying why."""
    text = text.strip()
    if not text:
        return None
    span = _SPAN.fullmatch(text)
    if span is not None:
        length_ms = int(span[1]) * _UNIT_MS[span[2]]
        if not _EVERY_MS_MIN <= length_ms <= _EVERY_MS_MAX:
            raise ValueError(f"{text!r} is not within 1s and 366d")
        return Every(length_ms)
    if len(text.split()) != 5:
        raise ValueError(
            f"{text!r} is neither a time such as 30m, 6h or 1d nor the five fields of cron"
        )
    schedule = Cron(text)
    try:
        schedule.after(0)
    except CronSimError as error:
        raise ValueError(f"{text!r}: {error}") from None
    except StopIteration:
        raise ValueError(f"{text!r} never comes") from None
    return schedule


log = logging.getLogger(__name__)

AGAIN_MS: Final = 60_000
"""After a look that failed since a shard or the store is down."""

LOOK_S: Final = 3600.0
"""How often the clock is read again at least."""


class Begin(Protocol):
    """Begins a run; raises FailedPrecondition while another run of the job has not ended."""

    async def __call__(
        self, ask: RunRequest, trigger: Trigger, *, seen: Mapping[str, int]
    ) -> Run: ...


@dataclass(eq=False)
class Timetable:
    """Begins jobs; `sleep` takes seconds, `chance` returns 0 to 1."""

    _schedules: Mapping[str, Schedule]
    _look: Callable[[str, int], Awaitable[Mapping[str, int]]]
    _begin: Begin
    _store: RunStore
    _jitter_ms: int
    _now_ms: Callable[[], int]
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _chance: Callable[[], float] = random.random
    _due: dict[str, int] = field(default_factory=dict, init=False)

    async def keep(self) -> None:
        """Begin due jobs until cancelled."""
        for job in self._schedules:
            self._due[job] = self._now_ms()
        first = set(self._schedules)
        before_ms = self._now_ms()
        while True:
            now_ms = self._now_ms()
            if now_ms < before_ms - STALE_MS:
                log.warning("the clock was ahead by %d s", (before_ms - now_ms) // 1000)
                self._due = dict.fromkeys(self._schedules, now_ms)
                first = set(self._schedules)
            before_ms = now_ms
            job = min(self._due, key=lambda one: self._due[one], default="")
            wait_s = (self._due[job] - now_ms) / 1000 if job else LOOK_S
            if wait_s > 0:
                # Not for longer: the clock may be set, and does not go on while a machine sleeps.
                await self._sleep(min(wait_s, LOOK_S))
                continue
            try:
                self._due[job] = await (self._plan(job) if job in first else self._turn(job))
            except (StorageError, SlateMQError) as error:
                log.warning("cannot find out whether the job %s has work to do: %s", job, error)
                self._due[job] = self._now_ms() + AGAIN_MS
            else:
                first.discard(job)

    async def _plan(self, job: str) -> int:
        """When a job is first due, by when it was last done; at once for a time that was missed."""
        now_ms, schedule = self._now_ms(), self._schedules[job]
        last = _last(await self._runs(job))
        due_ms = schedule.after(last.created_at_ms) if last else schedule.first(now_ms)
        return self._later(schedule, max(due_ms, now_ms))

    async def _turn(self, job: str) -> int:
        """Begin a job if it has work and was not begun elsewhere; returns when it is due next."""
        now_ms, schedule = self._now_ms(), self._schedules[job]
        runs = await self._runs(job)
        last = _last(runs)
        if last is not None and schedule.after(last.created_at_ms) > now_ms:
            # Another janitor has done it, or it was requested.
            return self._later(schedule, schedule.after(last.created_at_ms))
        probe = await self._look(job, now_ms)
        done = next((run for run in runs if run.state is State.DONE and run.seen), None)
        since_ms = now_ms - done.ended_at_ms if done else 0
        if has_changed(probe, done.seen if done else None, since_ms):
            try:
                await self._begin(RunRequest(job), Trigger.SCHEDULE, seen=probe)
            except FailedPrecondition as error:
                log.info("%s is not begun: %s", job, error.message)
        else:
            log.debug("nothing to do for %s", job, extra=dict(probe))
        return self._later(schedule, schedule.after(now_ms))

    async def _runs(self, job: str) -> list[Run]:
        """The runs of the whole job, the newest first.

        Without those from the future, by a clock that was ahead: they would count as the last ones
        until then.
        """
        kept, now_ms = await self._store.latest(job), self._now_ms()
        runs = [one.run for one in kept if one.run.ask == RunRequest(job)]
        if ahead := [run.run_id for run in runs if run.created_at_ms > now_ms + STALE_MS]:
            log.warning("runs from the future do not count: %s", ", ".join(ahead))
        return [seen_now(run, now_ms) for run in runs if run.run_id not in ahead]

    def _later(self, schedule: Schedule, due_ms: int) -> int:
        return due_ms + int(schedule.spread_ms(self._jitter_ms) * self._chance())


def _last(runs: list[Run]) -> Run | None:
    """The last run that has done something, or is doing it."""
    unhappy = (State.CANCELLED, State.INTERRUPTED, State.FAILED)
    return next((run for run in runs if run.state not in unhappy), None)
