"""Runs of the janitor's jobs: beginning, watching and cancelling them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar
from uuid import uuid4

from slatemq._checks import check_on_progress, check_text, iterable
from slatemq._requests import fields_of, message_of
from slatemq._rpc.peers import BACKOFF_S, BACKOFF_S_MAX, Method
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import NotFound, Unavailable
from slatemq.models import Duration, Time, optional_ms, whole_seconds
from slatemq.v1 import janitor_pb2
from slatemq.v1.janitor_pb2_grpc import JanitorServiceStub

Q = TypeVar("Q")

PAGE_SIZE = 200


class JobRunState(StrEnum):
    """INTERRUPTED: its janitor stopped while it ran."""

    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a run.

    Attributes:
        phase: A few words about the current phase.
        phase_number: The number of the current phase, from 1.
        tasks_done: Finished Spark tasks of this phase, or databases that were read.
        tasks_count: Known Spark tasks of this phase, or databases; 0 = none yet.
    """

    phase: str
    phase_number: int
    phases_count: int
    tasks_done: int
    tasks_count: int


@dataclass(frozen=True, slots=True)
class JobFinding:
    """What a verification found.

    Attributes:
        kind: Such as `file`, `row`, `count`, `message`, `payload`, `object` or `leftover`.
        is_fault: Whether something is wrong or lost; a leftover only takes space.
        shard: The database, such as `broker/3`, or the folder of an object.
        record: What kind of record, file or object.
        key: Its key in words, or its path.
        queue_id: The queue that it is about; empty = none alone.
        message_ids: Messages that cannot be delivered because of it, the first 10.
        repaired: Whether the run has repaired it, or in a dry run would.
    """

    kind: str
    is_fault: bool
    shard: str
    record: str
    key: str
    wrong: str
    what_to_do: str
    queue_id: str
    message_ids: Sequence[int]
    repaired: bool


