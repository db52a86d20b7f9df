"""Routers beside a broker that ends over the messages of a log, and what else is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers.calls import UNSTORABLE_WAIT_S
from libs.serving.peers.topology import Peer
from services.router import brokers
from services.router.reserve import LOOKS, is_first
from services.router.router import Router
from slatemq.errors import Internal
from slatemq.v1 import assignment_pb2
from tests import timed_uvloop
from tests.integration.client.ingest import refuse
from tests.integration.router.peers import (
    LogMemory,
    MemoryBroker,
    MemoryIngest,
    Running,
    ShardMemory,
)
from tests.integration.router.stack import Stack, peers
from tests.integration.waiting import eventually

ROUTERS = (0, 1)
FIRST, OTHER = sorted(ROUTERS, key=lambda one: not is_first(one, ROUTERS, 0))
SECOND = next(log for log in range(1, 100) if is_first(FIRST, ROUTERS, log))
"""Another log of the same first router as log 0."""


class Unable(MemoryBroker):
    """Ends over each call that has something of log 0.

    Attributes:
        begun: The logs of each call.
        failed: The logs of each call over which it ended.
        looks_count: How often a router has asked how far it is.
        looks_max: More of them have no answer.
        is_repaired: Whether it can store what log 0 has.
        ending: While it is clear, it does not end yet.
    """

    def __init__(self, memory: ShardMemory) -> None:
        super().__init__(memory)
        self.begun: list[list[int]] = []
        self.failed: list[list[int]] = []
        self.looks_count = 0
        self.looks_max: int | None = None
        self.is_repaired = False
        self.ending = asyncio.Event()
        self.ending.set()

    async def Assign(  # noqa: N802
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        shards = [piece.ingest_shard for piece in request.ranges]
        self.begun.append(shards)
        if 0 in shards and not self.is_repaired:
            await self.ending.wait()
            self.failed.append(shards)
            error = Internal("record x cannot be encoded", reason="UNSTORABLE_RECORD")
            await refuse(context, error)
        return await super().Assign(request, context)

    async def GetRoutingState(  # noqa: N802
        self, request: assignment_pb2.GetRoutingStateRequest, context: Any
    ) -> assignment_pb2.GetRoutingStateResponse:
        if self.looks_count == self.looks_max:
            await asyncio.Event().wait()
        self.looks_count += 1
        return await super().GetRoutingState(request, context)


class SharingCommits(Unable):
    """What is in flight with a call over which it ends fails with it.

    Attributes:
        beside: How many other calls were in flight as each of those began.
    """

    def __init__(self, memory: ShardMemory) -> None:
        super().__init__(memory)
        self.beside: list[int] = []
        self._others_count = 0

    async def Assign(  # noqa: N802
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        if any(piece.ingest_shard == 0 for piece in request.ranges):
            self.beside.append(self._others_count)
            return await super().Assign(request, context)
        if not self.ending.is_set():
            await self.ending.wait()
            await refuse(context, Internal("another's record", reason="UNSTORABLE_RECORD"))
        self._others_count += 1
        try:
            await asyncio.sleep(0.01)  # So that something is in flight most of the time.
            return await super().Assign(request, context)
        finally:
            self._others_count -= 1


class Unstorable:
    """Such a broker in place of the stack's, and logs beside that of the stack."""

    def __init__(
        self, stack: Stack, shards: Collection[int], broker: type[Unable] = Unable
    ) -> None:
        self.broker = broker(stack.shard)
        self.server = Running(stack.directory, self.broker)
        self.logs = {0: stack.log} | {shard: LogMemory(shard) for shard in shards}
        self._stack = stack
        self._ingests = [Running(stack.directory, MemoryIngest(self.logs[one])) for one in shards]

    async def __aenter__(self) -> Unstorable:
        await self._stack.broker_server.stop()
        for server in [self.server, *self._ingests]:
            await server.start()
        await self._stack.shard.set_queue("all", "true")
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in [self.server, *self._ingests]:
            await server.stop()


async def announce_routers(stack: Stack) -> None:
    for number in ROUTERS:
        await stack.directory.announce(Peer("router", number, f"127.0.0.1:{1 + number}"))


def fix_waits(patch: pytest.MonkeyPatch, wait_s: float) -> list[float]:
    """Have logs wait so long, not at random; returns what gets the longest of each wait."""
    waits: list[float] = []

    def short(_: float, most: float) -> float:
        waits.append(most)
        return wait_s / UNSTORABLE_WAIT_S

    patch.setattr("random.uniform", short)
    return waits


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with peers(tmp_path) as running:
        yield running


