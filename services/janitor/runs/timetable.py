"""Begins the jobs that are due by their schedules, those for which there is work."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from libs.storage.errors import StorageError
from services.janitor.runs.change_detector import has_changed
from services.janitor.runs.history import Run, RunRequest, RunStore, State, Trigger
from services.janitor.runs.schedule import Schedule
from slatemq.errors import FailedPrecondition, SlateMQError

log = logging.getLogger(__name__)

AGAIN_MS: Final = 60_000
"""After a look that failed since a shard or the store is away."""

_IDLE_S: Final = 3600.0


class Begin(Protocol):
    """Begins a run; raises FailedPrecondition while another run of the job has not ended."""

    async def __call__(
        self, ask: RunRequest, trigger: Trigger, *, seen: Mapping[str, int]
    ) -> Run: ...


class Timetable:
    def __init__(
        self,
        schedules: Mapping[str, Schedule],
        look: Callable[[str, int], Awaitable[Mapping[str, int]]],
        begin: Begin,
        store: RunStore,
        jitter_ms: int,
        now_ms: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`sleep` takes seconds, `chance` returns 0 to 1."""
        self._schedules = schedules
        self._look = look
        self._begin = begin
        self._store = store
        self._jitter_ms = jitter_ms
        self._now_ms = now_ms
        self._sleep = sleep
        self._chance = chance
        self._due: dict[str, int] = {}

    async def keep(self) -> None:
        """Begin due jobs until cancelled."""
        for job in self._schedules:
            self._due[job] = self._now_ms()
        first = set(self._schedules)
        while True:
            if not self._due:
                await self._sleep(_IDLE_S)
                continue
            job = min(self._due, key=lambda one: self._due[one])
            wait_ms = self._due[job] - self._now_ms()
            if wait_ms > 0:
                await self._sleep(wait_ms / 1000)
            try:
                self._due[job] = await (self._plan(job) if job in first else self._turn(job))
            except (StorageError, SlateMQError) as error:
                log.warning("%s cannot be looked at now: %s", job, error)
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
        """The runs of the whole job, the newest first."""
        kept = await self._store.latest(job)
        return [one.run for one in kept if one.run.ask == RunRequest(job)]

    def _later(self, schedule: Schedule, due_ms: int) -> int:
        return due_ms + int(schedule.spread_ms(self._jitter_ms) * self._chance())


def _last(runs: list[Run]) -> Run | None:
    """The last run that has done something, or is doing it."""
    unhappy = (State.CANCELLED, State.INTERRUPTED, State.FAILED)
    return next((run for run in runs if run.state not in unhappy), None)
