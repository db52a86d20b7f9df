"""Events of runs: which there are, and that each comes, whatever is killed when."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from services.janitor.events import ActStore, OwedEvents
from services.janitor.runs.history import (
    EVENTS_KEPT_MS,
    EVENTS_OWED,
    EVENTS_PUBLISHED,
    Run,
    RunRequest,
    RunStore,
    State,
    Stored,
    Trigger,
    new_run_id,
)
from slatemq.events.catalogue import (
    AccessAct,
    JanitorRunFinished,
    JanitorRunStarted,
    data_of,
    make_event,
)
from slatemq.events.envelope import Event

NOW_MS = 1_795_269_141_374


@pytest.fixture
def objects() -> Objects:
    return open_root("memory:///").objects


@pytest.fixture
def store(objects: Objects) -> RunStore:
    return RunStore(objects)


def opened(store: RunStore, *, keeps: bool = True) -> OwedEvents:
    return OwedEvents(store, ActStore(store._objects, 3), 3, "janitor-3", keeps=keeps)


async def created(store: RunStore, at_ms: int = NOW_MS, **rest: object) -> Stored:
    run = Run(
        run_id=new_run_id("retention", at_ms),
        ask=RunRequest("retention", dry_run=True),
        trigger=Trigger.REQUEST,
        state=State.WAITING,
        janitor=3,
        process="p",
        created_at_ms=at_ms,
        alive_at_ms=at_ms,
        request_id="req-1",
        events=EVENTS_OWED,
    )
    return await store.create(replace(run, **rest))  # type: ignore[arg-type]


async def begin(store: RunStore, stored: Stored) -> None:
    run = replace(stored.run, state=State.RUNNING, started_at_ms=NOW_MS + 1)
    assert await store.save(stored, run)


async def end(store: RunStore, stored: Stored) -> None:
    counts = {"messages_purged": 4, "messages_purged/orders": 3, "done_removed": 2, "bytes": 9}
    run = replace(stored.run, state=State.DONE, ended_at_ms=NOW_MS + 2, counts=counts)
    assert await store.save(stored, run)


async def take(events: OwedEvents, *, marks: bool = True) -> list[Event]:
    """What waits; killed before a run is marked, or after."""
    found: list[Event] = []
    async with aclosing(events.batches()) as batches, asyncio.timeout(60):
        while True:
            following = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)  # Now it knows that the batch before is done.
            while not following.done() and not is_idle(events):
                await asyncio.sleep(0.001)
            if not following.done():
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                return found
            batch = following.result()
            found += batch.events
            events.done(batch.position)
            if not marks and not events.lag:
                return found


def is_idle(events: OwedEvents) -> bool:
    return events._is_read and not (events.lag or events._unmarked or events._published_acts)


@pytest.mark.parametrize(("dry_run", "removed"), [(False, 6), (True, 0)])
async def test_a_run_has_an_event_when_it_begins_and_one_when_it_ends(
    store: RunStore, dry_run: bool, removed: int
) -> None:
    events, stored = (
        opened(store),
        await created(store, ask=RunRequest("retention", dry_run=dry_run)),
    )
    await begin(store, stored)
    events.changed(stored.run)
    [begun] = await take(events)
    await end(store, stored)
    events.changed(stored.run)
    [ended] = await take(events)

    run_id = stored.run.run_id
    assert data_of(begun) == JanitorRunStarted(run_id=run_id, job="retention", dry_run=dry_run)
    assert data_of(ended) == JanitorRunFinished(
        run_id=run_id, job="retention", state="done", removed=removed
    )
    assert {begun.request_id, ended.request_id} == {"req-1"}
    assert (await store.get(run_id)).run.events == EVENTS_PUBLISHED


async def test_events_come_again_with_their_ids_until_their_run_is_marked(store: RunStore) -> None:
    stored = await created(store)
    await begin(store, stored)
    begun = await take(opened(store))
    await end(store, stored)
    sent = await take(opened(store), marks=False)
    again = await take(opened(store))

    assert len(sent) == 2
    assert begun == sent[:1]
    assert again == sent
    assert await take(opened(store)) == []


async def test_runs_of_others_and_of_before_events_were_turned_on_have_none(
    store: RunStore,
) -> None:
    for rest in ({"janitor": 4}, {"events": ""}, {"events": EVENTS_PUBLISHED}):
        stored = await created(store, **rest)
        await begin(store, stored)
        await end(store, stored)

    assert await take(opened(store)) == []


async def test_runs_of_before_the_start_come_first_and_in_their_order(store: RunStore) -> None:
    wanted: list[str] = []
    for at in (3, 1, 2):
        stored = await created(store, NOW_MS + at)
        await begin(store, stored)
        await end(store, stored)
        wanted.append(stored.run.run_id)
    events = opened(store)
    new = await created(store, NOW_MS + 4)
    await begin(store, new)
    events.changed(new.run)
    found = await take(events)

    ids = [event.data["run_id"] for event in found]
    assert list(dict.fromkeys(ids)) == [*sorted(wanted), new.run.run_id]


async def test_the_history_keeps_runs_that_owe_events_for_a_week(store: RunStore) -> None:
    stored = await created(store)
    await end(store, stored)

    assert await store.prune(0, 1, NOW_MS + EVENTS_KEPT_MS) == 0
    assert await store.prune(0, 1, NOW_MS + EVENTS_KEPT_MS + 2) == 1


@pytest.mark.parametrize("damage", ["damaged", "removed"])
async def test_a_run_that_cannot_be_marked_holds_up_no_others(
    store: RunStore, objects: Objects, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored, events = await created(store), opened(store)
    await end(store, stored)
    async with aclosing(events.batches()) as batches, asyncio.timeout(60):
        events.done((await anext(batches)).position)
        # When its object is lost between its events and its mark
        if damage == "damaged":
            await objects.put(stored.run.path, b"{")
        else:
            await objects.delete(stored.run.path)
        other = await created(store, NOW_MS + 1)
        await begin(store, other)
        events.changed(other.run)
        batch = await anext(batches)

    # Then that is logged, and the events of the next one come
    assert [event.data["run_id"] for event in batch.events] == [other.run.run_id]
    assert "is not marked as published" in caplog.text


async def test_fire_and_forget_owes_nothing(store: RunStore) -> None:
    await begin(store, await created(store))
    events = opened(store, keeps=False)
    stored = await created(store, events=events.mark)
    await begin(store, stored)
    events.changed(stored.run)
    found = await take(events)
    events.changed(stored.run)

    assert [event.data["run_id"] for event in found] == [stored.run.run_id]
    assert events.skip_to_end() == 1
    assert events.lag == 0


def act_of(principal: str) -> Event:
    data = AccessAct(
        principal=principal,
        proof="token",
        act="/slatemq.v1.JanitorService/RunJob",
        subjects=[],
        peer="ipv4:127.0.0.1:5",
        outcome="OK",
    )
    return make_event(data, source="janitor-3", request_id="", at_ms=NOW_MS)


async def test_an_act_has_an_event_also_if_the_janitor_is_killed_before(
    store: RunStore, objects: Objects
) -> None:
    acts, first, second = ActStore(objects, 3), act_of("ops"), act_of("shop")
    await ActStore(objects, 4).put(act_of("of another janitor"))
    await acts.put(first)
    events = opened(store)
    await acts.put(second)
    events.acted(second)

    sent = await take(events)

    assert [event.data["principal"] for event in sent] == ["ops", "shop"]
    assert [event.id for event in sent] == [first.id, second.id]
    assert await acts.owed() == []
    assert await take(opened(store)) == []


async def test_an_act_whose_publish_is_not_done_comes_again(
    store: RunStore, objects: Objects
) -> None:
    await ActStore(objects, 3).put(act_of("ops"))

    sent = await take(opened(store), marks=False)

    assert await take(opened(store)) == sent
