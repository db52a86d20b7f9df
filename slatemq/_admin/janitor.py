"""Runs of the janitor's jobs: begun, watched, cancelled; a part of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import uuid4

from slatemq._checks import check_text, iterable, message_of
from slatemq._rpc.peers import BACKOFF_S, BACKOFF_S_MAX, Peers, errors_translated
from slatemq.errors import NotFound, Unavailable
from slatemq.models import Duration, Time, time_ms, whole_seconds
from slatemq.v1 import janitor_pb2, janitor_pb2_grpc

RESOURCE = "run"

PAGE_RUNS = 200


class JobRunState(StrEnum):
    """What a run is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a run is.

    Attributes:
        phase: What it is doing, in a few words.
        phase_number: Which of its phases that is, from 1.
        tasks_done: Of this phase's tasks in Spark, so far.
        tasks_count: Of this phase's tasks in Spark, as far as they are known; 0 = none yet.
    """

    phase: str
    phase_number: int
    phases_count: int
    tasks_done: int
    tasks_count: int


@dataclass(frozen=True, slots=True)
class JobRun:
    """A run of a job.

    Attributes:
        queue_ids: Of which queues; none named is all.
        scheduled: Whether its janitor's schedule began it.
        janitor: The number of the janitor that runs it.
        started_at_ms: When it began to run; 0 = it waits, or never did.
        ended_at_ms: When it ended; 0 = it has not.
        progress: None before it says.
        counts: What it did, by name; in a dry run what would go, for some queues also as
            `NAME/QUEUE`. At its end.
        artifacts: Paths below the instance's root of what it wrote. At its end.
        phases: What it did, in order, each with its milliseconds. At its end.
        error: Why it failed, or was interrupted.
    """

    run_id: str
    job: str
    dry_run: bool
    queue_ids: Sequence[str]
    scheduled: bool
    state: JobRunState
    janitor: int
    created_at_ms: int
    started_at_ms: int
    ended_at_ms: int
    progress: JobProgress | None
    counts: Mapping[str, int] = field(default_factory=dict)
    artifacts: Sequence[str] = ()
    phases: Sequence[tuple[str, int]] = ()
    error: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.ended_at_ms > 0


class JanitorCalls:
    """Running jobs, and looking after runs; a part of the client. Any janitor knows of all runs."""

    _peers: Peers

    async def run_job(
        self,
        job: str,
        *,
        dry_run: bool = False,
        queue_ids: Iterable[str] = (),
        older_than: Duration | None = None,
        days: int = 0,
        into: str = "",
        message_ids: Iterable[int] = (),
        failed_from: Time | None = None,
        failed_until: Time | None = None,
        request_id: str = "",
    ) -> JobRun:
        """Begins a run of `retention`, `unreferenced`, `done`, `dead-letters`, `report`, `restore`.

        It goes on in the janitor whatever becomes of the caller. `dry_run`: count what would go.
        `older_than`: of `dead-letters`; `days`: of `report`; `into`, `message_ids`, `failed_from`,
        `failed_until`: of `restore`.
        Raises InvalidArgument, FailedPrecondition (JOB_RUNNING: its metadata has the `run_id`),
        ResourceExhausted, Unavailable.
        """
        request = message_of(
            janitor_pb2.RunJobRequest,
            job=job,
            dry_run=dry_run,
            queue_ids=iterable("queue_ids", "queue IDs", queue_ids),
            older_than_s=None if older_than is None else whole_seconds("older_than", older_than),
            days=days,
            target_queue_id=into,
            message_ids=iterable("message_ids", "message IDs", message_ids),
            failed_from_ms=0 if failed_from is None else time_ms(failed_from, "failed_from"),
            failed_until_ms=0 if failed_until is None else time_ms(failed_until, "failed_until"),
            request_id=request_id or str(uuid4()),
        )
        return _run_of((await self._ask_janitor("RunJob", request)).run)

    async def get_job_run(self, run: JobRun | str) -> JobRun:
        """How far a run is. Raises NotFound."""
        request = janitor_pb2.GetRunRequest(run_id=_id_of(run))
        return _run_of((await self._ask_janitor("GetRun", request)).run)

    async def cancel_job_run(self, run: JobRun | str) -> JobRun:
        """Ends a run within seconds; what it has removed stays removed.

        Raises NotFound, FailedPrecondition (RUN_ENDED), Unavailable (its janitor is away).
        """
        request = janitor_pb2.CancelRunRequest(run_id=_id_of(run))
        return _run_of((await self._ask_janitor("CancelRun", request)).run)

    async def list_job_runs(self, job: str = "") -> AsyncIterator[JobRun]:
        """The runs of a job, or of all, the newest first."""
        token = ""
        while True:
            request = message_of(
                janitor_pb2.ListRunsRequest, job=job, page_size=PAGE_RUNS, page_token=token
            )
            page = await self._ask_janitor("ListRuns", request)
            for run in page.runs:
                yield _run_of(run)
            token = page.next_page_token
            if not token:
                break

    async def watch_job_run(self, run: JobRun | str) -> AsyncGenerator[JobRun, None]:
        """The run as it is now, and whenever that changes, until it has ended.

        While the janitor is away it is waited for, as long as `call_timeout`. Raises NotFound,
        Unavailable.
        """
        run_id = _id_of(run)
        request = janitor_pb2.WatchRunRequest(run_id=run_id)
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._peers.call_s, BACKOFF_S
        while True:
            try:
                async with aclosing(self._watch(request)) as runs:
                    async for one in runs:
                        until, pause = loop.time() + self._peers.call_s, BACKOFF_S
                        yield one
                        if one.ended:
                            return
            except Unavailable as error:
                if error.reason == "CLIENT_CLOSED" or loop.time() + pause >= until:
                    raise
            self._peers.forget()
            await asyncio.sleep(pause)
            pause = min(pause * 2, BACKOFF_S_MAX)

    async def wait_job_run(
        self, run: JobRun | str, *, on_progress: Callable[[JobRun], None] | None = None
    ) -> JobRun:
        """Waits until it has ended; look at its `state` for how. Raises as `watch_job_run`."""
        async for one in self.watch_job_run(run):
            if on_progress is not None:
                on_progress(one)
            if one.ended:
                return one
        raise NotFound(RESOURCE, _id_of(run))

    async def _watch(self, request: janitor_pb2.WatchRunRequest) -> AsyncGenerator[JobRun, None]:
        stub: Any = janitor_pb2_grpc.JanitorServiceStub(await self._peers.janitor())
        call = stub.WatchRun(request)
        answers = aiter(call)
        try:
            with errors_translated():
                while (answer := await self._peers.unless_closed(anext(answers, None))) is not None:
                    yield _run_of(answer.run)
        finally:
            call.cancel()

    async def _ask_janitor(self, method: str, request: Any) -> Any:
        async def attempt(timeout: float) -> Any:
            stub = janitor_pb2_grpc.JanitorServiceStub(await self._peers.janitor())
            return await getattr(stub, method)(request, timeout=timeout)

        return await self._peers.call(attempt)


def _id_of(run: JobRun | str) -> str:
    if isinstance(run, JobRun):
        return run.run_id
    check_text("run_id", run)
    return run


_STATES = {
    janitor_pb2.Run.STATE_WAITING: JobRunState.WAITING,
    janitor_pb2.Run.STATE_RUNNING: JobRunState.RUNNING,
    janitor_pb2.Run.STATE_CANCELLING: JobRunState.CANCELLING,
    janitor_pb2.Run.STATE_DONE: JobRunState.DONE,
    janitor_pb2.Run.STATE_FAILED: JobRunState.FAILED,
    janitor_pb2.Run.STATE_CANCELLED: JobRunState.CANCELLED,
    janitor_pb2.Run.STATE_INTERRUPTED: JobRunState.INTERRUPTED,
}


def _run_of(run: janitor_pb2.Run) -> JobRun:
    progress = run.progress
    return JobRun(
        run_id=run.run_id,
        job=run.request.job,
        dry_run=run.request.dry_run,
        queue_ids=list(run.request.queue_ids),
        scheduled=run.trigger == janitor_pb2.Run.TRIGGER_SCHEDULE,
        state=_STATES[run.state],
        janitor=run.janitor,
        created_at_ms=run.created_at_ms,
        started_at_ms=run.started_at_ms,
        ended_at_ms=run.ended_at_ms,
        progress=JobProgress(
            progress.phase,
            progress.phase_number,
            progress.phases_count,
            progress.tasks_done,
            progress.tasks_count,
        )
        if run.HasField("progress")
        else None,
        counts=dict(sorted(run.counts.items())),
        artifacts=list(run.artifacts),
        phases=[(one.phase, one.took_ms) for one in run.phases],
        error=run.error,
    )
