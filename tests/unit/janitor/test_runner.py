"""The runs of one janitor, as those see them who watch, and who measure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.janitor.metrics import RunMeasures
from services.janitor.runs.history import Run, RunEvents, RunRequest, RunStore, State, Trigger
from services.janitor.runs.runner import HistoryLimits, Runner

NOW_MS = 1_795_269_141_374


def runner_of(store: RunStore, measure: Callable[[Run], None] = lambda run: None) -> Runner:
    """A runner that is asked for nothing that begins a process."""

    async def release(snapshots: Sequence[tuple[str, str]]) -> None:
        assert not snapshots

    kept = HistoryLimits(runs=10, for_ms=0)
    return Runner(
        store,
        0,
        lambda job: ["false"],
        lambda run: {},
        release,
        kept,
        lambda: NOW_MS,
        lambda job: None,
        trace.NoOpTracer(),
        RunEvents(),
        measure,
    )


def new_store() -> RunStore:
    return RunStore(open_root("memory:///").objects)


@asynccontextmanager
async def working() -> AsyncIterator[Runner]:
    runner = runner_of(new_store())
    work = asyncio.create_task(runner.work())
    await asyncio.sleep(0)
    yield runner
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_watch_gives_the_end_of_a_run_that_ends_while_an_answer_is_sent() -> None:
    async with working() as runner:
        # Given a run that waits, and a watcher who has its first answer
        run = await runner.begin(RunRequest("report"), Trigger.REQUEST)
        watch = runner.watch(run.run_id)
        assert (await anext(watch)).state is State.WAITING

        # When it ends before the watcher asks on
        runner.cancel(run.run_id)
        while runner.is_here(run):
            await asyncio.sleep(0)

        # Then the watcher gets the end
        assert [one.state async for one in watch][-1:] == [State.CANCELLED]


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