async def test_a_log_over_whose_messages_a_broker_ends_goes_seldom_and_holds_up_no_other(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = fix_waits(monkeypatch, 0.06)
    async with Unstorable(stack, [SECOND]) as given, stack.router():
        held_up = await given.logs[0].publish([{}, {}])
        await eventually(lambda: len(given.broker.failed) > 2)
        passed = [await given.logs[SECOND].publish([{}]) for _ in range(3)]
        await eventually(lambda: stack.got("all") == [*chain(*passed)])

        # Then each try but the first waits for its time, and has no other log with it
        assert waits.count(1.0) >= len(given.broker.failed)
        assert all(shards == [0] for shards in given.broker.failed[1:])

        given.broker.is_repaired = True
        await eventually(lambda: sorted(stack.got("all")) == sorted([*chain(*passed), *held_up]))


async def test_a_log_over_whose_messages_a_broker_ended_goes_while_no_other_is_in_flight(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_waits(monkeypatch, 0.02)
    async with Unstorable(stack, [SECOND], SharingCommits) as given, stack.router() as router:
        # Given a broker that ended over a log, which goes again
        broker = given.broker
        await given.logs[0].publish([{}])
        await eventually(lambda: broker.failed)
        broker.ending.clear()
        await eventually(lambda: len(broker.begun) > len(broker.failed))

        # When something of another one comes meanwhile, and the broker ends again
        monkeypatch.setattr(brokers, "unstorable_wait_s", lambda: 3_600.0)
        passed = await given.logs[SECOND].publish([{}])
        route = router.links[0].route(SECOND)
        assert route is not None
        await eventually(lambda: route.judged is not None or route.in_flight is not None)
        broker.ending.set()

        # Then that other one does not wait
        await eventually(lambda: stack.got("all") == passed)


async def test_a_log_over_whose_messages_a_broker_ended_gets_its_turn_beside_busy_ones(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_waits(monkeypatch, 0.02)
    async with Unstorable(stack, [SECOND], SharingCommits) as given, stack.router():
        held_up = await given.logs[0].publish([{}])
        await eventually(lambda: given.broker.failed)

        # While messages of another log come all the time, each try has none of them beside it
        passed: list[int] = []
        while len(given.broker.failed) < 3:
            passed += await given.logs[SECOND].publish([{}])
            await asyncio.sleep(0.005)
        await eventually(lambda: stack.got("all") == passed)
        assert isinstance(given.broker, SharingCommits)
        assert not any(given.broker.beside)

        given.broker.is_repaired = True
        await eventually(lambda: stack.got("all") == passed + held_up)


def test_a_log_goes_again_after_each_wait_by_a_clock_of_whole_milliseconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given waits whose timers come a fraction of a millisecond early
    fix_waits(monkeypatch, 0.0104)

    async def goes_again() -> None:
        async with peers(tmp_path) as stack, Unstorable(stack, []) as given, stack.router():
            # When a broker ends often, then the log goes again each time
            published = await stack.log.publish([{}])
            await eventually(lambda: len(given.broker.failed) > 20)
            given.broker.is_repaired = True
            await eventually(lambda: stack.got("all") == published)

    with asyncio.Runner(loop_factory=timed_uvloop.Loop) as runner:
        runner.run(goes_again())


async def test_every_log_that_was_in_flight_when_a_broker_ended_waits(stack: Stack) -> None:
    async with Unstorable(stack, [1, 2]) as given, stack.router() as router:
        broker = given.broker
        await eventually(lambda: len(router.logs) == 3 and router.is_routing)

        # Given two calls, of which the first one fails while the other one has no answer
        broker.ending.clear()
        broker.answering.clear()
        await given.logs[0].publish([{}])
        await eventually(lambda: broker.begun == [[0]])
        stack.shard.unknown_logs.add(1)
        await given.logs[1].publish([{}])
        await eventually(lambda: broker.begun == [[0], [1]])
        looks_count = broker.looks_count
        broker.ending.set()

        # When the broker works again, and could take what was in the second one
        await eventually(lambda: broker.looks_count > looks_count and router.is_routing)
        stack.shard.unknown_logs.clear()
        broker.answering.set()

        # Then it gets what was not in flight, and that alone
        passed = await given.logs[2].publish([{}])
        await eventually(lambda: stack.got("all") == passed)
        assert broker.begun == [[0], [1], [2]]


async def move_in_reserve(given: Unstorable, router: Router) -> None:
    """Another router gets on with each log, before the eyes of this one."""
    for shard, memory in given.logs.items():
        (given.broker.memory.cursors[shard],) = await memory.publish([{}])
    routes = [router.links[0].route(shard) for shard in given.logs]
    await eventually(lambda: all(route is not None and route.cursor for route in routes))


async def test_a_router_that_has_just_begun_sends_each_log_by_itself_where_it_steps_in(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "LOOK_S", 0.2)
    await announce_routers(stack)
    # Given two logs that stand still, over one of which a broker has ended before
    async with Unstorable(stack, [SECOND]) as given:
        for memory in given.logs.values():
            await memory.publish([{}])

        # When a router begins, and steps in for both, then the broker ends over one alone
        async with stack.router(number=OTHER):
            await eventually(lambda: given.broker.failed)
            assert given.broker.failed == [[0]]


async def test_a_router_that_steps_in_after_a_broker_was_lost_sends_each_log_by_itself(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "LOOK_S", 0.2)
    await announce_routers(stack)
    async with Unstorable(stack, [SECOND]) as given, stack.router(number=OTHER) as router:
        await eventually(lambda: len(router.logs) == 2 and router.is_routing)
        await move_in_reserve(given, router)
        # Given two logs that stand still, and a broker that is lost at the first look at them
        await given.server.stop()
        await given.logs[0].publish([{}])
        await given.logs[SECOND].publish([{}])
        await eventually(lambda: not router.is_routing)
        await given.server.start()

        # When another one steps in for both at once, then the broker ends over one alone
        await eventually(lambda: given.broker.failed)
        assert given.broker.failed == [[0]]


async def test_a_router_that_steps_in_without_a_loss_sends_several_logs_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "LOOK_S", 0.02)
    await announce_routers(stack)
    logs = [log for log in range(1, 100) if is_first(FIRST, ROUTERS, log)][:8]
    async with Unstorable(stack, logs) as given, stack.router(number=OTHER) as router:
        await eventually(lambda: len(router.logs) == 1 + len(logs) and router.is_routing)
        await move_in_reserve(given, router)

        # Given logs that stand still, as their first router runs no more
        given.broker.answering.clear()
        for log in logs:
            await given.logs[log].publish([{}])

        # When another one steps in, then what one of them has does not wait for another's answer
        await eventually(lambda: len([*chain(*given.broker.begun)]) > 1)
        given.broker.answering.set()
        await eventually(lambda: len(stack.got("all")) == len(logs))


async def test_a_log_that_moved_while_the_broker_was_lost_is_left_alone_for_no_longer(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "LOOK_S", 0.02)
    await announce_routers(stack)
    async with Unstorable(stack, []) as given, stack.router(number=OTHER) as router:
        broker = given.broker
        await eventually(lambda: len(router.logs) == 1 and router.is_routing)

        # Given a log that stood still at a look before the broker is lost, and moves meanwhile
        broker.looks_max = broker.looks_count + 2
        first, _ = await given.logs[0].publish([{}, {}])
        await eventually(lambda: broker.looks_count == broker.looks_max)
        await given.server.stop()
        await eventually(lambda: not router.is_routing)
        stack.shard.cursors[0] = first
        broker.looks_max = None
        await given.server.start()

        # When it stands still, then this router steps in after some looks
        await eventually(lambda: broker.failed)


async def test_a_router_does_not_send_at_once_what_a_broker_ended_over_by_another_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "LOOK_S", 0.02)
    await announce_routers(stack)
    async with (
        Unstorable(stack, []) as given,
        stack.router(number=FIRST) as first,
        stack.router(number=OTHER) as other,
    ):
        broker = given.broker
        await eventually(lambda: first.is_routing and other.is_routing)

        # Given a log that stands still while its first router has it in flight
        broker.ending.clear()
        looks_count = broker.looks_count
        broker.looks_max = looks_count + 2
        await given.logs[0].publish([{}])
        await eventually(lambda: broker.looks_count == broker.looks_max)  # It has seen the first.
        await eventually(lambda: broker.begun == [[0]])

        # When the broker ends over it, and works again
        broker.ending.set()
        await eventually(lambda: broker.failed)
        await given.server.stop()
        broker.looks_max = None
        await given.server.start()

        # Then the other router looks often, and leaves it to the first one
        await eventually(lambda: broker.looks_count > looks_count + 10 * LOOKS)
        assert broker.failed == [[0]]
