"""The runs of one janitor, as those see them who watch, and who measure."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.small_objects import Objects
from services.janitor.metrics import RunMeasures
from services.janitor.runs.history import (
    STALE_MS,
    Run,
    RunEvents,
    RunRequest,
    RunStore,
    State,
    Trigger,
    new_run_id,
)
from services.janitor.runs.runner import HistoryLimits, Runner
from slatemq.errors import FailedPrecondition

NOW_MS = 1_795_269_141_374

WAIT_S = 30.0

DONE = 'read task; echo \'{"end": "done"}\''
HELD = 'read task; echo \'{"snapshot": ["queues", "1"]}\'; read go < "$0"; echo \'{"end": "done"}\''
"""Commands of a shell, as a child: one that is done, one that is heard before it may be done."""


class Unanswered(Objects):
    """A store that does what it is asked to, but loses its answers, or holds them.

    Attributes:
        lost: Methods whose next answer is lost.
        held: Methods whose answers wait for `thawed`; `reached` is set once one does.
    """

    def __init__(self, *lost: str) -> None:
        objects = open_root("memory:///").objects
        super().__init__(objects._store.store, objects._folder, objects._durability)
        self.lost = set(lost)
        self.held: set[str] = set()
        self.reached = asyncio.Event()
        self.thawed = asyncio.Event()

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        written = await super().put_if_absent(path, data)
        await self._answer("put_if_absent")
        return written

    async def get_version(self, path: str) -> tuple[bytes, str]:
        found = await super().get_version(path)
        await self._answer("get_version")
        return found

    async def replace(self, path: str, data: bytes, tag: str) -> str | None:
        written = await super().replace(path, data, tag)
        await self._answer("replace")
        return written

    async def _answer(self, method: str) -> None:
        if method in self.held:
            self.reached.set()
            await self.thawed.wait()
        if method in self.lost:
            self.lost.remove(method)
            raise StoreUnavailable(f"no answer to {method}")


def runner_of(
    store: RunStore,
    measure: Callable[[Run], None] = lambda run: None,
    command: Sequence[str] = ("false",),
    now_ms: int = NOW_MS,
    tracer: trace.Tracer | None = None,
) -> Runner:
    """A runner whose runs are processes with this command."""

    async def release(snapshots: Sequence[tuple[str, str]]) -> None:
        assert not snapshots

    kept = HistoryLimits(runs=10, for_ms=0)
    return Runner(
        store,
        0,
        lambda job: command,
        lambda run: {},
        release,
        kept,
        lambda: now_ms,
        lambda job: None,
        tracer or trace.NoOpTracer(),
        RunEvents(),
        measure,
        lambda counts: None,
    )


def new_store() -> RunStore:
    return RunStore(open_root("memory:///").objects)


@asynccontextmanager
async def working(
    store: RunStore | None = None,
    command: Sequence[str] = ("false",),
    tracer: trace.Tracer | None = None,
) -> AsyncIterator[Runner]:
    made = runner_of(store or new_store(), command=command, tracer=tracer)
    work = asyncio.create_task(made.work())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def end_of(runner: Runner, run: Run) -> State:
    async with asyncio.timeout(WAIT_S):
        states = [one.state async for one in runner.watch(run.run_id)]
    return states[-1]


@pytest.mark.parametrize(
    ("end", "is_error"),
    [
        ('{"end": "failed", "error": "broker 0 is down"}', True),
        ("", True),
        ('{"end": "done"}', False),
        ('{"end": "cancelled"}', False),
    ],
)
async def test_the_span_of_a_failed_run_is_an_error_which_the_line_of_its_end_names(
    end: str, is_error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Given what a log line would name as its span
    named: list[int] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == "a run has ended: %s":
                named.append(trace.get_current_span().get_span_context().span_id)

    logger, noting, spans = logging.getLogger(Runner.__module__), Noting(), InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    caplog.set_level(logging.INFO)
    logger.addHandler(noting)

    # When a run ends
    command = ["sh", "-c", f"read task; echo '{end}'"]
    async with working(command=command, tracer=provider.get_tracer("janitor")) as there:
        run = await there.begin(RunRequest("report"), Trigger.REQUEST)
        state = await end_of(there, run)
        await _until(spans.get_finished_spans)
    logger.removeHandler(noting)

    # Then its span says whether it failed, and why
    (span,) = spans.get_finished_spans()
    assert span.name == "janitor report"
    assert (span.status.status_code is trace.StatusCode.ERROR) == is_error
    assert is_error == (state is State.FAILED)
    if "broker" in end:
        assert span.status.description == "broker 0 is down"
    assert span.context is not None
    assert named == [span.context.span_id]


async def _until(come_about: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not come_about():
            await asyncio.sleep(0.01)


async def test_a_dead_run_from_the_future_does_not_hold_up_its_job_for_long() -> None:
    # Given a run of a janitor whose clock was a day ahead, and that was killed
    store, now = new_store(), [NOW_MS]
    ahead_ms = NOW_MS + 24 * 3600 * 1000
    await store.create(
        Run(
            run_id=new_run_id("retention", ahead_ms),
            ask=RunRequest("retention"),
            trigger=Trigger.SCHEDULE,
            state=State.RUNNING,
            janitor=1,
            process="gone",
            created_at_ms=ahead_ms,
            alive_at_ms=ahead_ms,
        )
    )
    runner = runner_of(store)
    runner._now_ms = lambda: now[0]

    # When its job is asked for, then it may still go on, and a minute later it does not
    with pytest.raises(FailedPrecondition, match="retention is running already"):
        await runner.begin(RunRequest("retention"), Trigger.REQUEST)
    now[0] += STALE_MS
    begun = await runner.begin(RunRequest("retention"), Trigger.REQUEST)
    assert begun.state is State.WAITING


async def test_a_watch_gives_the_end_of_a_run_that_ends_while_an_answer_is_sent() -> None:
    async with working(command=["sleep", "60"]) as runner:
        # Given a run that waits for another one, and a watcher who has its first answer
        await runner.begin(RunRequest("backup"), Trigger.REQUEST)
        run = await runner.begin(RunRequest("report"), Trigger.REQUEST)
        watch = runner.watch(run.run_id)
        assert (await anext(watch)).state is State.WAITING

        # When it ends before the watcher asks on
        runner.cancel(run.run_id)
        while runner.is_here(run):
            await asyncio.sleep(0)

        # Then the watcher gets the end
        assert [one.state async for one in watch][-1:] == [State.CANCELLED]


async def test_a_run_goes_on_after_a_heartbeat_whose_answer_was_lost(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    go = os.open(fifo, os.O_RDWR)
    objects = Unanswered("replace")
    store = RunStore(objects)
    async with working(store, ["sh", "-c", HELD, str(fifo)]) as runner:
        # Given a run whose begin was stored, and the answer lost
        run = await runner.begin(RunRequest("backup"), Trigger.REQUEST)

        # When it is written again
        async with asyncio.timeout(WAIT_S):
            while not (stored := await store.get(run.run_id)).run.snapshots:
                assert (await runner.find(run.run_id)).state is not State.CANCELLING
                await asyncio.sleep(0.01)

        # Then that is stored, too, and it is done in the end
        assert stored.run.state is State.RUNNING
        assert not objects.lost
        os.write(go, b"\n")
        assert await end_of(runner, run) is State.DONE
        assert (await store.get(run.run_id)).run.state is State.DONE
    os.close(go)


async def test_the_end_of_a_run_is_stored_after_a_write_whose_answer_was_lost() -> None:
    objects = Unanswered("replace")
    store = RunStore(objects)
    async with working(store, ["sh", "-c", DONE]) as runner:
        run = await runner.begin(RunRequest("backup"), Trigger.REQUEST)

        assert await end_of(runner, run) is State.DONE

        assert not objects.lost
        assert (await store.get(run.run_id)).run.state is State.DONE


@pytest.mark.parametrize("lost", ["put_if_absent", "get_version"])
async def test_a_run_that_was_stored_unanswered_begins_when_it_is_asked_for_again(
    lost: str,
) -> None:
    objects = Unanswered(lost)
    async with working(RunStore(objects), ["sh", "-c", DONE]) as runner:
        with pytest.raises(StoreUnavailable):
            await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")
        assert not objects.lost

        run = await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")

        assert await end_of(runner, run) is State.DONE
        again = await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")
        assert (again.run_id, again.state) == (run.run_id, State.DONE)
        assert len(await RunStore(objects).ids()) == 1


async def test_a_run_that_was_stored_unanswered_begins_when_another_is_asked_for() -> None:
    objects = Unanswered("put_if_absent")
    async with working(RunStore(objects), ["sh", "-c", DONE]) as runner:
        with pytest.raises(StoreUnavailable):
            await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")

        with pytest.raises(FailedPrecondition) as refused:
            await runner.begin(RunRequest("backup"), Trigger.SCHEDULE)

        assert refused.value.reason == "JOB_RUNNING"
        run = await runner.find((await RunStore(objects).ids())[0])
        assert await end_of(runner, run) is State.DONE


async def test_a_run_that_was_stored_unanswered_begins_when_its_request_is_looked_for() -> None:
    objects = Unanswered("put_if_absent")
    async with working(RunStore(objects), ["sh", "-c", DONE]) as runner:
        with pytest.raises(StoreUnavailable):
            await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")

        assert await runner.begun("backup", "another's") is None
        run = await runner.begun("backup", "mine")

        assert run is not None
        assert await end_of(runner, run) is State.DONE


async def test_a_repeated_request_gets_its_run_though_a_newer_one_has_not_ended() -> None:
    store = new_store()
    async with working(store, ["sh", "-c", DONE]) as runner:
        # Given a run that has ended, and one of another janitor that has begun since
        run = await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")
        assert await end_of(runner, run) is State.DONE
        other = runner_of(store, now_ms=NOW_MS + 1)
        newer = await other.begin(RunRequest("backup"), Trigger.SCHEDULE)

        # When the request of the first one comes again
        again = await runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine")

        # Then it gets its run, and only another request is refused
        assert (again.run_id, again.state) == (run.run_id, State.DONE)
        for request_id in ("another's", ""):
            with pytest.raises(FailedPrecondition) as refused:
                await runner.begin(RunRequest("backup"), Trigger.REQUEST, request_id)
            assert refused.value.metadata == {"run_id": newer.run_id}


async def test_a_run_begins_once_though_its_caller_goes_away_meanwhile() -> None:
    objects = Unanswered()
    async with working(RunStore(objects), ["sh", "-c", DONE]) as runner:
        # Given a caller that went away while its run was stored
        objects.held.add("put_if_absent")
        caller = asyncio.create_task(runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine"))
        await objects.reached.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()

        # When it asks again
        again = asyncio.create_task(runner.begin(RunRequest("backup"), Trigger.REQUEST, "mine"))
        objects.thawed.set()
        run = await again

        # Then that run is done, and no other one
        assert await end_of(runner, run) is State.DONE
        assert await RunStore(objects).ids() == [run.run_id]


async def test_a_run_whose_janitor_died_is_counted_by_its_successor() -> None:
    # Given a run that a janitor began, which then died
    store = new_store()
    await runner_of(store).begin(RunRequest("backup"), Trigger.SCHEDULE)
    reader = InMemoryMetricReader()
    measures = RunMeasures(Telemetry(meters=MeterProvider([reader])), lambda: NOW_MS)
    assert counts(reader)["backup", "interrupted"] == 0

    # When the next one of its number starts, twice
    for _ in range(2):
        await runner_of(store, measures.ended).take_over()

    # Then it is counted once
    assert {end: count for end, count in counts(reader).items() if count} == {
        ("backup", "interrupted"): 1
    }


def test_the_age_of_the_newest_backup_is_that_of_one_that_was_made() -> None:
    reader = InMemoryMetricReader()
    measures = RunMeasures(Telemetry(meters=MeterProvider([reader])), lambda: NOW_MS)
    assert backup_age_s(reader) is None

    # Given a backup, an older one, and runs after it that made none
    made = Run(
        run_id="",
        ask=RunRequest("backup"),
        trigger=Trigger.SCHEDULE,
        state=State.DONE,
        janitor=0,
        process="",
        created_at_ms=0,
        started_at_ms=NOW_MS - 90_000,
        ended_at_ms=NOW_MS,
    )
    measures.ended(made)
    measures.note_backup(replace(made, started_at_ms=NOW_MS - 500_000))
    later = replace(made, started_at_ms=NOW_MS)
    measures.ended(replace(later, state=State.FAILED))
    measures.ended(replace(later, ask=RunRequest("backup", dry_run=True)))
    measures.ended(replace(later, ask=RunRequest("report")))

    assert backup_age_s(reader) == 90


def backup_age_s(reader: InMemoryMetricReader) -> float | None:
    data = reader.get_metrics_data()
    ages = [
        point.value
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "slatemq.janitor.backup.age"
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    ]
    return ages[0] if ages else None


def counts(reader: InMemoryMetricReader) -> dict[tuple[str, str], float]:
    """The runs that have ended, by job and state."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (str(facts["slatemq.job"]), str(facts["slatemq.run.state"])): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "slatemq.janitor.runs"
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint) and (facts := point.attributes) is not None
    }
