"""The runs of one janitor, as those see them who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from opentelemetry import trace

from libs.storage.database.roots import open_root
from services.janitor.runs.history import RunEvents, RunRequest, RunStore, State, Trigger
from services.janitor.runs.runner import HistoryLimits, Runner

NOW_MS = 1_795_269_141_374


@asynccontextmanager
async def working() -> AsyncIterator[Runner]:
    """A runner that is asked for nothing that begins a process."""

    async def release(snapshots: Sequence[tuple[str, str]]) -> None:
        assert not snapshots

    store = RunStore(open_root("memory:///").objects)
    kept = HistoryLimits(runs=10, for_ms=0)
    runner = Runner(
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
        lambda run: None,
    )
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
