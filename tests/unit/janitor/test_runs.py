"""The history of runs in a store: a folder, and memory, which compares and writes in one step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import ObjectNotFound
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.contract import Progress
from services.janitor.runs.history import (
    FOLDER,
    STALE_MS,
    Run,
    RunRequest,
    RunStore,
    Sightings,
    State,
    Trigger,
    is_run_id,
    job_of,
    new_run_id,
    seen_now,
)
from slatemq._admin.job_names import JOBS

NOW_MS = 1_795_269_141_374


@pytest.fixture(params=["folder", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return open_root(tmp_path.as_uri() if request.param == "folder" else "memory:///").objects


def run_of(job: str = "retention", at_ms: int = NOW_MS, **rest: object) -> Run:
    made = Run(
        run_id=new_run_id(job, at_ms),
        ask=RunRequest(job),
        trigger=Trigger.REQUEST,
        state=State.WAITING,
        janitor=3,
        process="p",
        created_at_ms=at_ms,
        alive_at_ms=at_ms,
    )
    return replace(made, **rest)  # type: ignore[arg-type]


def test_ids_ascend_with_the_time_and_show_the_job() -> None:
    ids = [new_run_id(job, NOW_MS + at) for at, job in enumerate(JOBS)]

    assert ids == sorted(ids)
    assert ids[0].startswith("20261121-135221-374-retention-")
    assert [job_of(one) for one in ids] == list(JOBS)
    assert all(is_run_id(one) for one in ids)
    assert not is_run_id("../topology/ingest-0")
    assert not is_run_id(f"{ids[0]}/x")
    assert not is_run_id(ids[0].replace("retention", "sweep"))


async def test_all_of_a_run_is_kept(objects: Objects) -> None:
    run = run_of(
        ask=RunRequest("restore", True, ("q",), 5, 6, "t", (1, 2), 3, 4),
        trigger=Trigger.SCHEDULE,
        state=State.DONE,
        request_id="mine",
        progress=Progress("reading", 1, 2, 3, 4),
        counts={"letters": 1},
        artifacts=("a/b",),
        phases=(("reading", 0.5),),
        error="e",
        seen={"ingest/0": 7},
        snapshots=(("broker/0", "id"),),
    )
    store = RunStore(objects)

    await store.create(run)

    assert (await store.get(run.run_id)).run == run


async def test_of_two_writers_the_second_is_refused(objects: Objects) -> None:
    store, run = RunStore(objects), run_of()
    await store.create(run)
    mine, theirs = await store.get(run.run_id), await store.get(run.run_id)

    assert await store.save(theirs, replace(run, state=State.INTERRUPTED))
    assert not await store.save(mine, replace(run, state=State.RUNNING))
    assert await store.save(theirs, replace(run, state=State.INTERRUPTED, error="again"))

    assert (await store.get(run.run_id)).run.error == "again"
    await objects.delete(run.path)
    assert not await store.save(theirs, run)


async def test_a_run_is_not_written_over_another_of_its_id(objects: Objects) -> None:
    store, run = RunStore(objects), run_of()
    await store.create(run)

    with pytest.raises(RuntimeError):
        await store.create(replace(run, error="other"))


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[]", b"null", b'{"ask": 3}', b"\xff", b'{"ask": {"job": "done"}}']
)
async def test_a_damaged_object_hides_nothing_but_itself(
    objects: Objects, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, good, bad = RunStore(objects), run_of(), run_of(at_ms=NOW_MS + 1)
    await store.create(good)
    await objects.put(bad.path, damage)
    await objects.put(f"{FOLDER}/notes.txt", b"mine")

    assert [one.run for one in await store.latest()] == [good]
    assert bad.run_id in caplog.text
    with pytest.raises(ValueError, match="damaged"):
        await store.get(bad.run_id)
    with pytest.raises(ObjectNotFound):
        await store.get(new_run_id("done", NOW_MS))


async def test_what_later_versions_add_is_skipped_and_what_earlier_ones_lacked_is_filled_in(
    objects: Objects,
) -> None:
    store, run = RunStore(objects), run_of()
    await store.create(run)
    fields = json.loads(await objects.get(run.path))
    fields["novelty"], fields["ask"]["novelty"] = 1, 2
    del fields["ask"]["days"], fields["seen"]
    await objects.put(run.path, json.dumps(fields).encode())

    assert (await store.get(run.run_id)).run == run


async def test_runs_are_listed_by_job_the_newest_first(objects: Objects) -> None:
    store = RunStore(objects)
    runs = [run_of(job, NOW_MS + at) for at, job in enumerate(("done", "report", "done"))]
    for run in (runs[1], runs[2], runs[0]):
        await store.create(run)

    assert await store.ids() == [run.run_id for run in reversed(runs)]
    assert await store.ids("done") == [runs[2].run_id, runs[0].run_id]
    assert await store.ids("restore") == []


async def test_pruning_takes_the_oldest_over_a_number_and_over_an_age_and_none_that_goes_on(
    objects: Objects,
) -> None:
    store = RunStore(objects)
    day_ms = 86_400_000
    going_on = run_of(at_ms=NOW_MS - 9 * day_ms, alive_at_ms=NOW_MS, state=State.RUNNING)
    lost = run_of(at_ms=NOW_MS - 8 * day_ms, state=State.RUNNING)
    ended = [
        run_of(at_ms=NOW_MS - days * day_ms, ended_at_ms=NOW_MS - days * day_ms, state=State.FAILED)
        for days in (5, 4, 3, 2)
    ]
    for run in (going_on, lost, *ended):
        await store.create(run)

    assert await store.prune(kept=100, older_than_ms=0, now_ms=NOW_MS) == 0
    assert await store.prune(100, 4 * day_ms + 1, NOW_MS) == 2
    assert await store.ids() == [run.run_id for run in (*reversed(ended[1:]), going_on)]
    assert await store.prune(2, 0, NOW_MS) == 1
    assert await store.ids() == [run.run_id for run in (ended[3], ended[2], going_on)]


def test_a_run_that_its_janitor_has_not_written_for_a_minute_is_seen_as_interrupted() -> None:
    run = run_of(state=State.RUNNING)

    assert seen_now(run, NOW_MS + STALE_MS - 1) == run
    late = seen_now(run, NOW_MS + STALE_MS)
    assert (late.state, late.ended_at_ms) == (State.INTERRUPTED, NOW_MS)
    done = replace(run, state=State.DONE)
    assert seen_now(done, NOW_MS + 10 * STALE_MS) == done


async def test_a_run_from_the_future_is_alive_as_long_as_it_is_written(objects: Objects) -> None:
    # Given a run of a janitor whose clock is a day ahead
    store, sightings = RunStore(objects), Sightings()
    ahead_ms = NOW_MS + 24 * 3600 * 1000
    stored = await store.create(run_of(at_ms=ahead_ms, state=State.RUNNING))

    # When it is written again and again, then it goes on
    for at_ms in range(0, 4 * STALE_MS, STALE_MS // 2):
        assert not sightings.judge(await store.get(stored.run.run_id), NOW_MS + at_ms).ended
        assert await store.save(stored, replace(stored.run, alive_at_ms=ahead_ms + at_ms + 1))

    # When it is not written any more, then its janitor is gone, once that was seen for a minute
    last, now_ms = await store.get(stored.run.run_id), NOW_MS + 4 * STALE_MS
    assert not sightings.judge(last, now_ms).ended
    assert not sightings.judge(last, now_ms + STALE_MS - 1).ended
    assert sightings.judge(last, now_ms + STALE_MS).state is State.INTERRUPTED
