"""Runs jobs, one after the other, each with a child process, and keeps their history current."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context, get_current

from libs.serving.peers.calls import Backoff
from libs.storage.errors import ObjectNotFound, StorageError
from libs.storage.objects.requests import RequestCounts
from services.janitor.jobs.contract import Progress
from services.janitor.runs.child import Child
from services.janitor.runs.history import (
    STALE_MS,
    Run,
    RunEvents,
    RunRequest,
    RunStore,
    Sightings,
    State,
    Stored,
    Trigger,
    interrupted,
    new_run_id,
    seen_now,
)
from slatemq.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable

log = logging.getLogger(__name__)

WAITING_MAX: Final = 16
"""There are nine jobs, and two runs of one never wait at the same time."""

HEARTBEAT_S: Final = STALE_MS / 6 / 1000

WATCH_S: Final = 0.2
"""Between two answers of a watch."""

ELSEWHERE_S: Final = 1.0
"""Between two looks at a run of another janitor, of which nothing but its object is known here."""

_ENDS: Final = {
    "done": State.DONE,
    "failed": State.FAILED,
    "cancelled": State.CANCELLED,
    "lost": State.FAILED,
}


@dataclass(frozen=True)
class HistoryLimits:
    """How many runs the history keeps, and for how long after their end (0: without limit)."""

    runs: int
    for_ms: int


@dataclass
class Active:
    """A run of this process that has not ended.

    Attributes:
        stored: What was last written of `run`.
        changed: Set, and replaced, with each change.
        why: Why it is to end early.
        context: The trace of the call that began it; empty where the schedule did.
    """

    stored: Stored
    run: Run
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    child: Child | None = None
    why: State | None = None
    replaced: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    context: Context = field(default_factory=get_current)

    def update(self, **changes: Any) -> None:
        """Change these fields of the run, and wake its watchers."""
        self.run = replace(self.run, **changes)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


@dataclass(eq=False)
class Runner:
    """Runs a job's command for each run, with the task that `task_of` makes.

    `release` gets the snapshots that are left. `check_job` raises FailedPrecondition where a job
    cannot run. `events` gets each run that has
    begun or ended, `measure` each that has ended, `count` what it has asked of stores.
    """

    _store: RunStore
    _number: int
    _command_of: Callable[[str], Sequence[str]]
    _task_of: Callable[[Run], Mapping[str, Any]]
    _release: Callable[[Sequence[tuple[str, str]]], Awaitable[None]]
    _kept: HistoryLimits
    _now_ms: Callable[[], int]
    _check_job: Callable[[str], None]
    _tracer: trace.Tracer
    _events: RunEvents
    _measure: Callable[[Run], None]
    _count: Callable[[RequestCounts], None]
    _process: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: deque[Active] = field(default_factory=deque, init=False)
    _active: dict[str, Active] = field(default_factory=dict, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _write: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup, init=False)
    _stopping: bool = field(default=False, init=False)
    _sightings: Sightings = field(default_factory=Sightings, init=False)

    async def take_over(self) -> None:
        """End the runs of an earlier process of this number. Raises StoreUnavailable."""
        for stored in await self._store.latest():
            run = stored.run
            if run.janitor != self._number or run.ended or run.run_id in self._active:
                continue
            await self._release(run.snapshots)
            ended = interrupted(run, self._now_ms(), "its janitor died, or another took its place")
            if await self._store.save(stored, replace(ended, snapshots=())):
                self._events.changed(stored.run)
                self._measure(stored.run)
                log.warning("a run was interrupted", extra={"run": run.run_id})

    # --- What callers do ----------------------------------------------------

    async def begin(
        self,
        ask: RunRequest,
        trigger: Trigger,
        request_id: str = "",
        seen: Mapping[str, int] | None = None,
    ) -> Run:
        """A new run, or the one that the request ID began before.

        Raises FailedPrecondition (JOB_RUNNING, and what `check` raises), ResourceExhausted,
        Unavailable, StoreUnavailable.
        """
        # A caller that is cancelled must not leave a run that is stored but that no process has.
        return await asyncio.shield(self._begin(ask, trigger, request_id, seen or {}))

    async def _begin(
        self, ask: RunRequest, trigger: Trigger, request_id: str, seen: Mapping[str, int]
    ) -> Run:
        async with self._beginning:
            self._check_open()
            known = await self._latest(ask.job)
            if (begun := _begun_by(request_id, known)) is not None:
                return begun
            for run in known:
                if not run.ended:
                    raise FailedPrecondition(
                        "JOB_RUNNING",
                        f"{ask.job} is {run.state} already: {run.run_id}",
                        subject=run.run_id,
                        metadata={"run_id": run.run_id},
                    )
            self._check_job(ask.job)
            if len(self._waiting) >= WAITING_MAX:
                raise ResourceExhausted(
                    f"{WAITING_MAX} runs wait", reason="TOO_MANY_RUNS", retry_after_ms=10_000
                )
            now_ms = self._now_ms()
            run = Run(
                run_id=new_run_id(ask.job, now_ms),
                ask=ask,
                trigger=trigger,
                state=State.WAITING,
                janitor=self._number,
                process=self._process,
                created_at_ms=now_ms,
                alive_at_ms=now_ms,
                request_id=request_id,
                seen=seen,
                events=self._events.mark,
            )
            self._admit(await self._store.create(run))
            return run

    def _admit(self, stored: Stored) -> None:
        active = Active(stored, stored.run)
        self._active[active.run.run_id] = active
        self._waiting.append(active)
        self._wake.set()
        if self._stopping:  # Since a moment ago.
            self._end(active, State.INTERRUPTED)

    async def begun(self, job: str, request_id: str) -> Run | None:
        """The run that a request ID has begun, if any. Raises StoreUnavailable."""
        if not request_id:
            return None
        async with self._beginning:
            return _begun_by(request_id, await self._latest(job))

    async def _latest(self, job: str) -> list[Run]:
        """The last runs of a job. Call it with `_beginning`. Raises StoreUnavailable.

        One that was stored although its begin failed is begun now: its caller may ask again.
        """
        before, now_ms = set(self._active), self._now_ms()
        found: list[Run] = []
        for stored in await self._store.latest(job):
            run = self.current(self._sightings.judge(stored, now_ms))
            # One that was here before may have ended since it was read.
            is_new = run.process == self._process and run.run_id not in before
            if is_new and run.state is State.WAITING:
                self._admit(stored)
            found.append(run)
        return found

    async def find(self, run_id: str) -> Run:
        """A run of any janitor. Raises NotFound, StoreUnavailable."""
        active = self._active.get(run_id)
        if active is not None:
            return active.run
        try:
            return seen_now((await self._store.get(run_id)).run, self._now_ms())
        except (ObjectNotFound, ValueError):
            raise NotFound("run", run_id) from None

    def current(self, run: Run) -> Run:
        """The run as it is now, where it is of this process."""
        active = self._active.get(run.run_id)
        return active.run if active is not None else run

    def is_here(self, run: Run) -> bool:
        return run.run_id in self._active

    def elsewhere(self, run: Run) -> int:
        """The number of the janitor of a run that has not ended and is not of this process.

        Raises Unavailable where that number is its own: its process has just been replaced.
        """
        if run.janitor == self._number:
            raise Unavailable(f"run {run.run_id} is being interrupted", reason="JANITOR_REPLACED")
        return run.janitor

    def cancel(self, run_id: str) -> Run:
        """Begin to end a run of this process. Raises KeyError."""
        active = self._active[run_id]
        self._end(active, State.CANCELLED)
        return active.run

    async def watch(self, run_id: str) -> AsyncGenerator[Run, None]:
        """The run now, and after each change, until it has ended. Raises as `find`."""
        active = self._active.get(run_id)
        while active is not None:
            changed, run = active.changed, active.run
            yield run
            if run.ended:  # Not the run as it is now: it may have ended while this one was sent.
                return
            await asyncio.sleep(WATCH_S)
            await changed.wait()
        while True:
            run = await self.find(run_id)
            yield run
            if run.ended:
                return
            self._check_open()
            await asyncio.sleep(ELSEWHERE_S)

    # --- The work -----------------------------------------------------------

    async def work(self) -> None:
        """Run what waits until cancelled. Ends only by a bug."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._keep_alive())
            while True:
                while self._waiting:
                    await self._do(self._waiting.popleft())
                    await self._prune()
                self._wake.clear()
                await self._wake.wait()

    async def drain(self) -> None:
        """Begin no more runs, and end those that wait and run; returns when they have ended."""
        self._stopping = True
        for active in list(self._active.values()):
            self._end(active, State.INTERRUPTED)
        while self._active:
            await next(iter(self._active.values())).changed.wait()

    async def stop(self) -> None:
        """Store that what has not ended is interrupted. Call it after `work` was cancelled."""
        self._stopping = True
        for active in list(self._active.values()):
            run = interrupted(active.run, self._now_ms(), "its janitor was stopped")
            with suppress(StorageError):  # It will be seen as interrupted all the same.
                await self._write_down(active, run)
            self._forget(active, run)

    def _end(self, active: Active, why: State) -> None:
        if active.run.ended:
            return
        active.why = active.why or why
        active.update(state=State.CANCELLING)
        if active.child is not None:
            active.child.cancel()
        elif active in self._waiting:  # It need not wait for others to end.
            self._waiting.remove(active)
            self._tasks.create_task(self._do(active))

    async def _do(self, active: Active) -> None:
        """Bring a run to its end, and store that: one span, which the lines about it name."""
        name, facts = f"janitor {active.run.ask.job}", {"slatemq.run": active.run.run_id}
        with self._tracer.start_as_current_span(name, active.context, attributes=facts) as span:
            run = await self._bring_to_end(active)
            if run.state is State.FAILED:
                span.set_status(trace.StatusCode.ERROR, run.error)
            await self._save_end(active, run)

    async def _bring_to_end(self, active: Active) -> Run:
        if active.why is None:
            now_ms = self._now_ms()
            active.update(state=State.RUNNING, started_at_ms=now_ms)
            log.info("a run begins", extra={"run": active.run.run_id})
            await self._save(active)
            self._events.changed(active.run)
        end = await self._have_done(active)
        state = _ENDS.get(end["end"], State.FAILED)
        if active.why is not None and state is not State.DONE:
            state = active.why
        run = replace(
            active.run,
            state=state,
            ended_at_ms=self._now_ms(),
            counts=end.get("counts", {}),
            artifacts=tuple(end.get("artifacts", ())),
            phases=tuple((phase, seconds) for phase, seconds in end.get("phases", ())),
            findings=tuple(end.get("findings", ())),
            error=_ERRORS.get(state, str(end.get("error", ""))),
            snapshots=(),
        )
        level = logging.ERROR if state is State.FAILED else logging.INFO
        extra = {"run": run.run_id, "error": run.error} if run.error else {"run": run.run_id}
        log.log(level, "a run has ended: %s", state, extra=extra)
        self._measure(run)
        return run

    async def _have_done(self, active: Active) -> Mapping[str, Any]:
        if active.why is not None:
            return {"end": "cancelled"}
        command = self._command_of(active.run.ask.job)
        active.child = Child(command, lambda value: self._hear(active, value))
        try:
            end = await active.child.work(self._task_of(active.run))
        except OSError as error:
            return {"end": "failed", "error": f"Spark's process could not be started: {error}"}
        except Exception as error:  # the history is to say so, and the janitor goes on
            log.exception("a fault of the janitor", extra={"run": active.run.run_id})
            text = f"{type(error).__name__}: {error}"
            end = {"end": "lost", "error": f"a fault of the janitor: {text}"}
        finally:
            active.child = None
        if end["end"] == "lost":
            await self._release(active.run.snapshots)
        return end

    def _hear(self, active: Active, fields: Mapping[str, Any]) -> None:
        if "progress" in fields:
            active.update(progress=Progress(**fields["progress"]))
        elif "snapshot" in fields:
            base, one = fields["snapshot"]
            active.update(snapshots=(*active.run.snapshots, (base, one)))
            self._write.set()
        elif "requests" in fields:
            self._count(RequestCounts(**fields["requests"]))

    # --- The history --------------------------------------------------------

    async def _keep_alive(self) -> None:
        """Store the runs every HEARTBEAT_S, and as soon as they have snapshots to release."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._write.wait()
            self._write.clear()
            for active in list(self._active.values()):
                await self._save(active)

    async def _save(self, active: Active) -> None:
        run = replace(active.run, alive_at_ms=self._now_ms())
        try:
            async with active.writing:
                over = active.replaced or active.run.ended
                if over or await self._write_down(active, run):
                    return
        except StorageError as error:
            log.warning("a run is not written down: %s", error, extra={"run": run.run_id})
            return
        log.error("another janitor has taken this one's place", extra={"run": run.run_id})
        active.replaced = True
        self._end(active, State.INTERRUPTED)

    async def _save_end(self, active: Active, run: Run) -> None:
        """Store the end, and retry for as long as the store is down."""
        backoff = Backoff()
        try:
            while not active.replaced:
                try:
                    async with active.writing:
                        if await self._write_down(active, run):
                            self._events.changed(run)
                        else:
                            log.error(
                                "another process has written the run", extra={"run": run.run_id}
                            )
                    break
                except StorageError as error:
                    log.warning("the end of a run waits: %s", error, extra={"run": run.run_id})
                    if self._stopping:
                        break
                    await asyncio.sleep(backoff.next_seconds())
        finally:
            self._forget(active, run)

    async def _write_down(self, active: Active, run: Run) -> bool:
        """Store a newer state of a run; False: another process has written or removed it.

        Raises StoreUnavailable.
        """
        if await self._store.save(active.stored, run):
            return True
        for stored in await self._store.read([run.run_id]):
            # Another process would have ended it: this is a write whose answer was lost.
            if stored.run.process == self._process and not stored.run.ended:
                active.stored = stored
                return await self._store.save(stored, run)
        return False

    def _forget(self, active: Active, run: Run) -> None:
        self._active.pop(run.run_id, None)
        active.run = run
        active.update()

    async def _prune(self) -> None:
        try:
            gone = await self._store.prune(self._kept.runs, self._kept.for_ms, self._now_ms())
        except StorageError as error:
            log.warning("the history is not pruned: %s", error)
            return
        if gone:
            log.info("the history was pruned", extra={"runs": gone})

    def _check_open(self) -> None:
        if self._stopping:
            raise Unavailable("the janitor is stopping", reason="DRAINING")


def _begun_by(request_id: str, runs: Iterable[Run]) -> Run | None:
    """The run that a request ID has begun; an empty ID has begun none."""
    return next((run for run in runs if request_id and run.request_id == request_id), None)


_ERRORS: Final = {State.INTERRUPTED: "its janitor was stopped", State.CANCELLED: ""}
