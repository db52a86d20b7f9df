"""One queue over several brokers, through the client, with every service a process."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import slatemq
from libs.storage.layout.partitions import partition_of_value
from slatemq import codecs
from slatemq._admin import placement
from slatemq._consume import gathering
from slatemq.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from tests.forms import examples
from tests.integration.janitor.instances import Instance, instance
from tests.logged import logged_besides

pytestmark = pytest.mark.stack

BROKERS = 3


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Instance]:
    async with instance(tmp_path, BROKERS, ()) as running:
        yield running


async def create(made: Instance, queue_id: str, **settings: Any) -> slatemq.Queue:
    settings.setdefault("backoff", slatemq.Backoff.none())
    settings.setdefault("partitions", BROKERS)
    return await made.client.create_queue(queue_id, **settings)


async def claimed(made: Instance, queue_id: str, count: int) -> list[slatemq.Received]:
    """So many messages, each of which comes once."""
    found: list[slatemq.Received] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await made.client.claim(queue_id, count - len(found), wait=5, lease=600)
    assert len({one.message_id for one in found}) == count
    return found


async def keyed(made: Instance, queue_id: str, keys: list[str]) -> None:
    await made.client.publish_many(
        [
            slatemq.OutgoingMessage(key.encode(), {"queue": queue_id, "customer": key})
            for key in keys
        ]
    )
    await made.routed()


async def test_each_message_is_in_one_partition_and_the_queue_is_seen_as_one(
    made: Instance,
) -> None:
    client = made.client
    queue = await create(made, "q")
    assert (queue.partitions_count, len(queue.partitions)) == (BROKERS, BROKERS)
    assert queue.quarantine is None
    assert not queue.missing_partitions
    await client.create_queue("plain")

    ids = await made.publish("q", 600)
    await made.routed()
    queue = await client.get_queue("q")
    assert queue.counts.available_count == 600
    each = [part.counts.available_count for part in queue.partitions.values()]
    assert sum(each) == 600
    assert min(each) > 150
    listed = [one async for one in client.list_queues()]
    assert [(one.queue_id, one.counts.available_count) for one in listed] == [
        ("plain", 0),
        ("q", 600),
    ]
    assert await made.listed("q", "available") == ids
    pages, token = [], ""
    while True:
        page = await client.entry_page("q", "available", page_size=170, page_token=token)
        pages.append([entry.message_id for entry in page.entries])
        token = page.next_page_token
        if not token:
            break
    assert sorted(one for some in pages for one in some) == sorted(ids)
    assert max(map(len, pages)) == 170

    # A consumer gets all of it, and acks go where the leases are.
    got: Counter[int] = Counter()
    async with client.consume("q", prefetch=20) as messages, asyncio.timeout(60):
        async for message in messages:
            async with message:
                got[message.message_id] += 1
            if len(got) == 600:
                break
    assert got == Counter(dict.fromkeys(ids, 1))
    counts = (await client.get_queue("q")).counts
    assert (counts.available_count, counts.in_flight_count, counts.done_count) == (0, 0, 600)
    done = [entry.finished_at_ms async for entry in client.list_entries("q", "done")]
    assert done == sorted(done)
    assert len(done) == 600


async def test_batches_and_waiting_claims_gather_from_all_partitions(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "REFUSED_S", 60.0)
    client = made.client
    await create(made, "q")
    waiting = asyncio.create_task(client.claim("q", 10, wait=30, lease=600))
    await asyncio.sleep(0.3)
    ids = set(await made.publish("q", 1))
    (first,) = await waiting
    assert {first.message_id} == ids
    await first.ack()
    # The other partitions' streams have ended, and nothing counts as an attempt.
    ids = await made.publish("q", 300)
    await made.routed()
    messages = await claimed(made, "q", 300)
    assert {one.message_id for one in messages} == ids
    assert {one.attempts_count for one in messages} == {1}
    assert (await client.get_queue("q")).counts.in_flight_count == 300
    assert await client.ack([one.lease_token for one in messages]) == [None] * 300
    assert await client.claim("q", 10, wait=0.2) == []

    ids = await made.publish("q", 500)
    got: Counter[int] = Counter()
    async with client.consume_batches("q", 40) as batches, asyncio.timeout(60):
        async for batch in batches:
            async with batch:
                got.update(one.message_id for one in batch)
            if len(got) == 500:
                break
    assert got == Counter(dict.fromkeys(ids, 1))


async def test_a_view_takes_the_items_of_all_partitions(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "REFUSED_S", 60.0)
    await create(made, "q")
    ids = await made.publish("q", 30)
    await made.routed()
    view = made.client.queue_view("q", codecs.BYTES)
    assert await view.len() == 30
    tokens = [await view.try_next() for _ in range(30)]
    assert sorted(token.message_id for token in tokens if token is not None) == sorted(ids)
    assert await view.try_next() is None
    assert await view.len() == 0

    # Those of several brokers are refused together, with none used, and complete by broker
    commands = made.client.queue_commands("q", codecs.BYTES)
    by_shard: dict[int, list[slatemq.MessageToken[bytes]]] = {}
    for token in tokens:
        assert token is not None
        by_shard.setdefault(token.shard, []).append(token)
    assert len(by_shard) > 1
    with pytest.raises(FailedPrecondition) as refused:
        commands.complete([token for token in tokens if token is not None])
    assert refused.value.reason == "OTHER_SHARD"
    for some in by_shard.values():
        await commands.complete(some).commit()


async def test_many_waiting_claims_get_each_message_once_at_its_first_attempt(
    made: Instance,
) -> None:
    await create(made, "q")
    got: list[slatemq.Received] = []

    async def consumer() -> None:
        while len(got) < 60:
            got.extend(await made.client.claim("q", 5, wait=2, lease=600))

    async with asyncio.timeout(120):
        consumers = asyncio.gather(*(consumer() for _ in range(4)))
        ids = set[int]()
        for _ in range(20):
            ids |= await made.publish("q", 3)
            await asyncio.sleep(0.05)
        await consumers
    assert sorted(one.message_id for one in got) == sorted(ids)
    assert {one.attempts_count for one in got} == {1}


@pytest.mark.repeated
@pytest.mark.parametrize("partitions", [1, BROKERS])
async def test_claims_whose_callers_give_up_keep_no_message_and_count_no_attempt(
    made: Instance, partitions: int
) -> None:
    client = made.client
    await create(made, "q", max_attempts=1, partitions=partitions)
    got: list[int] = []
    rounds_count = examples(100)
    for number in range(rounds_count):
        claiming = asyncio.create_task(client.claim("q", 10, wait=30))
        await asyncio.sleep(0.002 * (number % 10))
        await made.publish("q", 3)
        await asyncio.sleep(0.001 * (number % 7))
        claiming.cancel()
        (messages,) = await asyncio.gather(claiming, return_exceptions=True)
        if isinstance(messages, list):
            await client.ack([message.lease_token for message in messages])
            got += [message.message_id for message in messages]

    everything_count = 3 * rounds_count
    assert len(got) < everything_count, "no claim was cancelled in time"
    rest = await claimed(made, "q", everything_count - len(got))
    assert len({*got, *(message.message_id for message in rest)}) == everything_count
    assert {message.attempts_count for message in rest} == {1}


@pytest.mark.repeated
async def test_batches_of_a_consumer_that_closes_go_back_and_count_no_attempt(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slatemq._consume.consumer.CLOSE_S", 60.0)
    client = made.client
    await create(made, "q", max_attempts=1)
    got: list[int] = []

    async def consume(batches: slatemq.BatchConsumer) -> None:
        async for batch in batches:
            await batch.ack_all()
            got.extend(message.message_id for message in batch)

    rounds_count = examples(60)
    for number in range(rounds_count):
        batches = client.consume_batches("q", 10)
        consuming = asyncio.create_task(consume(batches))
        await asyncio.sleep(0.003 * (number % 10))
        await made.publish("q", 3)
        await asyncio.sleep(0.001 * (number % 7))
        await batches.close()
        await consuming

    rest = await claimed(made, "q", 3 * rounds_count - len(got))
    assert len({*got, *(message.message_id for message in rest)}) == 3 * rounds_count
    assert {message.attempts_count for message in rest} <= {1}


async def test_a_claim_that_waits_while_its_client_closes_is_refused(
    made: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    await create(made, "q")
    for waited_s in (0, 0.01, 0.5):
        client = slatemq.connect(made.brokers[0].address)
        claiming = asyncio.create_task(client.claim("q", wait=60))
        await asyncio.sleep(waited_s)

        await client.close()

        with pytest.raises(Unavailable) as refused:
            await claiming
        assert refused.value.reason == "CLIENT_CLOSED"
    assert not logged_besides(caplog)


async def test_what_a_frozen_broker_brings_after_a_claim_goes_back_uncounted(
    made: Instance,
) -> None:
    client = made.client
    queue = await create(made, "q", max_attempts=1)
    await made.publish("q", 300)
    await made.routed()
    frozen = made.brokers[queue.partitions[1].broker_shard].process

    frozen.send_signal(signal.SIGSTOP)
    try:
        got = await client.claim("q", 300, lease=600)
    finally:
        frozen.send_signal(signal.SIGCONT)

    assert got
    assert {int(one.lease_token.partition("-")[0], 16) for one in got} <= {
        queue.partitions[0].broker_shard,
        queue.partitions[2].broker_shard,
    }
    rest = await claimed(made, "q", 300 - len(got))
    assert not {one.message_id for one in rest} & {one.message_id for one in got}
    assert {one.attempts_count for one in rest} == {1}


async def test_messages_with_one_value_of_the_ordering_header_are_in_one_partition(
    made: Instance,
) -> None:
    queue = await create(made, "q", ordering_header="customer")
    assert queue.ordering_header == "customer"
    keys = [f"customer-{number % 40}" for number in range(400)]
    await keyed(made, "q", keys)

    parts = {part.broker_shard: index for index, part in queue.partitions.items()}
    order: dict[str, list[int]] = {}
    for message in await claimed(made, "q", 400):
        key = message.headers["customer"]
        shard = int(message.lease_token.partition("-")[0], 16)
        assert parts[shard] == partition_of_value(key, BROKERS)
        order.setdefault(key, []).append(message.message_id)
    assert all(ids == sorted(ids) for ids in order.values())
    assert len({partition_of_value(key, BROKERS) for key in keys}) == BROKERS

    (to_first,) = await made.client.explain({"queue": "q", "customer": "a"})
    assert to_first.matched


async def test_a_queue_that_starts_in_the_past_and_pushes_spread_alike(made: Instance) -> None:
    client = made.client
    before = await client.publish_many(
        [slatemq.OutgoingMessage(b"", {"queue": "q"}) for _ in range(200)]
    )
    await made.routed()
    await create(made, "q", start_from="beginning")
    ids = {int(one) for one in before} | await made.publish("q", 100)
    async with asyncio.timeout(60):
        while (queue := await client.get_queue("q")).counts.available_count < 300:
            await asyncio.sleep(0.05)
    assert queue.replay is not None
    assert await made.listed("q", "available") == ids

    # Pushes are routed by the same rule.
    await client.execute([slatemq.Push("q", b"pushed") for _ in range(30)])
    async with asyncio.timeout(60):
        while (queue := await client.get_queue("q")).counts.available_count < 330:
            await asyncio.sleep(0.05)
    assert min(part.counts.available_count for part in queue.partitions.values()) > 80


async def test_settings_pauses_purges_and_deletion_reach_every_partition(made: Instance) -> None:
    client = made.client
    queue = await create(made, "q")
    changed = await client.update_queue("q", max_attempts=1, etag=queue.etag)
    assert changed.max_attempts == 1
    assert not changed.settings_differ
    with pytest.raises(Aborted) as refused:
        await client.update_queue("q", max_attempts=9, etag=queue.etag)
    assert refused.value.etag == changed.etag
    await made.publish("q", 90)
    await made.routed()
    assert (await client.pause_queue("q")).paused
    with pytest.raises(FailedPrecondition, match="paused"):
        await client.claim("q", 10)
    assert not (await client.resume_queue("q")).paused
    assert await client.purge_queue("q") == 90

    with pytest.raises(Aborted):
        await client.delete_queue("q", etag=queue.etag)
    assert (await client.get_queue("q")).partitions_count == BROKERS
    await client.delete_queue("q", etag=(await client.get_queue("q")).etag)
    with pytest.raises(NotFound):
        await client.get_queue("q")
    with pytest.raises(NotFound):
        await client.delete_queue("q")
    assert (await client.create_queue("q")).partitions_count == 0


async def test_dead_letters_of_all_partitions_are_listed_settled_and_redriven(
    made: Instance,
) -> None:
    client = made.client
    await create(made, "q", max_attempts=1)
    ids = await made.publish("q", 60)
    await made.routed()
    tokens = [one.lease_token for one in await claimed(made, "q", 60)]
    assert await client.nack(tokens, "broken") == [None] * 60
    failed = [entry async for entry in client.list_entries("q", "failed", newest_first=True)]
    assert {entry.message_id for entry in failed} == ids
    times = [entry.finished_at_ms for entry in failed]
    assert times == sorted(times, reverse=True)

    # An entry is found by its handle, with and without its place.
    one = failed[0]
    assert (await client.get_entry(one.handle)).message_id == one.message_id
    bare = f"q/{one.message_id:x}"
    assert (await client.get_entry(bare)).handle == one.handle
    with pytest.raises(NotFound):
        await client.get_entry("q/1fffff")

    dropped, redriven, left = failed[:10], failed[10:20], failed[20:]
    await client.settle_dead_letters(
        [
            *(slatemq.DropDeadLetter(entry.handle) for entry in dropped),
            *(slatemq.RedriveDeadLetter(entry.handle) for entry in redriven),
        ]
    )
    counts = (await client.get_queue("q")).counts
    assert (counts.failed_count, counts.done_count, counts.available_count) == (40, 10, 10)
    begun = await client.start_redrive("q")
    ended = await client.wait_redrive(begun.redrive_id, every=0.1)
    assert (ended.state, ended.redriven_count, ended.total_count) == ("done", 40, 40)
    assert [one async for one in client.list_redrives("q")] == [ended]
    assert [one async for one in client.list_redrives()] == [ended]
    with pytest.raises(FailedPrecondition, match="done"):
        await client.cancel_redrive(ended)
    again = {entry.message_id for entry in left} | {entry.message_id for entry in redriven}
    assert await made.listed("q", "available") == again

    # Redriven into another queue, they are spread by the same rule.
    await create(made, "keyed", ordering_header="customer")
    tokens = [one.lease_token for one in await claimed(made, "q", 50)]
    assert await client.nack(tokens) == [None] * 50
    moved = await client.wait_redrive(await client.start_redrive("q", into="keyed"), every=0.1)
    assert moved.redriven_count == 50
    async with asyncio.timeout(60):
        while (await client.get_queue("keyed")).counts.available_count < 50:
            await asyncio.sleep(0.05)


async def test_a_creation_that_broke_off_is_visible_routes_nothing_and_is_finished_by_a_repeat(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slatemq._admin.queue_calls import QueueCalls

    class Killed(Exception):
        pass

    calls = 0
    die_at = 0

    def dying(real: Any) -> Any:
        async def step(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == die_at:
                raise Killed
            return await real(*arguments)

        return step

    monkeypatch.setattr(QueueCalls, "_create_partition", dying(QueueCalls._create_partition))
    monkeypatch.setattr(QueueCalls, "_open", dying(QueueCalls._open))
    for die_at in range(2, 2 * BROKERS + 1):
        queue_id, calls = f"q{die_at}", 0
        with pytest.raises(Killed):
            await create(made, queue_id, ordering_header="customer")
        await asyncio.sleep(0.05)  # What was under way beside it.
        seen = await made.client.get_queue(queue_id)
        assert seen.quarantine is not None
        assert seen.quarantine.being_created
        with pytest.raises(FailedPrecondition) as refused:
            await made.client.lift_quarantine(queue_id)
        assert refused.value.reason in ("PARTITIONS_MISSING", "BEING_CREATED")
        if seen.missing_partitions:
            with pytest.raises(FailedPrecondition):
                await made.client.update_queue(queue_id, filter=f"{seen.filter} && true")
            with pytest.raises(FailedPrecondition):
                await made.client.update_queue(queue_id, filter=None)
        with pytest.raises(AlreadyExists):
            await create(made, queue_id)  # as another queue than was begun
        published = await made.publish(queue_id, 20)
        await made.routed()

        calls = -1000
        done = await create(made, queue_id, ordering_header="customer")
        assert (done.quarantine, done.missing_partitions) == (None, ())
        published |= await made.publish(queue_id, 20)
        # All that came since the creation began, each once.
        got = await claimed(made, queue_id, 40)
        assert {one.message_id for one in got} == published
        with pytest.raises(AlreadyExists):
            await create(made, queue_id, ordering_header="customer")


async def test_a_deletion_that_broke_off_is_visible_and_is_finished_by_a_repeat(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slatemq._admin.queue_calls import QueueCalls

    await create(made, "q")
    with monkeypatch.context() as broken:
        broken.setattr(QueueCalls, "_delete_others", None)
        with pytest.raises(TypeError):
            await made.client.delete_queue("q")
    assert (await made.client.get_queue("q")).missing_partitions == (0,)
    for call in (
        made.client.claim("q"),
        anext(made.client.list_entries("q", "available")),
        anext(made.client.list_entries("q", "failed")),
        made.client.pause_queue("q"),
    ):
        with pytest.raises(FailedPrecondition, match="has no partition 0") as refused:
            await call
        assert refused.value.reason == "PARTITIONS_MISSING"
    page = await made.client.entry_page("q", "available")
    (problem,) = page.problems.values()
    assert (page.entries, problem.reason) == ([], "PARTITIONS_MISSING")
    assert not (
        await made.client.entry_page("q", "available", page_token=page.next_page_token)
    ).problems
    with pytest.raises(AlreadyExists):
        await create(made, "q")
    await made.client.delete_queue("q")
    assert (await create(made, "q")).missing_partitions == ()


async def test_a_claim_of_a_queue_whose_deletion_broke_off_waits_for_no_messages(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slatemq._admin.queue_calls import QueueCalls

    streams: set[int] = set()
    all_wait = asyncio.Event()
    read = gathering._Gathering._read

    async def noted(self: Any, index: int, left_s: float) -> None:
        streams.add(index)
        if len(streams) == BROKERS:
            all_wait.set()
        await read(self, index, left_s)

    monkeypatch.setattr(gathering._Gathering, "_read", noted)
    await create(made, "q")
    waiting = asyncio.create_task(made.client.claim("q", wait=60))
    async with asyncio.timeout(60):
        await all_wait.wait()
    monkeypatch.setattr(QueueCalls, "_delete_others", None)
    with pytest.raises(TypeError):
        await made.client.delete_queue("q")

    # One began before, the other begins now: neither waits for its 60 s.
    for claiming in (waiting, made.client.claim("q", wait=60)):
        with pytest.raises(FailedPrecondition, match="has no partition 0") as refused:
            async with asyncio.timeout(50):
                await claiming
        assert refused.value.reason == "PARTITIONS_MISSING"


async def test_more_partitions_than_brokers_are_refused(made: Instance) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await create(made, "q", partitions=BROKERS + 1)
    assert refused.value.field == "partitions"
    with pytest.raises(InvalidArgument):
        await made.client.create_queue("q", ordering_header="customer")
    await create(made, "q", partitions=2)
    with pytest.raises(InvalidArgument, match="2"):
        await made.client.create_queue("beside", with_queue="q")
    beside = await create(made, "beside", partitions=2, with_queue="q")
    queue = await made.client.get_queue("q")
    assert [part.broker_shard for part in beside.partitions.values()] == [
        part.broker_shard for part in queue.partitions.values()
    ]


async def test_a_creation_asks_again_for_a_load_that_comes_late(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, late = placement._load, [DeadlineExceeded("no answer came in time")]

    async def late_once(*asked: Any) -> Any:
        return late.pop() if late else await load(*asked)

    monkeypatch.setattr(placement, "_load", late_once)
    assert len((await create(made, "q")).partitions) == BROKERS
    assert not late


async def test_a_client_that_knew_the_queue_before_it_had_partitions_finds_them(
    made: Instance,
) -> None:
    async with slatemq.connect(made.brokers[1].address) as other:
        for method in (
            "get_queue",
            "list_entries",
            "entry_page",
            "claim",
            "consume",
            "consume_batches",
        ):
            await made.client.create_queue("q")
            await other.get_queue("q")
            await made.client.delete_queue("q")
            await create(made, "q")
            ids = await made.publish("q", 60)
            await made.routed()
            got: set[int] = set()
            if method == "get_queue":
                assert (await other.get_queue("q")).counts.available_count == 60
                got = ids
            elif method == "list_entries":
                got = {entry.message_id async for entry in other.list_entries("q", "available")}
            elif method == "entry_page":
                page = await other.entry_page("q", "available")
                got = {entry.message_id for entry in page.entries}
                while page.next_page_token:
                    token = page.next_page_token
                    page = await other.entry_page("q", "available", page_token=token)
                    got |= {entry.message_id for entry in page.entries}
            elif method == "claim":
                while len(got) < 60 and (some := await other.claim("q", 60, wait=5)):
                    got |= {one.message_id for one in some}
            else:
                consumer: Any = getattr(other, method)("q")
                async with consumer, asyncio.timeout(60):
                    while len(got) < 60:
                        taken = await anext(consumer)
                        some = [taken] if isinstance(taken, slatemq.Received) else list(taken)
                        got |= {one.message_id for one in some}
            assert got == ids
            await made.client.delete_queue("q")


async def test_a_watch_sees_the_delayed_messages_of_all_partitions_and_goes_on_from_its_position(
    made: Instance,
) -> None:
    await create(made, "q", default_delay=600)
    ids = await made.publish("q", 40)
    seen: list[int] = []
    position = ""
    async with asyncio.timeout(60):
        while len(set(seen)) < 40:
            async with made.client.watch_delayed("q", position=position) as watch:
                for _ in range(15):
                    if len(set(seen)) < 40:
                        seen.append((await anext(watch)).message_id)
                position = watch.position
    assert set(seen) == ids
    assert made.client.watch_delayed("q", position=position).position == position
