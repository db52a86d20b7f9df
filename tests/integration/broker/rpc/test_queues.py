"""Queues over the wire: created, read, changed and deleted."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from libs.access.current import may
from libs.access.verbs import Verb
from services.broker.requests import limits
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import NotFound
from slatemq.v1 import queue_pb2
from tests.integration.broker.queue_calls import delete, get, swept, update
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def backoff(**settings: float) -> queue_pb2.Backoff:
    kind = queue_pb2.Backoff.KIND_EXPONENTIAL
    return queue_pb2.Backoff(kind=kind, **settings)  # type: ignore[arg-type]


async def all_ids(rig: Rig, size: int = 0, prefix: str = "") -> list[list[str]]:
    pages, token = [], ""
    while True:
        request = queue_pb2.ListQueuesRequest(page_size=size, prefix=prefix, page_token=token)
        answer = await rig.queues.ListQueues(request)
        pages.append([queue.queue_id for queue in answer.queues])
        token = answer.next_page_token
        if not token:
            return pages


async def test_a_queue_is_created_with_every_default_filled_in() -> None:
    async with running() as rig:
        created = await rig.create("orders.eu-1", backoff=None)

        assert created.filter == 'headers["queue"] == "orders.eu-1"'
        assert created.priority == ""
        assert created.max_attempts == 5
        assert created.lease_ms == 30_000
        assert created.max_lease_ms == 43_200_000
        assert created.done_retention_s == 86_400
        assert created.max_in_flight == 100_000
        assert created.default_delay_ms == 0
        assert created.backoff == backoff(initial_ms=1000, max_ms=600_000, multiplier=5, jitter=0.5)
        assert created.fallback_priority == 128
        assert created.max_total_lease_ms == 43_200_000
        assert created.failed_retention_s == 0
        assert not created.paused
        assert created.created_at_ms == created.updated_at_ms == rig.clock.now_ms()
        assert created.revision == 1
        assert await get(rig, "orders.eu-1") == queue_pb2.Queue(
            **{f.name: v for f, v in created.ListFields()},
            counts=queue_pb2.QueueCounts(),
            totals=queue_pb2.QueueTotals(),
        )


async def test_a_default_lease_is_no_longer_than_the_longest_lease() -> None:
    async with running() as rig:
        assert (await rig.create(max_lease_ms=5000)).lease_ms == 5000


async def test_settings_survive_a_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create("a", filter="size > 3", priority="7", max_attempts=2, max_in_flight=9)
        await rig.create("gone")
        await delete(rig, "gone")
        before = await get(rig, "a")
    async with running(root, clock, disk=disk) as rig:
        assert await get(rig, "a") == before
        assert await all_ids(rig) == [["a"]]


async def test_a_queue_that_exists_is_not_created_again_nor_changed() -> None:
    async with running() as rig:
        before = await rig.create()
        code, reason, _ = await refusal(rig.create(max_attempts=9))
        assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "QUEUE_ALREADY_EXISTS")
        assert (await get(rig)).etag == before.etag


BAD_SETTINGS: list[tuple[str, dict[str, object]]] = [
    ("filter", {"filter": ""}),
    ("filter", {"filter": "x" * 8193}),
    ("filter", {"filter": "headers["}),
    ("filter", {"filter": "nobody == 1"}),
    ("filter", {"filter": "size"}),
    ("priority", {"priority": "'high'"}),
    ("priority", {"priority": "1 +"}),
    ("max_attempts", {"max_attempts": 0}),
    ("max_attempts", {"max_attempts": 65_536}),
    ("max_attempts", {"max_attempts": -1}),
    ("lease_ms", {"lease_ms": 999}),
    ("lease_ms", {"lease_ms": 43_200_001}),
    ("lease_ms", {"lease_ms": 6000, "max_lease_ms": 5000}),
    ("max_lease_ms", {"max_lease_ms": 999}),
    ("max_lease_ms", {"max_lease_ms": 43_200_001}),
    ("done_retention_s", {"done_retention_s": -1}),
    ("done_retention_s", {"done_retention_s": 1 << 32}),
    ("max_in_flight", {"max_in_flight": 0}),
    ("max_in_flight", {"max_in_flight": 1_000_001}),
    ("default_delay_ms", {"default_delay_ms": -1}),
    ("default_delay_ms", {"default_delay_ms": 900_001}),
    ("fallback_priority", {"fallback_priority": -1}),
    ("fallback_priority", {"fallback_priority": 256}),
    ("max_total_lease_ms", {"max_total_lease_ms": 999}),
    ("max_total_lease_ms", {"max_total_lease_ms": 604_800_001}),
    ("max_lease_ms", {"max_total_lease_ms": 5000, "max_lease_ms": 6000}),
    ("failed_retention_s", {"failed_retention_s": -1}),
    ("failed_retention_s", {"failed_retention_s": 1 << 32}),
    ("backoff.kind", {"backoff": queue_pb2.Backoff(initial_ms=1)}),
    ("backoff.kind", {"backoff": queue_pb2.Backoff(kind=9, initial_ms=1)}),  # type: ignore[arg-type]
    ("backoff", {"backoff": queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_NONE, initial_ms=1)}),
    ("backoff.kind", {"backoff": queue_pb2.Backoff()}),
    ("backoff.initial_ms", {"backoff": backoff()}),
    ("backoff.initial_ms", {"backoff": backoff(initial_ms=-1)}),
    ("backoff.initial_ms", {"backoff": backoff(initial_ms=43_200_001)}),
    ("backoff.max_ms", {"backoff": backoff(initial_ms=9, max_ms=8)}),
    ("backoff.max_ms", {"backoff": backoff(initial_ms=9, max_ms=43_200_001)}),
    ("backoff.multiplier", {"backoff": backoff(initial_ms=9, multiplier=0.99)}),
    ("backoff.multiplier", {"backoff": backoff(initial_ms=9, multiplier=100.1)}),
    ("backoff.multiplier", {"backoff": backoff(initial_ms=9, multiplier=math.nan)}),
    ("backoff.jitter", {"backoff": backoff(initial_ms=9, jitter=-0.1)}),
    ("backoff.jitter", {"backoff": backoff(initial_ms=9, jitter=1.1)}),
    ("backoff.jitter", {"backoff": backoff(initial_ms=9, jitter=math.inf)}),
]


async def test_a_bad_setting_is_named_and_changes_nothing() -> None:
    async with running() as rig:
        before = await rig.create("old")
        for field, settings in BAD_SETTINGS:
            code, _, named = await refusal(rig.create("new", **settings))
            assert (code, named) == (INVALID, f"queue.{field}"), settings
            code, _, named = await refusal(update(rig, list(settings), "old", **settings))
            assert (code, named) == (INVALID, f"queue.{field}"), settings
        for queue_id in ("", "a" * 256, "a b", "a/b", "ä", "a\n"):
            code, _, named = await refusal(rig.create(queue_id))
            assert (code, named) == (INVALID, "queue.queue_id"), queue_id

        assert await all_ids(rig) == [["old"]]
        assert (await get(rig, "old")).etag == before.etag
        assert rig.owner.shard.revision == before.revision


async def test_a_bad_expression_is_refused_with_line_and_column() -> None:
    async with running() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.create(filter="size > 1 &&\n  unknown == 2")
        error = from_rpc_error(refused.value)
        assert error.reason == "INVALID_EXPRESSION"
        assert (error.metadata["line"], error.metadata["column"]) == ("2", "3")


async def test_a_lower_longest_lease_than_the_lease_is_refused() -> None:
    async with running() as rig:
        await rig.create()
        result = await refusal(update(rig, ["max_lease_ms"], max_lease_ms=5000))
        assert result[::2] == (INVALID, "queue.max_lease_ms")
        both = await update(rig, ["max_lease_ms", "lease_ms"], max_lease_ms=5000)
        assert both.lease_ms == 5000


async def test_an_update_changes_what_the_mask_names_and_nothing_else() -> None:
    async with running() as rig:
        before = await rig.create(max_attempts=9, priority="7")
        rig.clock.advance(5)
        after = await update(
            rig, ["max_attempts", "filter"], filter="true", lease_ms=1234, max_in_flight=1
        )

        assert (after.max_attempts, after.filter) == (5, "true"), "an absent field: the default"
        assert (after.lease_ms, after.max_in_flight, after.priority) == (30_000, 100_000, "7")
        assert after.revision > before.revision
        assert after.etag != before.etag
        assert after.updated_at_ms == after.created_at_ms + 5


async def test_an_update_mask_must_name_settings() -> None:
    async with running() as rig:
        await rig.create()
        assert (await refusal(update(rig, [])))[::2] == (INVALID, "update_mask")
        result = await refusal(update(rig, ["filter", "queue_id"]))
        assert result[::2] == (INVALID, "update_mask.paths[1]")


async def test_an_old_etag_is_refused_with_the_current_one() -> None:
    async with running() as rig:
        old = (await rig.create()).etag
        current = (await update(rig, ["max_attempts"], max_attempts=2, etag=old)).etag
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await update(rig, ["max_attempts"], max_attempts=3, etag=old)
        assert refused.value.code() == grpc.StatusCode.ABORTED
        assert from_rpc_error(refused.value).metadata["etag"] == current
        assert (await refusal(delete(rig, etag=old)))[0] == grpc.StatusCode.ABORTED
        assert (await get(rig)).max_attempts == 2
        await delete(rig, etag=current)
        assert await all_ids(rig) == [[]]


async def test_an_unknown_queue_is_not_found_and_an_impossible_one_invalid() -> None:
    async with running() as rig:
        calls: dict[str, Any] = {
            "queue_id": [lambda q: get(rig, q), lambda q: delete(rig, q), lambda q: rig.claim(q)],
            "queue.queue_id": [lambda q: update(rig, ["filter"], q)],
        }
        for field, some in calls.items():
            for call in some:
                code, reason, _ = await refusal(call("nobody"))
                assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")
                assert (await refusal(call("no body")))[::2] == (INVALID, field)


async def test_queues_are_listed_in_pages_and_by_prefix() -> None:
    async with running() as rig:
        names = ["B", "a", "a.1", "a.2", "ab", "b"]
        for name in reversed(names):
            await rig.create(name)
        assert await all_ids(rig) == [names]
        assert await all_ids(rig, size=4) == [names[:4], names[4:]]
        assert await all_ids(rig, size=6) == [names]
        assert await all_ids(rig, size=1, prefix="a.") == [["a.1"], ["a.2"]]
        assert await all_ids(rig, prefix="ä") == [[]]


async def test_a_page_judges_no_more_queues_than_it_lists_and_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[str] = []

    def noted(verb: Verb, queue: str) -> bool:
        judged.append(queue)
        return may(verb, queue)

    monkeypatch.setattr(limits, "may", noted)
    async with running() as rig:
        names = sorted(f"queue-{number}" for number in range(12))
        for name in names:
            await rig.create(name)

        assert await all_ids(rig, size=5) == [names[:5], names[5:10], names[10:]]
        assert judged == [*names[:6], *names[5:11], *names[10:]]


async def test_a_forged_page_token_is_refused() -> None:
    async with running() as rig:
        for name in ("a", "b", "c"):
            await rig.create(name)
        request = queue_pb2.ListQueuesRequest(page_size=1)
        token = (await rig.queues.ListQueues(request)).next_page_token
        other = token[:-2] + ("A" if token[-2] != "A" else "B") + token[-1]
        for forged in ("x", "YQ==", token[:-1], token + "=", token + "A", other, "ä", "\x00"):
            request = queue_pb2.ListQueuesRequest(page_token=forged)
            result = await refusal(rig.queues.ListQueues(request))
            assert result == (INVALID, "INVALID_PAGE_TOKEN", "page_token"), forged
        request = queue_pb2.ListQueuesRequest(page_size=-1)
        assert (await refusal(rig.queues.ListQueues(request)))[::2] == (INVALID, "page_size")


async def test_a_queue_re_created_is_empty_and_refuses_the_old_leases() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2, 3])
        (old,) = await rig.claim()
        first = await get(rig)

        await delete(rig)
        await swept(rig)
        rig.clock.advance(1)
        second = await rig.create()

        assert second.etag != first.etag
        assert await rig.counts() == {}
        assert await rig.ack(old.lease_token) == [5]
        assert await rig.claim() == []
        await rig.assign([4])
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [4]


async def test_a_refusal_that_rests_on_a_deletion_waits_until_that_is_durable() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        waiting = asyncio.create_task(refusal(rig.claim(wait_ms=30_000)))
        while not rig.delivery.has_waiters("q"):
            await asyncio.sleep(0.001)
        disk.free.clear()
        deleting = asyncio.create_task(delete(rig))
        while "q" in rig.owner.shard.queues:
            await asyncio.sleep(0.001)
        calls = [waiting, *(asyncio.create_task(refusal(c)) for c in (rig.claim(), get(rig)))]

        done, _ = await asyncio.wait([deleting, *calls], timeout=0.2)

        assert not done
        disk.free.set()
        await deleting
        for code, _, _ in await asyncio.gather(*calls):
            assert code == grpc.StatusCode.NOT_FOUND


async def test_a_command_that_runs_alone_is_refused_once_that_is_durable_on_which_it_rests() -> (
    None
):
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        disk.free.clear()
        deleting = asyncio.create_task(delete(rig))
        while "q" in rig.owner.shard.queues:
            await asyncio.sleep(0.001)
        refused = asyncio.create_task(rig.owner.run_alone(lambda _: rig.owner.queue("q")))

        done, _ = await asyncio.wait([deleting, refused], timeout=0.2)

        assert not done
        disk.free.set()
        await deleting
        with pytest.raises(NotFound):
            await refused
