"""The router while its peers restart, move, lag, lie and go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import CACHE_MS
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.objects.removed_shards import RemovedShards
from services.router import brokers
from services.router import router as routers
from services.router.router import Router
from services.router.tails import Buffer
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc
from tests.integration.router.peers import (
    LogMemory,
    MemoryBroker,
    MemoryIngest,
    Running,
    ShardMemory,
)
from tests.integration.router.stack import WAIT_SECONDS, Stack, peers, running_router
from tests.integration.waiting import eventually
from tests.ports import free_ports


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with peers(tmp_path) as running:
        yield running


async def test_a_broker_that_restarts_after_a_lost_answer_gets_nothing_twice(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")

    async with stack.router():
        stack.broker.answering.clear()
        first = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == first)  # Applied, never answered.
        await stack.broker_server.stop()
        stack.broker.answering.set()
        second = await stack.log.publish([{}])
        await stack.broker_server.start()
        await eventually(lambda: stack.got("all") == first + second)


async def test_a_router_that_was_down_while_deletions_were_forgotten_keeps_no_queue_of_them(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("all", "true")
    await stack.shard.set_queue("gone", "true")
    async with stack.router():
        first = await stack.log.publish([{}])
        await eventually(lambda: stack.got("gone") == stack.got("all") == first)

        # When the broker is down, and more queues are deleted than it remembers
        await stack.broker_server.stop()
        await stack.shard.delete_queue("gone")
        stack.shard.forget_deletions()
        await stack.broker_server.start()

        async def is_passed_over() -> bool:
            routed = await stack.log.publish([{}])
            await eventually(lambda: stack.got("all")[-1:] == routed)
            return stack.got("gone")[-1:] != routed

        # Then the router reads all queues again; a broker leaves out what it judged before that
        async with asyncio.timeout(60):
            while not await is_passed_over():
                pass
        assert await is_passed_over()


async def test_an_ingest_that_moves_is_found_again(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")

    async with stack.router():
        first = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == first)
        await stack.ingest_server.stop()
        await stack.ingest_server.start()
        second = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == first + second)


async def test_a_router_looks_where_a_broker_is_that_was_replaced_and_still_answers(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "SEARCH_MS", CACHE_MS)
    await stack.shard.set_queue("all", "true")
    root, now_s = open_root(stack.root_url), 0.0

    # Given a router to which what it knows of the topology is a second old, so young enough
    async with running_router(root, monotonic=lambda: now_s, look_again_ms=CACHE_MS) as router:
        first = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == first and router.is_routing)

        # When its broker is replaced, and keeps its connections
        successor = Running(stack.directory, MemoryBroker(stack.shard))
        await successor.start()
        stack.broker.is_replaced = True
        now_s = 1.0
        second = await stack.log.publish([{}])

        # Then it goes on with the successor
        await eventually(lambda: stack.got("all") == first + second)
        await successor.stop()


async def test_a_router_that_is_killed_leaves_nothing_out(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    published: list[int] = []

    for _ in range(5):
        async with stack.router() as router:
            published += await stack.log.publish([{}])
            await eventually(lambda: bool(router.logs))
            published += await stack.log.publish([{}])
    async with stack.router():
        await eventually(lambda: stack.shard.cursors.get(0) == stack.log.end)

    assert stack.got("all") == published


async def test_a_broker_that_is_down_stops_no_other_and_gets_everything_later(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("here", "true")
    other_shard = ShardMemory(shard=1)
    await other_shard.set_queue("there", "true")
    other = Running(stack.directory, MemoryBroker(other_shard))
    await other.start()

    async with stack.router(buffer=Buffer(messages_max=10)) as router:
        await eventually(lambda: router.is_routing)
        await other.stop()
        published = [i for _ in range(300) for i in await stack.log.publish([{}])]
        await eventually(lambda: stack.got("here") == published)
        away = router.links[1].route(0)
        assert away is not None
        await eventually(
            lambda: away.pending_count == 0
        )  # Full and away: its memory is given back.

        await other.start()
        published += await stack.log.publish([{}])
        await eventually(lambda: other_shard.assigned.get("there") == published)
        await eventually(lambda: stack.got("here") == published)
        await eventually(
            lambda: len(router.logs[0].tails) == 1
        )  # It has caught up and shares again.
    await other.stop()


async def test_a_removed_broker_shard_is_routed_to_no_more_and_holds_no_other_up(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("here", "true")
    other_shard = ShardMemory(shard=1)
    await other_shard.set_queue("there", "true")
    other = Running(stack.directory, MemoryBroker(other_shard))
    await other.start()

    async with stack.router(buffer=Buffer(messages_max=10)) as router:
        await eventually(lambda: router.is_routing)
        # Given a broker that is down, with a full route; its entry alone is gone
        await eventually(lambda: router.shard_counts == {"ingest": 1, "broker": 2})
        await other.stop()
        published = [i for _ in range(30) for i in await stack.log.publish([{}])]
        await stack.directory.remove("topology/broker-1.json")
        await eventually(lambda: stack.got("here") == published)
        assert 1 in router.links
        await eventually(lambda: router.shard_counts == {"ingest": 1, "broker": 1})

        # When it is removed
        objects = open_root(stack.root_url).objects
        await RemovedShards(objects).add("broker/1", now_ms=0)
        await eventually(lambda: 1 not in router.links)

        # Then all is routed that is left, without a trace of it
        published += await stack.log.publish([{}])
        await eventually(lambda: stack.got("here") == published)
        await eventually(lambda: router.is_routing)
        assert {one.broker_shard for one in router.progress()} == {0}
        assert len(router.logs[0].subscribers) == 1
        await eventually(lambda: router.buffered_bytes == 0)


async def test_the_log_of_a_removed_ingest_shard_is_read_no_more_and_the_others_are_routed(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("all", "true")
    other_log = LogMemory(shard=1)
    other = Running(stack.directory, MemoryIngest(other_log))
    await other.start()

    async with stack.router() as router:
        published = await stack.log.publish([{}]) + await other_log.publish([{}])
        await eventually(lambda: sorted(stack.got("all")) == published)
        # Given an ingest that is down; its entry alone is gone
        await eventually(lambda: router.shard_counts == {"ingest": 2, "broker": 1})
        await other.stop()
        await stack.directory.remove("topology/ingest-1.json")
        published += await stack.log.publish([{}])
        await eventually(lambda: sorted(stack.got("all")) == sorted(published))
        assert 1 in router.logs
        await eventually(lambda: router.shard_counts == {"ingest": 1, "broker": 1})

        # When it is removed
        objects = open_root(stack.root_url).objects
        await RemovedShards(objects).add("ingest/1", now_ms=0)
        await eventually(lambda: 1 not in router.logs)

        # Then the rest is routed as before, once, without a trace of it
        published += await stack.log.publish([{}])
        await eventually(lambda: sorted(stack.got("all")) == sorted(published))
        await eventually(lambda: router.is_routing)
        assert {one.ingest_shard for one in router.progress()} == {0}
        assert len(router.logs[0].subscribers) == 1
        await eventually(lambda: router.buffered_bytes == 0)


async def test_a_broker_that_never_answers_an_assignment_is_asked_again_after_the_deadline(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "ASSIGN_SECONDS", 0.3)
    await stack.shard.set_queue("all", "true")
    stack.broker.answering.clear()
    async with stack.router():
        first = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == first)
        # It keeps what it was told before, and no one waits for its answer
        second = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == first + second)


async def test_a_slow_broker_holds_the_others_up_only_for_the_grace(stack: Stack) -> None:
    await stack.shard.set_queue("quick", "true")
    slow_shard = ShardMemory(shard=1)
    await slow_shard.set_queue("slow", "true")
    slow = MemoryBroker(slow_shard)
    slow_server = Running(stack.directory, slow)
    await slow_server.start()

    async with stack.router(buffer=Buffer(messages_max=10, grace_ms=20)) as router:
        await eventually(lambda: router.is_routing)
        slow.answering.clear()
        published = [i for _ in range(300) for i in await stack.log.publish([{}])]
        await eventually(lambda: stack.got("quick") == published)
        held = router.links[1].route(0)
        assert held is not None
        assert held.pending_count < 100

        slow.answering.set()
        await eventually(lambda: slow_shard.assigned.get("slow") == published)
    await slow_server.stop()


async def test_the_log_is_read_and_judged_on_while_a_broker_takes_its_time(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")

    async with stack.router(buffer=Buffer(messages_max=1000, waiting_max=10)) as router:
        await eventually(lambda: router.is_routing)
        stack.broker.answering.clear()
        published = [i for _ in range(300) for i in await stack.log.publish([{}])]
        await eventually(lambda: [p.pending_count for p in router.progress()] == [300])

        stack.broker.answering.set()
        await eventually(lambda: stack.got("all") == published)


async def test_a_broker_added_later_reads_the_whole_log(stack: Stack) -> None:
    await stack.shard.set_queue("old", "true")
    new_shard = ShardMemory(shard=1)
    await new_shard.set_queue("new", "true")
    new = Running(stack.directory, MemoryBroker(new_shard))

    async with stack.router():
        published = [i for _ in range(20) for i in await stack.log.publish([{}])]
        await eventually(lambda: stack.got("old") == published)
        await new.start()
        await eventually(lambda: new_shard.assigned.get("new") == published)
    await new.stop()


async def test_a_broker_that_starts_shortly_after_another_is_not_waited_for_like_a_rare_new_one(
    stack: Stack,
) -> None:
    # Given a router that looks for rare ones less often than any test lasts
    shard = ShardMemory(shard=1)
    other = Running(stack.directory, MemoryBroker(shard))
    root = open_root(stack.root_url)
    async with running_router(root, look_again_ms=10_000_000) as router:
        await eventually(lambda: router.is_routing)

        # When another broker comes, then it is found
        await other.start()
        await eventually(lambda: router.links.keys() == {0, 1})
    await other.stop()


async def test_a_broker_put_back_to_an_older_state_is_routed_from_there(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    await stack.shard.set_queue("dropped", "true")

    async with stack.router() as router:
        published = [i for _ in range(20) for i in await stack.log.publish([{}])]
        await eventually(lambda: stack.got("all") == published)
        await eventually(lambda: [p.pending_count for p in router.progress()] == [0])

        shard = stack.shard
        shard.cursors[0], shard.revision = published[9], 1
        shard.changes.pop("dropped")
        shard.assigned.clear()
        published += await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == published[10:])

    assert stack.got("dropped") == []


async def test_wrong_answers_and_wrong_peers_are_survived(stack: Stack) -> None:
    class Liar(MemoryBroker):
        lies = 3

        async def Assign(  # noqa: N802
            self, request: assignment_pb2.AssignRequest, context: object
        ) -> assignment_pb2.AssignResponse:
            if self.lies:
                self.lies -= 1
                return assignment_pb2.AssignResponse(config_revision=self.memory.revision)
            return await super().Assign(request, context)

    await stack.broker_server.stop()
    liar = Liar(stack.shard)
    server = Running(stack.directory, liar)
    await server.start()
    await stack.shard.set_queue("all", "true")

    async with stack.router():
        ids = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all") == ids)
    await server.stop()

    assert liar.lies == 0


async def test_another_process_on_a_known_address_is_not_taken_for_the_broker(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("all", "true")
    await stack.broker_server.stop()
    (port,) = free_ports(1)
    await stack.broker_server.start(port)
    await stack.broker_server.stop()
    wrong = MemoryBroker(ShardMemory(shard=5))
    wrong_server = grpc.aio.server()
    assignment_pb2_grpc.add_AssignmentServiceServicer_to_server(wrong, wrong_server)
    wrong_server.add_insecure_port(f"127.0.0.1:{port}")
    await wrong_server.start()

    async with stack.router() as router:
        ids = await stack.log.publish([{}])
        await eventually(lambda: bool(router.logs) and router.logs[0].durable_sequence == ids[0])
        assert not router.links[0].is_known
        await stack.broker_server.start()
        await eventually(lambda: stack.got("all") == ids)
    await wrong_server.stop(0)

    assert wrong.memory.calls_count == 0


async def test_a_lag_is_known_only_while_the_log_says_where_it_ends(stack: Stack) -> None:
    # Given an ingest that is down when routing begins
    await stack.shard.set_queue("all", "true")
    await stack.ingest_server.stop()

    async with stack.router() as router:
        await eventually(lambda: bool([*router.progress()]) and router.links[0].is_known)
        assert [(p.pending_count, p.is_current) for p in router.progress()] == [(0, False)]

        # When it is up, then the lag is known, and no longer once it is down again
        await stack.ingest_server.start()
        await eventually(lambda: all(p.is_current for p in router.progress()))
        await stack.ingest_server.stop()
        await eventually(lambda: not any(p.is_current for p in router.progress()))
    await stack.ingest_server.start()


async def test_an_assign_with_a_hole_is_refused_and_costs_nothing(stack: Stack) -> None:
    await stack.shard.set_queue("all", "true")
    stack.shard.cursors[0] = 0
    await stack.log.publish([{}])

    async with stack.router() as router, AsyncExitStack() as forged:
        await eventually(lambda: stack.shard.cursors[0] == 1)
        channel = await forged.enter_async_context(
            grpc.aio.insecure_channel(
                (await stack.directory.read(0)).brokers[0],
            )
        )
        answer = await assignment_pb2_grpc.AssignmentServiceStub(channel).Assign(
            assignment_pb2.AssignRequest(
                ranges=[
                    assignment_pb2.LogRange(
                        ingest_shard=0,
                        previous_sequence=5,
                        last_sequence=9,
                        config_revision=stack.shard.revision,
                    )
                ],
            )
        )
        assert (answer.results[0].applied, answer.results[0].cursor) == (False, 1)
        ids = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all")[-1:] == ids)
        assert router.is_routing


async def test_a_queue_that_changes_all_the_time_does_not_stop_the_routing_of_others(
    stack: Stack,
) -> None:
    """Each call meets a change that the router could not know of."""

    class Restless(MemoryBroker):
        async def Assign(  # noqa: N802
            self, request: assignment_pb2.AssignRequest, context: object
        ) -> assignment_pb2.AssignResponse:
            number = self.memory.calls_count
            await self.memory.set_queue(f"new-{number}", "true")
            await self.memory.set_queue("restless", f'headers["n"] == "{number}"')
            return await super().Assign(request, context)

    def all_came(count: int) -> bool:
        return len(stack.got("all")) == count

    await stack.broker_server.stop()
    server = Running(stack.directory, Restless(stack.shard))
    await server.start()
    await stack.shard.set_queue("all", "true")

    async with stack.router():
        for count in range(1, 21):
            await stack.log.publish([{}])
            await eventually(partial(all_came, count))
    await server.stop()

    assert stack.shard.calls_count <= 2 * 20
    assert stack.got("new-0") == stack.got("all")


async def test_a_failure_of_ours_ends_the_router_instead_of_leaving_its_log_behind(
    stack: Stack,
) -> None:
    await stack.shard.set_queue("all", "true")
    # No ingest stores this: the end of its retention fits into no field of a call.
    await stack.log.publish([{}], retention_s=10, received_at_ms=(1 << 63) - 1)

    router = Router(stack.directory, Channels(stack.directory), Telemetry())
    with pytest.raises(ValueError, match="range"):
        await asyncio.wait_for(router.run(), WAIT_SECONDS)


async def test_a_range_that_a_broker_cannot_take_yet_goes_again_and_holds_up_no_other_log(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "RETRY_S", 0.01)
    # Given two logs, of which the broker cannot take one yet
    second = LogMemory(shard=1)
    other = Running(stack.directory, MemoryIngest(second))
    await other.start()
    await stack.shard.set_queue("all", "true")
    stack.shard.unknown_logs.add(0)

    async with stack.router():
        held_up = await stack.log.publish([{}, {}])
        await eventually(lambda: stack.shard.calls_count > 3)

        # Then the other one's messages come
        passed = await second.publish([{}, {}])
        await eventually(lambda: stack.got("all") == passed)

        # And these do when it can
        stack.shard.unknown_logs.clear()
        await eventually(lambda: stack.got("all") == [*passed, *held_up])
    await other.stop()


async def test_a_piece_that_is_too_large_for_a_call_is_split(stack: Stack) -> None:
    await stack.broker_server.stop()
    small = Running(stack.directory, stack.broker, (("grpc.max_receive_message_length", 4_000),))
    await small.start()
    for n in range(20):
        await stack.shard.set_queue(f"all-{n}", "true")

    async with stack.router():
        published = await stack.log.publish([{}] * 2_000)
        await eventually(lambda: stack.shard.cursors.get(0) == published[-1])
    await small.stop()

    assert all(stack.got(f"all-{n}") == published for n in range(20))
