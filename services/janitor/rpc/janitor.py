"""JanitorService: from protobuf to the runs and back; every field is checked first."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from libs.access.current import ALL_QUEUES, require
from libs.serving.limits import REQUEST_ID_BYTES_MAX
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.requests.paging import bad_page_token, checked_page_size
from libs.storage.errors import ObjectNotFound
from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.janitor.asking import asking, find_owner, is_moving
from services.janitor.config import U32_MAX
from services.janitor.jobs.contract import VERIFYING
from services.janitor.rpc.archived import ArchivedDeadLetters
from services.janitor.runs.history import (
    Run,
    RunRequest,
    RunStore,
    State,
    Trigger,
    is_run_id,
    seen_now,
)
from services.janitor.runs.runner import Runner
from slatemq._admin.job_names import JOBS
from slatemq._requests import fields_of
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from slatemq.v1 import janitor_pb2, janitor_pb2_grpc, queue_pb2
from slatemq.v1 import queue_pb2_grpc as queue_grpc

QUEUES_MAX: Final = 1_000
MESSAGES_MAX: Final = 10_000
HANDLES_MAX: Final = 1_000
DAYS_MAX: Final = 3_660

_QUEUE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_LATEST_MS: Final = (1 << 48) - 1


def ask_of(request: janitor_pb2.RunJobRequest) -> RunRequest:
    """The request of a run. Raises InvalidArgument naming the field."""
    job = checked_job(request.job)
    _only("older_than_s", request.HasField("older_than_s"), job, "dead-letters")
    _only("days", request.days != 0, job, "report")
    for field in ("target_queue_id", "message_ids", "failed_from_ms", "failed_until_ms"):
        _only(field, bool(getattr(request, field)), job, "restore")
    if job == "unreferenced" and request.queue_ids:
        raise InvalidArgument(
            "queue_ids", "not supported: unreferenced covers messages that no queue needs"
        )
    if job == "backup" and request.queue_ids:
        raise InvalidArgument("queue_ids", "not supported: a backup covers all queues")
    if job in VERIFYING and request.queue_ids:
        raise InvalidArgument("queue_ids", f"not supported: {job} covers the whole instance")
    if request.sizes_only and job not in VERIFYING:
        raise InvalidArgument("sizes_only", f"is for verify and repair, not for {job}")
    _check_count("queue_ids", len(request.queue_ids), QUEUES_MAX)
    for place, queue_id in enumerate(request.queue_ids):
        _check_queue(f"queue_ids[{place}]", queue_id)
    if request.target_queue_id:
        _check_queue("target_queue_id", request.target_queue_id)
    _check_count("message_ids", len(request.message_ids), MESSAGES_MAX)
    for place, message_id in enumerate(request.message_ids):
        _check_range(f"message_ids[{place}]", message_id, 1, MAX_MESSAGE_ID)
    _check_range("older_than_s", request.older_than_s, 0, U32_MAX)
    _check_range("days", request.days, 0, DAYS_MAX)
    _check_range("failed_from_ms", request.failed_from_ms, 0, _LATEST_MS)
    _check_range("failed_until_ms", request.failed_until_ms, 0, _LATEST_MS)
    if request.failed_until_ms and request.failed_until_ms <= request.failed_from_ms:
        raise InvalidArgument("failed_until_ms", "must be after failed_from_ms")
    if len(request.request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument("request_id", f"has at most {REQUEST_ID_BYTES_MAX} bytes")
    return RunRequest(
        **fields_of(request, RunRequest),
        queue_ids=tuple(request.queue_ids),
        message_ids=tuple(request.message_ids),
    )


def check_archive_query(request: janitor_pb2.ReadArchivedRequest) -> None:
    """Raises InvalidArgument naming the field."""
    _check_queue("queue_id", request.queue_id)
    _check_count("handles", len(request.handles), HANDLES_MAX)
    for place, handle in enumerate(request.handles):
        if not handle.startswith(f"{request.queue_id}/"):
            raise InvalidArgument(
                f"handles[{place}]", f"is not a handle of queue {request.queue_id!r}"
            )
    _check_range("archived_from_ms", request.archived_from_ms, 0, _LATEST_MS)
    _check_range("archived_until_ms", request.archived_until_ms, 0, _LATEST_MS)
    if request.archived_until_ms and request.archived_until_ms <= request.archived_from_ms:
        raise InvalidArgument("archived_until_ms", "must be after archived_from_ms")
    _check_range("max_entries", request.max_entries, 0, U32_MAX)
    for field in ("archived_from_ms", "archived_until_ms", "newest_first", "max_entries"):
        if request.handles and getattr(request, field):
            raise InvalidArgument(field, "cannot be combined with handles: leave one of them out")


def checked_job(job: str) -> str:
    if job not in JOBS:
        raise InvalidArgument(
            "job", f"unknown job {job[:64]!r} (expected one of {', '.join(JOBS)})"
        )
    return job


def checked_run_id(run_id: str) -> str:
    if not is_run_id(run_id):
        like = "20261121-130311-482-retention-9f3a2c"
        raise InvalidArgument(
            "run_id", f"{run_id[:64]!r} is not the ID of a run (expected one such as {like})"
        )
    return run_id


def _only(field: str, given: bool, job: str, of: str) -> None:
    if given and job != of:
        raise InvalidArgument(field, f"is for {of} alone, not for {job}")


def _check_queue(field: str, queue_id: str) -> None:
    if not _QUEUE_ID.fullmatch(queue_id):
        raise InvalidArgument(field, "must be 1 to 255 characters of A-Z a-z 0-9 . _ -")


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgument(field, f"{count} are given, at most {most} are allowed")


def _check_range(field: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise InvalidArgument(
            field, f"must be {least}..{most}, not {number}", reason="OUT_OF_RANGE"
        )


PAGE_RUNS: Final = 50
PAGE_RUNS_MAX: Final = 500

QUEUES_AT_ONCE: Final = 32
"""Sought together, on all brokers."""


@dataclass(eq=False)
class NamedQueues:
    """Checks that the queues a run names exist: with a wrong name it would find nothing to do."""

    _directory: TopologyDirectory
    _channels: Channels

    async def check(self, ask: RunRequest) -> None:
        """Raises NotFound for a queue that no broker has, Unavailable, StoreUnavailable."""
        named = [*ask.queue_ids, *filter(None, [ask.target_queue_id])]
        left = list(dict.fromkeys(named))
        if not left:
            return
        # A broker, or a queue on it, may have come since the last look.
        shards = list((await self._directory.read(max_age_ms=0)).brokers)
        for begin in range(0, len(left), QUEUES_AT_ONCE):
            some = left[begin : begin + QUEUES_AT_ONCE]
            owners = await asyncio.gather(*(self._owner(queue, shards) for queue in some))
            if None in owners:
                raise NotFound("queue", some[owners.index(None)])

    async def _owner(self, queue: str, shards: Sequence[int]) -> int | None:
        async def ask(shard: int) -> None:
            try:
                with asking("broker", shard):
                    stub = queue_grpc.QueueServiceStub(await self._channels.to("broker", shard))
                    await stub.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue))
            except Unavailable as error:
                if not is_moving(error, queue):
                    raise

        return await find_owner(shards, ask)


@dataclass(eq=False)
class JanitorServicer(janitor_pb2_grpc.JanitorServiceServicer):
    _runner: Runner
    _store: RunStore
    _archived: ArchivedDeadLetters
    _queues: NamedQueues
    _channels: Channels  # to other janitors
    _now_ms: Callable[[], int]

    async def RunJob(
        self, request: janitor_pb2.RunJobRequest, context: Any
    ) -> janitor_pb2.RunJobResponse:
        ask = ask_of(request)
        if ask.job == "restore":
            # Elsewhere, callers could read dead letters of a queue that they may not inspect.
            for queue_id in (
                *(ask.queue_ids or [ALL_QUEUES]),
                *filter(None, [ask.target_queue_id]),
            ):
                require("edit", queue_id)
        try:
            await self._queues.check(ask)
        except NotFound:
            # The queue may have gone since the run was begun that this asks for once more.
            known = await self._runner.begun(ask.job, request.request_id)
            if known is None:
                raise
            return janitor_pb2.RunJobResponse(run=_run_of(known))
        run = await self._runner.begin(ask, Trigger.REQUEST, request.request_id)
        return janitor_pb2.RunJobResponse(run=_run_of(run))

    async def GetRun(
        self, request: janitor_pb2.GetRunRequest, context: Any
    ) -> janitor_pb2.GetRunResponse:
        run = await self._runner.find(checked_run_id(request.run_id))
        return janitor_pb2.GetRunResponse(run=_run_of(run))

    async def ListRuns(
        self, request: janitor_pb2.ListRunsRequest, context: Any
    ) -> janitor_pb2.ListRunsResponse:
        if request.job:
            checked_job(request.job)
        size = checked_page_size(request.page_size, PAGE_RUNS, PAGE_RUNS_MAX)
        if request.page_token and not is_run_id(request.page_token):
            raise bad_page_token()
        ids = await self._store.ids(request.job)
        left = [one for one in ids if not request.page_token or one < request.page_token]
        page = await self._store.read(left[:size])
        now_ms = self._now_ms()
        return janitor_pb2.ListRunsResponse(
            runs=[
                _run_of(replace(self._runner.current(seen_now(one.run, now_ms)), findings=()))
                for one in page
            ],
            next_page_token=left[size - 1] if len(left) > size else "",
        )

    async def CancelRun(
        self, request: janitor_pb2.CancelRunRequest, context: Any
    ) -> janitor_pb2.CancelRunResponse:
        run = await self._runner.find(checked_run_id(request.run_id))
        if run.state is State.CANCELLED:
            return janitor_pb2.CancelRunResponse(run=_run_of(run))
        if run.ended:
            raise FailedPrecondition(
                "RUN_ENDED", f"run {run.run_id} is {run.state}", subject=run.run_id
            )
        if self._runner.is_here(run):
            return janitor_pb2.CancelRunResponse(run=_run_of(self._runner.cancel(run.run_id)))
        number = self._runner.elsewhere(run)
        with asking("janitor", number):
            stub = janitor_pb2_grpc.JanitorServiceStub(await self._channels.to("janitor", number))
            return await stub.CancelRun(request)

    async def WatchRun(
        self, request: janitor_pb2.WatchRunRequest, context: Any
    ) -> AsyncGenerator[janitor_pb2.WatchRunResponse, None]:
        last = None
        async with aclosing(self._runner.watch(checked_run_id(request.run_id))) as runs:
            async for run in runs:
                result = _run_of(run)
                if result != last:
                    yield janitor_pb2.WatchRunResponse(run=result)
                last = result

    async def ReadReport(
        self, request: janitor_pb2.ReadReportRequest, context: Any
    ) -> janitor_pb2.ReadReportResponse:
        run = await self._runner.find(checked_run_id(request.run_id))
        path = next((path for path in run.artifacts if path.endswith(".html")), None)
        if path is None:
            raise NotFound("report", run.run_id)
        try:
            page = await self._store.artifact(path)
        except ObjectNotFound as error:
            raise NotFound("report", run.run_id) from error
        return janitor_pb2.ReadReportResponse(page=page)

    async def ReadArchived(
        self, request: janitor_pb2.ReadArchivedRequest, context: Any
    ) -> AsyncGenerator[janitor_pb2.ReadArchivedResponse, None]:
        check_archive_query(request)
        async with aclosing(self._archived.read(request)) as entries:
            async for entry in entries:
                yield janitor_pb2.ReadArchivedResponse(entry=entry)


def _run_of(run: Run) -> janitor_pb2.Run:
    record = janitor_pb2.Run(
        run_id=run.run_id,
        request=janitor_pb2.RunJobRequest(**vars(run.ask)),
        trigger=janitor_pb2.Run.Trigger.Value(f"TRIGGER_{run.trigger.name}"),
        state=janitor_pb2.Run.State.Value(f"STATE_{run.state.name}"),
        janitor=run.janitor,
        created_at_ms=run.created_at_ms,
        started_at_ms=run.started_at_ms,
        ended_at_ms=run.ended_at_ms,
        counts=run.counts,
        artifacts=run.artifacts,
        phases=[
            janitor_pb2.RunPhase(phase=phase, took_ms=round(seconds * 1000))
            for phase, seconds in run.phases
        ],
        error=run.error,
        findings=[janitor_pb2.Finding(**one) for one in run.findings],
    )
    if run.progress is not None:
        record.progress.CopyFrom(janitor_pb2.RunProgress(**vars(run.progress)))
    return record
