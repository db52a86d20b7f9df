"""The timetable by a clock of its own: what is begun when, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from libs.storage.database.roots import open_root
from services.janitor.runs.change_detector import AGES_MS, has_changed
from services.janitor.runs.history import (
    STALE_MS,
    Run,
    RunRequest,
    RunStore,
    State,
    Trigger,
    new_run_id,
)
from services.janitor.runs.timetable import AGAIN_MS, LOOK_S, Timetable, parse_schedule
from slatemq.errors import FailedPrecondition, Unavailable

HOUR_MS = 3_600_000
START_MS = 1_800_000_000_000  # 2027-01-15T08:00Z


class Over(Exception):
    """The time of a test is over."""


@dataclass
class World:
    """A clock, an instance that is looked at, and runs that end at once."""

    ends_ms: int
    now_ms: int = START_MS
    probe: dict[str, int] = field(default_factory=dict)
    down: bool = False
    running: bool = False
    looks: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    store: RunStore = field(default_factory=lambda: RunStore(open_root("memory:///").objects))

    def now(self) -> int:
        return self.now_ms

    async def sleep(self, seconds: float) -> None:
        self.now_ms += max(1, round(seconds * 1000))
        if self.now_ms > self.ends_ms:
            raise Over
        await asyncio.sleep(0)

    async def look(self, job: str, now_ms: int) -> Mapping[str, int]:
        self.looks.append((now_ms - START_MS) // 1000)
        if self.down:
            raise Unavailable("broker 0 is down")
        return dict(self.probe)

    async def begin(self, ask: RunRequest, trigger: Trigger, *, seen: Mapping[str, int]) -> Run:
        if self.running:
            raise FailedPrecondition("JOB_RUNNING", "it runs")
        self.begun.append((self.now_ms - START_MS) // 1000)
        return await self.has_run(ask, self.now_ms, seen=seen)

    async def has_run(self, ask: RunRequest, at_ms: int, **rest: object) -> Run:
        run = Run(
            run_id=new_run_id(ask.job, at_ms),
            ask=ask,
            trigger=Trigger.SCHEDULE,
            state=State.DONE,
            janitor=0,
            process="p",
            created_at_ms=at_ms,
            ended_at_ms=at_ms,
            alive_at_ms=at_ms,
        )
        run = replace(run, **rest)  # type: ignore[arg-type]
        await self.store.create(run)
        return run


async def passes(world: World, schedule: str = "1h", jitter_ms: int = 0) -> None:
    parsed = parse_schedule(schedule)
    assert parsed is not None
    timetable = Timetable(
        {"retention": parsed},
        world.look,
        world.begin,
        world.store,
        jitter_ms,
        world.now,
        world.sleep,
        lambda: 0.5,
    )
    with pytest.raises(Over):
        await timetable.keep()


def hours(*ends: float) -> list[int]:
    return [int(end * 3600) for end in ends]


async def test_without_work_it_looks_every_time_and_begins_nothing() -> None:
    world = World(START_MS + 3 * HOUR_MS)

    await passes(world)

    assert world.looks == hours(0, 1, 2, 3)
    assert world.begun == []


async def test_what_has_work_is_begun_and_not_again_for_what_was_seen_before() -> None:
    world = World(START_MS + 26 * HOUR_MS, probe={"ingest/0": 5})

    await passes(world)

    # Once, and once more when things have aged for a day
    assert world.begun == hours(0, 24)
    assert world.looks == hours(*range(27))


async def test_news_is_begun_each_time() -> None:
    world = World(START_MS + 2 * HOUR_MS, probe={"ingest/0": 5})
    look = world.look

    async def busy(job: str, now_ms: int) -> Mapping[str, int]:
        world.probe["ingest/0"] += 1
        return await look(job, now_ms)

    world.look = busy  # type: ignore[method-assign]
    await passes(world)

    assert world.begun == hours(0, 1, 2)


async def test_a_run_that_failed_is_repeated_with_the_same_evidence() -> None:
    world = World(START_MS + 2 * HOUR_MS, probe={"ingest/0": 5})

    async def failing(ask: RunRequest, trigger: Trigger, *, seen: Mapping[str, int]) -> Run:
        world.begun.append((world.now_ms - START_MS) // 1000)
        return await world.has_run(ask, world.now_ms, state=State.FAILED)

    world.begin = failing  # type: ignore[method-assign]
    await passes(world)

    assert world.begun == hours(0, 1, 2)


async def test_after_a_restart_it_goes_on_from_the_last_run_of_whichever_janitor() -> None:
    world = World(START_MS + 2 * HOUR_MS, probe={"ingest/0": 5})
    await world.has_run(RunRequest("retention"), START_MS - HOUR_MS // 4)

    await passes(world)

    assert world.begun == hours(0.75)


@pytest.mark.parametrize(
    "ask",
    [
        RunRequest("retention", dry_run=True),
        RunRequest("retention", queue_ids=("q",)),
        RunRequest("done"),
    ],
)
async def test_runs_of_less_than_the_whole_job_do_not_count(ask: RunRequest) -> None:
    world = World(START_MS + HOUR_MS // 2, probe={"ingest/0": 5})
    await world.has_run(ask, START_MS - 1000, seen={"ingest/0": 5})

    await passes(world)

    assert world.begun == hours(0)


@pytest.mark.parametrize(("silent_ms", "first"), [(STALE_MS, 0), (STALE_MS - 1, 0.75)])
async def test_a_run_whose_janitor_is_gone_does_not_count(silent_ms: int, first: float) -> None:
    world = World(START_MS + HOUR_MS, probe={"ingest/0": 5})
    await world.has_run(
        RunRequest("retention"),
        START_MS - HOUR_MS // 4,
        state=State.WAITING,
        ended_at_ms=0,
        alive_at_ms=START_MS - silent_ms,
    )

    await passes(world)

    assert world.begun[:1] == hours(first)


async def test_a_run_from_the_future_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """By a janitor whose clock was wrong: it would be the last one for ten years."""
    world = World(START_MS + 2 * HOUR_MS, probe={"ingest/0": 5})
    run = await world.has_run(RunRequest("retention"), START_MS + 87_600 * HOUR_MS)
    await world.has_run(RunRequest("retention"), START_MS - HOUR_MS // 2)

    await passes(world)

    assert world.begun == hours(0.5)
    assert f"runs from the future do not count: {run.run_id}" in caplog.text


async def test_a_clock_that_was_ahead_and_is_set_does_not_hold_up_a_job() -> None:
    # Given a janitor that begins while its clock is ten years ahead
    world = World(START_MS + 3 * HOUR_MS, probe={"ingest/0": 5})
    world.now_ms += 87_600 * HOUR_MS
    sleep = world.sleep

    async def sets_the_clock(seconds: float) -> None:
        if world.now_ms > world.ends_ms:
            world.now_ms = START_MS
        else:
            await sleep(seconds)

    world.sleep = sets_the_clock  # type: ignore[method-assign]

    # When it is set before the job is due again
    await passes(world)

    # Then the job is done at once, and looked at by the clock as it is
    assert world.begun == [87_600 * 3600, *hours(0)]
    assert world.looks[1:] == hours(0, 1, 2, 3)


async def test_the_clock_is_read_again_within_the_hour() -> None:
    """It may be set, and while a machine sleeps no time goes by for what waits."""
    world = World(START_MS + 48 * HOUR_MS, probe={"ingest/0": 5})
    slept: list[float] = []
    sleep = world.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    world.sleep = noted  # type: ignore[method-assign]
    await passes(world, "30 9 * * *")

    assert max(slept) <= LOOK_S
    assert world.begun == hours(1.5, 25.5)


async def test_what_was_missed_while_it_was_down_is_made_up_for() -> None:
    world = World(START_MS + HOUR_MS // 2, probe={"ingest/0": 5})
    await world.has_run(RunRequest("retention"), START_MS - 48 * HOUR_MS)

    await passes(world, "30 9 * * *")

    assert world.begun == hours(0)


async def test_cron_without_a_history_waits_for_its_time() -> None:
    world = World(START_MS + 25 * HOUR_MS, probe={"ingest/0": 5})

    await passes(world, "30 9 * * *")

    assert world.begun == hours(1.5)
    assert world.looks == hours(1.5)


async def test_another_janitor_that_was_quicker_leaves_nothing_to_do() -> None:
    world = World(START_MS + 2 * HOUR_MS, probe={"ingest/0": 5})
    await world.has_run(RunRequest("retention"), START_MS - HOUR_MS)

    async def other(job: str, now_ms: int) -> Mapping[str, int]:
        raise AssertionError

    world.look = other  # type: ignore[method-assign]
    sleep = world.sleep

    async def beaten(seconds: float) -> None:
        await sleep(seconds)
        await world.has_run(RunRequest("retention"), world.now_ms - 1000)

    world.sleep = beaten  # type: ignore[method-assign]
    await passes(world, jitter_ms=60_000)

    assert world.begun == []


async def test_one_that_runs_already_is_left_alone() -> None:
    world = World(START_MS + 2 * HOUR_MS, probe={"ingest/0": 5}, running=True)

    await passes(world)

    assert world.looks == hours(0, 1, 2)


async def test_while_a_shard_is_down_it_tries_every_minute() -> None:
    world = World(START_MS + 3 * AGAIN_MS, down=True)

    await passes(world)

    assert world.looks == [0, 60, 120, 180]


async def test_chance_makes_it_later_by_a_quarter_of_a_short_span_at_most() -> None:
    world = World(START_MS + 200_000)

    await passes(world, "1m", jitter_ms=3_600_000)

    # Half of 15 s after each time
    assert world.looks[:3] == [7, 75, 142]


def test_evidence_is_news_when_there_is_some_that_is_new_or_a_day_old() -> None:
    assert not has_changed({}, None, 0)
    assert not has_changed({}, {"a": 1}, AGES_MS)
    assert has_changed({"a": 1}, None, 0)
    assert not has_changed({"a": 1}, {"a": 1}, AGES_MS - 1)
    assert has_changed({"a": 1}, {"a": 1}, AGES_MS)
    assert has_changed({"a": 2}, {"a": 1}, 0)