@dataclass(frozen=True, slots=True)
class JobRun:
    """A run of a job.

    Attributes:
        queue_ids: The queues of the job; empty = all.
        scheduled: Whether the janitor's schedule began it.
        janitor: The number of the janitor that runs it.
        started_at_ms: The time of its start; 0 = it waits, or never started.
        ended_at_ms: The time of its end; 0 = it has not ended.
        progress: None before the first report.
        counts: Its results by name, in a dry run those that a run would have; some also by queue,
            as `NAME/QUEUE`. Set at its end.
        artifacts: Paths of the files that it wrote, below the instance's root. Set at its end.
        phases: Its phases in order, each with its milliseconds. Set at its end.
        error: Why it failed, or was interrupted.
        findings: What `verify` or `repair` found, faults first, at most 200. Set at its end.
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
    findings: Sequence[JobFinding] = ()

    @property
    def ended(self) -> bool:
        return self.ended_at_ms > 0


class JanitorCalls(Calls):
    """Running jobs, and watching runs; a part of the client. Every janitor knows all runs."""

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
        sizes_only: bool = False,
        request_id: str = "",
    ) -> JobRun:
        """Begins a run of a job.

        Jobs are `retention`, `unreferenced`, `done`, `dead-letters`, `report`, `restore`, `verify`,
        `repair` and `backup`. The run does not need its caller any more. `dry_run`: only count what
        a run would remove. `older_than` is for `dead-letters`; `days` for `report`; `into`,
        `message_ids`, `failed_from` and `failed_until` for `restore`; `sizes_only` for `verify`
        and `repair`: do not read payload objects.
        Raises InvalidArgument, FailedPrecondition (JOB_RUNNING: its metadata has the `run_id`),
        ResourceExhausted, Unavailable.
        """
        check_text("into", into)
        check_text("request_id", request_id)
        request = message_of(
            janitor_pb2.RunJobRequest,
            job=job,
            dry_run=dry_run,
            queue_ids=iterable("queue_ids", "queue IDs", queue_ids),
            older_than_s=None if older_than is None else whole_seconds("older_than", older_than),
            days=days,
            target_queue_id=into,
            message_ids=iterable("message_ids", "message IDs", message_ids),
            failed_from_ms=optional_ms(failed_from, "failed_from") or 0,
            failed_until_ms=optional_ms(failed_until, "failed_until") or 0,
            sizes_only=sizes_only,
            request_id=request_id or str(uuid4()),
        )
        return await self._ask_run(lambda channel: JanitorServiceStub(channel).RunJob, request)

    async def get_job_run(self, run: JobRun | str) -> JobRun:
        """The run as it is now. Raises NotFound."""
        request = janitor_pb2.GetRunRequest(run_id=_id_of(run))
        return await self._ask_run(lambda channel: JanitorServiceStub(channel).GetRun, request)

    async def cancel_job_run(self, run: JobRun | str) -> JobRun:
        """Ends a run within seconds; what it has removed stays removed.

        Raises NotFound, FailedPrecondition (RUN_ENDED), Unavailable (its janitor is down).
        """
        request = janitor_pb2.CancelRunRequest(run_id=_id_of(run))
        return await self._ask_run(lambda channel: JanitorServiceStub(channel).CancelRun, request)

    async def list_job_runs(self, job: str = "") -> AsyncIterator[JobRun]:
        """The runs of a job, or of all, the newest first."""
        token = ""
        while True:
            request = message_of(
                janitor_pb2.ListRunsRequest, job=job, page_size=PAGE_SIZE, page_token=token
            )
            page = await self._peers.ask(
                self._peers.janitor, lambda channel: JanitorServiceStub(channel).ListRuns, request
            )
            for run in page.runs:
                yield _run_of(run)
            token = page.next_page_token
            if not token:
                break

    async def watch_job_run(self, run: JobRun | str) -> AsyncGenerator[JobRun, None]:
        """The run as it is now, and after each change, until it has ended.

        Waits for a janitor that is down for `call_timeout`. Raises NotFound, Unavailable.
        """
        run_id = _id_of(run)
        request = janitor_pb2.WatchRunRequest(run_id=run_id)
        loop = asyncio.get_running_loop()
        pause = BACKOFF_S
        until: float | None = loop.time() + self._peers.call_s
        while True:
            try:
                call = JanitorServiceStub(await self._peers.janitor()).WatchRun(request)
                async with self._peers.answers(call) as answers:
                    async for answer in answers:
                        one = _run_of(answer.run)
                        until, pause = None, BACKOFF_S
                        yield one
                        if one.ended:
                            return
            except Unavailable as error:
                # Since its first failure: a run may go without a change for longer.
                until = until or loop.time() + self._peers.call_s
                if error.reason == "CLIENT_CLOSED" or loop.time() + pause >= until:
                    raise
            self._peers.forget()
            await asyncio.sleep(pause)
            pause = min(pause * 2, BACKOFF_S_MAX)

    async def wait_job_run(
        self, run: JobRun | str, *, on_progress: Callable[[JobRun], None] | None = None
    ) -> JobRun:
        """Waits until it has ended; its `state` says how. Raises as `watch_job_run`."""
        if on_progress is not None:
            check_on_progress(on_progress)
        async for one in self.watch_job_run(run):
            if on_progress is not None:
                on_progress(one)
            if one.ended:
                return one
        raise NotFound("run", _id_of(run))

    async def read_report(self, run: JobRun | str) -> bytes:
        """The page of a `report` run, an HTML document. Raises NotFound, Unavailable."""
        response = await self._peers.ask(
            self._peers.janitor,
            lambda channel: JanitorServiceStub(channel).ReadReport,
            janitor_pb2.ReadReportRequest(run_id=_id_of(run)),
        )
        return response.page

    async def _ask_run(self, method: Method[Q, Any], request: Q) -> JobRun:
        """The run that a method of any janitor responds with."""
        return _run_of((await self._peers.ask(self._peers.janitor, method, request)).run)


def _id_of(run: JobRun | str) -> str:
    if isinstance(run, JobRun):
        return run.run_id
    check_text("run", run)
    return run


def _run_of(run: janitor_pb2.Run) -> JobRun:
    state = janitor_pb2.Run.State.Name(run.state).removeprefix("STATE_").lower()
    return JobRun(
        **fields_of(run, JobRun),
        job=run.request.job,
        dry_run=run.request.dry_run,
        queue_ids=list(run.request.queue_ids),
        scheduled=run.trigger == janitor_pb2.Run.TRIGGER_SCHEDULE,
        state=JobRunState(state),
        progress=JobProgress(**fields_of(run.progress, JobProgress))
        if run.HasField("progress")
        else None,
        counts=dict(sorted(run.counts.items())),
        artifacts=list(run.artifacts),
        phases=[(one.phase, one.took_ms) for one in run.phases],
        findings=[
            JobFinding(**fields_of(one, JobFinding), message_ids=list(one.message_ids))
            for one in run.findings
        ],
    )
