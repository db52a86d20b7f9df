"""JanitorService: from protobuf to the runs and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from services.janitor.archive.archived import ArchivedDeadLetters
from services.janitor.asking import asking
from services.janitor.rpc.requests import archive_query, ask_of, checked_job, checked_run_id
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
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound
from slatemq.v1 import janitor_pb2, janitor_pb2_grpc, queue_pb2
from slatemq.v1 import queue_pb2_grpc as queue_grpc

PAGE_RUNS: Final = 50
PAGE_RUNS_MAX: Final = 500

CALLS_AT_ONCE: Final = 32


class NamedQueues:
    """Checks that the queues a run names exist: with a wrong name it would find nothing to do."""

    def __init__(self, directory: TopologyDirectory, channels: Channels) -> None:
        self._directory = directory
        self._channels = channels

    async def check(self, ask: RunRequest) -> None:
        """Raises NotFound for a queue that no broker has, Unavailable, StoreUnavailable."""
        named = [*ask.queue_ids, *filter(None, [ask.target_queue_id])]
        left = list(dict.fromkeys(named))
        if not left:
            return
        # A broker, or a queue on it, may have come since the last look.
        for shard in (await self._directory.read(max_age_ms=0)).brokers:
            left = await self._missing(shard, left)
        if left:
            raise NotFound("queue", left[0])

    async def _missing(self, shard: int, queues: Sequence[str]) -> list[str]:
        missing: list[str] = []
        for begin in range(0, len(queues), CALLS_AT_ONCE):
            some = queues[begin : begin + CALLS_AT_ONCE]
            there = await asyncio.gather(*(self._is_there(shard, queue) for queue in some))
            missing += [queue for queue, found in zip(some, there, strict=True) if not found]
        return missing

    async def _is_there(self, shard: int, queue: str) -> bool:
        try:
            with asking("broker", shard):
                stub = queue_grpc.QueueServiceStub(await self._channels.to("broker", shard))
                await stub.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue))
        except NotFound:
            return False
        return True


class JanitorServicer(janitor_pb2_grpc.JanitorServiceServicer):
    def __init__(
        self,
        runner: Runner,
        store: RunStore,
        archived: ArchivedDeadLetters,
        queues: NamedQueues,
        channels: Channels,
        now_ms: Callable[[], int],
    ) -> None:
        """The channels lead to other janitors."""
        self._archived = archived
        self._queues = queues
        self._runner = runner
        self._store = store
        self._channels = channels
        self._now_ms = now_ms

    async def RunJob(  # noqa: N802 - the RPC's name
        self, request: janitor_pb2.RunJobRequest, context: Any
    ) -> janitor_pb2.RunJobResponse:
        ask = ask_of(request)
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

    async def GetRun(  # noqa: N802 - the RPC's name
        self, request: janitor_pb2.GetRunRequest, context: Any
    ) -> janitor_pb2.GetRunResponse:
        run = await self._runner.find(checked_run_id(request.run_id))
        return janitor_pb2.GetRunResponse(run=_run_of(run))

    async def ListRuns(  # noqa: N802 - the RPC's name
        self, request: janitor_pb2.ListRunsRequest, context: Any
    ) -> janitor_pb2.ListRunsResponse:
        if request.job:
            checked_job("job", request.job)
        if request.page_size < 0:
            raise InvalidArgument("page_size", "may not be negative")
        if request.page_token and not is_run_id(request.page_token):
            raise InvalidArgument(
                "page_token", "is not one that ListRuns gave", reason="INVALID_PAGE_TOKEN"
            )
        size = min(request.page_size or PAGE_RUNS, PAGE_RUNS_MAX)
        ids = await self._store.ids(request.job)
        left = [one for one in ids if not request.page_token or one < request.page_token]
        page = await self._store.read(left[:size])
        now_ms = self._now_ms()
        return janitor_pb2.ListRunsResponse(
            runs=[_run_of(self._runner.current(seen_now(one.run, now_ms))) for one in page],
            next_page_token=left[size - 1] if len(left) > size else "",
        )

    async def CancelRun(  # noqa: N802 - the RPC's name
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

    async def WatchRun(  # noqa: N802 - the RPC's name
        self, request: janitor_pb2.WatchRunRequest, context: Any
    ) -> AsyncGenerator[janitor_pb2.WatchRunResponse, None]:
        last = None
        async with aclosing(self._runner.watch(checked_run_id(request.run_id))) as runs:
            async for run in runs:
                result = _run_of(run)
                if result != last:
                    yield janitor_pb2.WatchRunResponse(run=result)
                last = result

    async def ReadArchived(  # noqa: N802 - the RPC's name
        self, request: janitor_pb2.ReadArchivedRequest, context: Any
    ) -> AsyncGenerator[janitor_pb2.ReadArchivedResponse, None]:
        async with aclosing(self._archived.read(archive_query(request))) as entries:
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
    )
    if run.progress is not None:
        record.progress.CopyFrom(janitor_pb2.RunProgress(**vars(run.progress)))
    return record
