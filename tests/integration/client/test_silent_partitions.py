"""One queue over several brokers, of which some are down, through the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

import slatemq
from libs.storage.layout.partitions import partition_of_value
from slatemq import codecs
from slatemq._consume import gathering
from slatemq._rpc import queue_locations
from slatemq.errors import DeadlineExceeded, NotFound, Unavailable
from tests.integration.client.test_partitions import BROKERS, claimed, create, keyed
from tests.integration.janitor.instances import Instance, instance
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.stack

T = TypeVar("T")


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Instance]:
    async with instance(tmp_path, BROKERS, ()) as running:
        yield running


async def listed_without(down: int, listing: AsyncIterator[T]) -> list[T]:
    """What a listing has, at whose end this broker is named as missing."""
    found: list[T] = []

    async def read() -> None:
        async for one in listing:
            found.append(one)  # noqa: PERF401 - what came before an error counts

    with pytest.raises(Unavailable) as refused:
        await read()
    assert refused.value.reason == "INCOMPLETE"
    assert refused.value.metadata == {"broker_shards": str(down)}
    return found


async def test_a_partition_whose_broker_is_down_holds_up_no_other_and_is_named(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = made.client
    queue = await create(made, "q")
    await made.publish("q", 300)
    await made.routed()
    down = queue.partitions[1].broker_shard
    there = 300 - (await client.get_queue("q")).partitions[1].counts.available_count
    await client.wait_redrive(await client.start_redrive("q"), every=0.1)
    await made.brokers[down].kill()

    seen = await client.get_queue("q")
    assert seen.missing_partitions == (1,)
    assert seen.counts.available_count == there
    with pytest.raises(Unavailable) as refused:
        [one async for one in client.list_queues()]
    assert refused.value.reason == "INCOMPLETE"
    assert len(await listed_without(down, client.list_entries("q", "available"))) == there
    assert len(await listed_without(down, client.list_redrives("q"))) == 1
    for etag in (queue.etag, seen.etag):
        with pytest.raises(Unavailable, match=r"misses partitions \(1\)") as refused:
            await client.update_queue("q", max_attempts=7, etag=etag)
        assert refused.value.reason == "INCOMPLETE"
        with pytest.raises(Unavailable, match=r"misses partitions \(1\)"):
            await client.delete_queue("q", etag=etag)
    with monkeypatch.context() as patient:
        patient.setattr(gathering, "REFUSED_S", 5.0)
        got = await claimed(made, "q", there)
    await client.ack([one.lease_token for one in got])
    done = await listed_without(down, client.list_entries("q", "done"))
    assert sorted(one.message_id for one in done) == sorted(one.message_id for one in got)
    async with slatemq.connect(made.ingest.address, call_timeout=10) as hasty:
        with pytest.raises(Unavailable) as refused:
            await hasty.claim("q", 10)
    assert refused.value.metadata["broker_shards"] == str(down)
    with pytest.raises((Unavailable, DeadlineExceeded)):
        await client.queue_view("q", codecs.BYTES, timeout=0.2).try_next()

    # What the others do not have comes once it is back.
    async with client.consume("q") as messages, asyncio.timeout(120):
        task = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.2)
        await made.brokers[down].start()
        left = [await task]
        while len(left) < 300 - there:
            left.append(await anext(messages))
    assert not {one.message_id for one in left} & {one.message_id for one in got}


@pytest.mark.parametrize("wait", [None, 0, 0.1])
async def test_reads_and_claims_go_on_until_the_brokers_of_a_queue_have_started_again(
    made: Instance, monkeypatch: pytest.MonkeyPatch, wait: float | None
) -> None:
    # Given little patience with a broker where others answer
    monkeypatch.setattr(gathering, "REFUSED_S", 0.01)
    monkeypatch.setattr(queue_locations, "REFUSED_S", 0.01)
    monkeypatch.setattr(queue_locations, "ANSWER_S", 0.01)
    await create(made, "q")
    ids = await made.publish("q", 1)
    await made.routed()
    async with slatemq.connect(made.ingest.address, call_timeout=WAIT_SECONDS) as client:
        await client.get_queue("q")

        async def call() -> Any:
            return await (client.get_queue("q") if wait is None else client.claim("q", wait=wait))

        # When it is asked for while none answers
        await asyncio.gather(*(broker.kill() for broker in made.brokers))
        calling = asyncio.create_task(call())
        await asyncio.gather(*(broker.start() for broker in made.brokers))

        # Then the call waits for them
        answer = await calling
    if wait is None:
        assert answer.queue_id == "q"
    else:
        assert {one.message_id for one in answer} == ids


async def test_a_claim_waits_for_one_broker_and_takes_what_others_get_meanwhile(
    made: Instance,
) -> None:
    queue = await create(made, "q", ordering_header="customer")
    down = made.brokers[queue.partitions[1].broker_shard]
    values = {partition_of_value(f"{n}", BROKERS): f"{n}" for n in range(100)}
    async with slatemq.connect(made.ingest.address, call_timeout=WAIT_SECONDS) as client:
        # Given a claim that finds nothing while a broker is down
        await down.kill()
        claiming = asyncio.create_task(client.claim("q"))
        await asyncio.wait([claiming], timeout=3)
        assert not claiming.done()

        # When another partition gets a message, then it is claimed
        await client.publish(b"there", {"queue": "q", "customer": values[0]})
        (message,) = await claiming
        assert message.payload == b"there"
        await message.ack()

        # When the broker is back, then there is nothing
        claiming = asyncio.create_task(client.claim("q"))
        await down.start()
        assert await claiming == []


async def test_a_change_that_misses_a_partition_says_so_and_is_finished_by_a_repeat(
    made: Instance,
) -> None:
    client = made.client
    queue = await create(made, "paused")
    for beside in ("purged", "updated", "redriven", "deleted"):
        await create(made, beside, with_queue="paused")
    await made.publish("purged", 300)
    await made.routed()
    removed = 300 - (await client.get_queue("purged")).partitions[1].counts.available_count
    down = queue.partitions[1].broker_shard

    def changes(client: slatemq.Client) -> Sequence[Awaitable[Any]]:
        return (
            client.pause_queue("paused"),
            client.purge_queue("purged"),
            client.update_queue("updated", max_attempts=7),
            client.start_redrive("redriven", request_id="once"),
            client.delete_queue("deleted"),
        )

    # Given a broker that is down
    await made.brokers[down].kill()

    # When whole queues are changed
    async with slatemq.connect(made.ingest.address, call_timeout=15) as hasty:
        errors = await asyncio.gather(*changes(hasty), return_exceptions=True)

    # Then each change is made in the other partitions, and its error says so
    for error in errors:
        assert isinstance(error, Unavailable)
        assert error.reason == "INCOMPLETE"
        assert error.metadata["broker_shards"] == str(down)
        assert error.metadata["partitions"] == "1"
        assert f"(1 on broker shard {down})" in error.message
    async with slatemq.connect(made.ingest.address, call_timeout=1) as hasty:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await hasty.get_queue("deleted")
    _, purge, _, start, _ = errors
    assert isinstance(purge, Unavailable)
    assert purge.metadata["purged_count"] == str(removed)
    assert isinstance(start, Unavailable)
    begun = await client.wait_redrive(start.metadata["redrive_id"], every=0.1)
    assert begun.state == "done"

    # And a repeat makes them in all
    await made.brokers[down].start()
    paused, purged, updated, redrive, _ = await asyncio.gather(*changes(client))
    assert (paused.paused, paused.settings_differ) == (True, ())
    assert purged == 300 - removed
    assert (updated.max_attempts, updated.settings_differ) == (7, ())
    assert set(begun.redrive_id.split("+")) < set(redrive.redrive_id.split("+"))
    with pytest.raises(NotFound):
        await client.get_queue("deleted")


async def test_a_redrive_is_not_called_done_while_the_broker_of_a_part_that_runs_is_down(
    made: Instance,
) -> None:
    client = made.client
    queue = await create(made, "q", ordering_header="customer", max_attempts=1)
    down = queue.partitions[1].broker_shard
    # Given a redrive that runs in one partition, and is done in the others
    key = next(f"{n}" for n in count() if partition_of_value(f"{n}", BROKERS) == 1)
    await keyed(made, "q", [key] * 300)
    tokens = [one.lease_token for one in await claimed(made, "q", 300)]
    assert await client.nack(tokens) == [None] * 300
    redrive = await client.start_redrive("q", rate=1)
    for part in redrive.redrive_id.split("+"):
        if not part.startswith(f"{down}-"):
            assert (await client.wait_redrive(part, every=0.1)).state == "done"

    # When it is cancelled while the broker of that partition is down
    await made.brokers[down].kill()
    async with slatemq.connect(made.ingest.address, call_timeout=10) as hasty:
        with pytest.raises(Unavailable) as refused:
            await hasty.cancel_redrive(redrive)

    # Then the error names that broker, and it is cancelled later
    assert refused.value.reason == "INCOMPLETE"
    assert refused.value.metadata == {"broker_shards": str(down)}
    await made.brokers[down].start()
    assert (await client.cancel_redrive(redrive)).state == "cancelled"


async def test_a_search_ends_with_the_partition_whose_broker_is_down(made: Instance) -> None:
    await create(made, "q")
    await made.publish("q", 30)
    await made.routed()
    queue = await made.client.get_queue("q")
    ids = [entry.message_id async for entry in made.client.list_entries("q", "available")]
    there, missing = ids[0], ids[queue.partitions[0].counts.available_count]
    await made.brokers[queue.partitions[1].broker_shard].kill()
    address = made.brokers[queue.partitions[0].broker_shard].address

    async def search(message_id: int) -> list[int]:
        """The messages that are found, until a broker does not answer."""
        found: list[int] = []
        async with slatemq.connect(address, call_timeout=3) as client:

            async def read() -> None:
                async for one in client.find_message(message_id, ["q"]):
                    found.append(one.message_id)  # noqa: PERF401 - what came before the error

            with pytest.raises(Unavailable):
                await read()
        return found

    assert await search(there) == [there]
    assert await search(missing) == []
