"""The router between an ingest and brokers that keep to the contract and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.filters import Facts
from services.router import router as router_module
from services.router.pieces import THIN, PieceLimits
from services.router.servicer import Explainer
from slatemq.errors import NotFound, Unavailable
from tests.integration.router.stack import Stack, peers
from tests.integration.waiting import eventually


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with peers(tmp_path) as running:
        yield running


async def test_messages_reach_the_queues_whose_filters_match_with_all_their_columns(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("eu", 'headers["region"] == "eu"', 'int(headers["n"])')
    await stack.shard.set_queue("all", "true")

    async with stack.router():
        ids = await stack.log.publish([{"region": "eu", "n": "7"}, {"region": "us"}], 60)
        await eventually(lambda: stack.got("all") == ids)

    assert stack.got("eu") == ids[:1]
    assert stack.shard.rows[ids[1]] == (128, 62_000, 0)


async def test_a_queue_without_a_filter_takes_what_names_it(stack: Stack) -> None:
    change = stack.shard
    await change.set_queue("orders")
    change.changes["orders"][1].queue.ClearField("filter")

    async with stack.router():
        ids = await stack.log.publish([{"queue": "orders"}, {"queue": "others"}])
        await eventually(lambda: stack.shard.cursors.get(0) == ids[-1])

    assert stack.got("orders") == ids[:1]


async def test_a_pushed_message_reaches_its_queue_alone_and_a_delayed_queue_delays(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("all", "true")
    await stack.shard.set_queue("mine", "false")
    stack.shard.changes["mine"][1].queue.default_delay_ms = 500

    async with stack.router():
        pushed = await stack.log.publish([{}], direct_queue_id="mine")
        own = await stack.log.publish([{}], direct_queue_id="mine", delay_ms=0)
        nowhere = await stack.log.publish([{}], direct_queue_id="gone")
        ids = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == ids)

    assert stack.got("mine") == pushed + own
    assert [stack.shard.rows[i][2] for i in (*pushed, *own)] == [2_500, 2_000]
    assert nowhere[0] not in stack.shard.rows


async def test_what_was_stored_before_the_router_started_is_routed_too(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    ids = [i for _ in range(120) for i in await stack.log.publish([{}, {}])]

    async with stack.router(PieceLimits(messages_max=7, step_max=3)):
        await eventually(lambda: len(stack.got("all")) == len(ids))

    assert stack.got("all") == ids


async def test_the_next_piece_is_judged_while_a_long_one_is_in_flight(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    ids = [i for _ in range(3) for i in await stack.log.publish([{}] * THIN)]
    stack.broker.answering.clear()

    async with stack.router(PieceLimits(messages_max=THIN)) as router:
        await eventually(lambda: stack.shard.calls_count == 1)
        route = router.links[0].route(0)
        assert route is not None
        await eventually(lambda: route.judged is not None)
        assert (route.cursor, route.waiting_count) == (0, THIN)

        stack.broker.answering.set()
        await eventually(lambda: stack.got("all") == ids)


async def test_entries_without_a_match_move_the_cursor_after_the_hold(stack: Stack) -> None:
    await stack.shard.set_queue("none", "false")

    async with stack.router(PieceLimits(hold_ms=50)) as router:
        await stack.log.publish([{}])
        await eventually(lambda: stack.shard.cursors.get(0) == stack.log.end)
        await eventually(lambda: [p.pending_count for p in router.progress()] == [0])

    assert [(p.cursor, p.durable_sequence) for p in router.progress()] == [(1, 1)]


async def test_a_match_does_not_wait_for_the_hold(stack: Stack) -> None:
    await stack.shard.set_queue("a", 'headers["k"] == "a"')

    async with stack.router(PieceLimits(hold_ms=3_600_000)):
        await stack.log.publish([{"k": "b"}])
        ids = await stack.log.publish([{"k": "a"}])
        await eventually(lambda: stack.got("a") == ids)

    assert stack.shard.cursors[0] == stack.log.end


async def test_two_routers_at_once_route_nothing_twice(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    published: list[int] = []

    async with stack.router(), stack.router():
        for _ in range(200):
            published += await stack.log.publish([{}])
            await asyncio.sleep(0)
        await eventually(lambda: stack.shard.cursors.get(0) == stack.log.end)

    assert stack.got("all") == published


async def test_a_message_published_after_a_queue_was_created_is_judged_by_it(stack: Stack) -> None:
    stack.broker.watchable = False  # No one tells the router; only the refusal can.
    created = 20

    async with stack.router(PieceLimits(hold_ms=20)) as router:
        await eventually(lambda: router.is_routing)
        firsts = []
        for number in range(created):
            await stack.shard.set_queue(f"q{number}", "true")
            firsts.append((await stack.log.publish([{}]))[0])
        await eventually(lambda: stack.shard.cursors.get(0) == stack.log.end)

    for number, first in enumerate(firsts):
        assert set(firsts[number:]) <= set(stack.got(f"q{number}")), first
        assert len(stack.got(f"q{number}")) == len(set(stack.got(f"q{number}")))


async def test_a_held_message_goes_at_once_when_a_new_queue_wants_it(stack: Stack) -> None:
    async with stack.router(PieceLimits(hold_ms=3_600_000)) as router:
        ids = await stack.log.publish([{"k": "v"}])
        await eventually(lambda: [p.pending_count for p in router.progress()] == [1])

        await stack.shard.set_queue("late", 'headers["k"] == "v"')
        await eventually(lambda: stack.got("late") == ids)


async def test_a_deleted_queue_gets_nothing_more(stack: Stack) -> None:
    await stack.shard.set_queue("gone", "true")
    await stack.shard.set_queue("stays", "true")

    async with stack.router() as router:
        before = await stack.log.publish([{}])
        await eventually(lambda: stack.got("gone") == before)
        await stack.shard.delete_queue("gone")
        await eventually(lambda: router.links[0].rules.revision == stack.shard.revision)
        after = await stack.log.publish([{}])
        await eventually(lambda: stack.got("stays") == before + after)

    assert stack.got("gone") == before


async def test_explain_sees_a_queue_that_was_just_created(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "REFRESH_SECONDS", 60.0)
    stack.broker.watchable = False
    message = Facts({"k": "v"}, 0, 0, 0)

    async with stack.router() as router:
        await eventually(lambda: router.is_routing)
        await stack.shard.set_queue("b-no", "false")
        await stack.shard.set_queue("c-yes", 'headers["k"] == "v"', "3")
        outcomes = await Explainer(router).explain(message, [])

        assert [(o.queue_id, o.matched, o.priority) for o in outcomes] == [
            ("c-yes", True, 3),
            ("b-no", False, 128),
        ]
        with pytest.raises(NotFound):
            await Explainer(router).explain(message, ["b-no", "nowhere"])


async def test_explain_goes_by_what_is_known_while_the_broker_is_down(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    message = Facts({}, 0, 0, 0)

    async with stack.router() as router:
        await eventually(lambda: router.is_routing)
        await stack.broker_server.stop()

        assert [o.matched for o in await Explainer(router).explain(message, ["all"])] == [True]
        with pytest.raises(Unavailable):
            await Explainer(router).explain(message, ["perhaps-just-created"])


async def test_a_filter_that_fails_on_a_message_stops_nothing(stack: Stack) -> None:
    await stack.shard.set_queue("odd", 'int(headers["n"]) > 5')
    await stack.shard.set_queue("unreadable", "this is no CEL (")
    await stack.shard.set_queue("all", "true")

    async with stack.router() as router:
        ids = await stack.log.publish([{"n": "x"}, {}, {"n": "9"}, {"\ud7ff": "\x00"}])
        await eventually(lambda: stack.got("all") == ids)
        message = Facts({}, 0, 0, 0)
        explain = await Explainer(router).explain(message, ["unreadable"])

    assert stack.got("odd") == ids[2:3]
    assert "cannot read" in explain[0].reason
