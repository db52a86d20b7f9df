"""Publishing to peers that misbehave: nothing is lost, nothing is doubled, no one hangs."""

import asyncio
from collections import Counter

import grpc.aio
import pytest

import slatemq
from slatemq import BatchSettings, OutgoingMessage
from slatemq._publish.gathering import Gatherer
from slatemq._publish.shards import IngestShards
from slatemq._rpc import peers
from slatemq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import topology_pb2_grpc
from tests.integration.client.peers import Ingest, Instance
from tests.ports import free_ports

DOWN = Unavailable("the connection broke", retry_after_ms=1)


async def test_answers_lost_after_storing_double_nothing(instance: Instance) -> None:
    # Given an ingest that stores, and whose first answers get lost
    ingest = instance.ingest
    ingest.after.extend([DOWN, DOWN, DOWN])

    async with slatemq.connect(instance.endpoint, batches=BatchSettings(messages_max=10)) as client:
        # When messages are published one by one, all at once
        ids = await asyncio.gather(*(client.publish(b"%d" % n) for n in range(100)))

    # Then each is stored once, and everybody has the ID of his own
    assert sorted(ingest.stored) == sorted(b"%d" % n for n in range(100))
    assert [ingest.stored[message_id - 1] for message_id in ids] == [b"%d" % n for n in range(100)]
    assert max(Counter(request_id for _, request_id, _ in ingest.calls).values()) > 1


async def test_a_repeat_stays_on_its_shard(instance: Instance) -> None:
    # Given two shards, both of which lose answers
    other = Ingest(shard=1)
    await instance.serve(ingest=other)
    for ingest in (instance.ingest, other):
        ingest.after.extend([DOWN] * 3)

    async with slatemq.connect(instance.endpoint) as client:
        for n in range(10):
            await client.publish_batch([OutgoingMessage(b"%d" % n)])

    shards = [{call[1] for call in ingest.calls} for ingest in (instance.ingest, other)]
    assert not shards[0] & shards[1]
    assert sorted(instance.ingest.stored + other.stored) == [b"%d" % n for n in range(10)]


@pytest.mark.parametrize("reason", ["STARTING", "STANDBY", "NOT_SERVING"])
async def test_what_an_ingest_lets_in_no_more_is_stored_by_another_at_once(
    instance: Instance, reason: str
) -> None:
    # Given two shards, one of which has closed its gate
    other = Ingest(shard=1)
    await instance.serve(ingest=other)
    instance.ingest.before.extend([Unavailable("its gate is closed", reason=reason)] * 100)

    async with slatemq.connect(instance.endpoint) as client:
        for n in range(4):
            await client.publish_batch([OutgoingMessage(b"%d" % n)])
            await client.publish(b"%d" % n)

    # Then what it refused is not sent there again
    assert instance.ingest.stored == []
    assert sorted(other.stored) == sorted([b"0", b"1", b"2", b"3"] * 2)
    refused = [call[1] for call in instance.ingest.calls]
    assert len(refused) == len({*refused}) >= 1


async def test_an_ingest_that_moves_is_found(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"before")
        # Given a publish that was stored, and whose answer is held up
        instance.ingest.gate.clear()
        instance.ingest.asked.clear()
        waiting = asyncio.create_task(client.publish(b"meanwhile"))
        await instance.ingest.asked.wait()

        # When ingest stops there, and comes back on another port
        await instance.servers[1].stop(None)
        instance.ingest.gate.set()
        await instance.serve(ingest=instance.ingest)

        # Then the publish ends well, and so do later ones
        await waiting
        await client.publish(b"after")
    assert instance.ingest.stored == [b"before", b"meanwhile", b"after"]


async def test_the_time_to_wait_is_respected(instance: Instance) -> None:
    instance.ingest.before.append(ResourceExhausted("too much waits", retry_after_ms=300))
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"x")
    first, second = (call[0] for call in instance.ingest.calls)
    assert second - first >= 0.3


async def test_a_full_shard_sends_to_another(instance: Instance) -> None:
    other = Ingest(shard=1)
    await instance.serve(ingest=other)
    for ingest in (instance.ingest, other):
        full = ResourceExhausted("no IDs are left", reason="SHARD_FULL", retry_after_ms=None)
        ingest.before.append(full)
    other.before.clear()
    async with slatemq.connect(instance.endpoint) as client:
        for n in range(4):
            await client.publish_batch([OutgoingMessage(b"%d" % n)])
    assert sorted(instance.ingest.stored + other.stored) == [b"%d" % n for n in range(4)]


async def test_one_bad_message_takes_no_others_along(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        published = await asyncio.gather(
            *(client.publish(b"bad" if n in (3, 7) else b"%d" % n) for n in range(10)),
            return_exceptions=True,
        )
    refused = [result for result in published if isinstance(result, InvalidArgument)]
    assert [error.field for error in refused] == ["message.payload"] * 2
    assert isinstance(published[3], InvalidArgument)
    assert isinstance(published[7], InvalidArgument)
    assert instance.ingest.stored == [b"%d" % n for n in range(10) if n not in (3, 7)]


async def test_values_without_a_wire_form_are_refused_alone(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        wrong: list[object] = [{"key": 5}, {"key": "\ud800"}, {7: "seven"}, "text"]
        published = await asyncio.gather(
            client.publish(b"good"),
            *(client.publish(b"x", headers) for headers in wrong[:3]),  # type: ignore[arg-type]
            client.publish(5),  # type: ignore[arg-type]
            client.publish(b"also good"),
            return_exceptions=True,
        )
    assert all(isinstance(result, InvalidArgument) for result in published[1:5])
    assert instance.ingest.stored == [b"good", b"also good"]


async def test_a_refused_message_of_many_is_named_by_its_place_among_all(
    instance: Instance,
) -> None:
    settings = BatchSettings(messages_max=4)
    async with slatemq.connect(instance.endpoint, batches=settings) as client:
        payloads = [b"%d" % n for n in range(20)]
        payloads[13] = b"bad"
        with pytest.raises(InvalidArgument) as refused:
            await client.publish_many(payloads)
    assert refused.value.field == "messages[13].payload"
    assert refused.value.metadata["published_count"] == "12"
    assert instance.ingest.stored == payloads[:12]


async def test_many_come_with_several_requests_under_way(instance: Instance) -> None:
    instance.ingest.after.extend([DOWN] * 5)
    settings = BatchSettings(messages_max=10)
    async with slatemq.connect(instance.endpoint, batches=settings) as client:
        payloads = [b"%d" % n for n in range(1000)]
        ids = await client.publish_many(payloads, in_flight=4)
    assert [instance.ingest.stored[message_id - 1] for message_id in ids] == payloads
    assert len(instance.ingest.stored) == 1000


async def test_headers_count_for_the_size_of_a_request(instance: Instance) -> None:
    # Given headers that are larger than the payload, and requests of 100 kB
    settings = BatchSettings(payload_bytes_max=100_000)
    message = OutgoingMessage(b"", {"h": "v" * 30_000})
    async with slatemq.connect(instance.endpoint, batches=settings) as client:
        await client.publish_many([message] * 10)
    assert {count for _, _, count in instance.ingest.calls} <= {1, 2, 3}


async def test_a_request_that_is_too_large_is_reported_at_once(instance: Instance) -> None:
    await instance.serve(
        ingest=instance.ingest, options=[("grpc.max_receive_message_length", 10_000)]
    )
    async with slatemq.connect(instance.endpoint) as client:
        with pytest.raises(ResourceExhausted) as refused:
            await client.publish_batch([OutgoingMessage(b"x" * 1000)] * 20)
        assert refused.value.reason == "MESSAGE_TOO_LARGE"
        assert await client.publish(b"small") == 1


async def test_a_small_room_lets_everybody_through(instance: Instance) -> None:
    # Given room for about two messages, and some that are larger than all of it
    settings = BatchSettings(outstanding_bytes_max=1000, payload_bytes_max=600)
    async with slatemq.connect(instance.endpoint, batches=settings) as client:
        payloads = [b"%d" % n * (400 if n % 7 else 900) for n in range(60)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(client.publish(payload) for payload in payloads))
    assert sorted(instance.ingest.stored) == sorted(payloads)


async def test_who_gives_up_keeps_no_room_and_takes_no_others_along(instance: Instance) -> None:
    settings = BatchSettings(outstanding_bytes_max=2000)
    instance.ingest.gate.clear()
    async with slatemq.connect(instance.endpoint, batches=settings) as client:
        # Given publishes under way and publishes that wait for room
        tasks = [asyncio.create_task(client.publish(b"%d" % n * 300)) for n in range(20)]
        await instance.ingest.asked.wait()

        # When every other caller gives up
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks[::2])
        instance.ingest.gate.set()

        # Then the others come through, and so does whoever comes later
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks[1::2])
            await client.publish(b"later" * 300)
    assert {b"%d" % n * 300 for n in range(1, 20, 2)} <= set(instance.ingest.stored)
    assert len(set(instance.ingest.stored)) == len(instance.ingest.stored)


async def test_closing_sends_what_is_gathered_and_what_waits_for_room(instance: Instance) -> None:
    settings = BatchSettings(outstanding_bytes_max=500, linger_s=60)
    client = slatemq.connect(instance.endpoint, batches=settings)
    await client.__aenter__()
    tasks = [asyncio.create_task(client.publish(b"%03d" % n)) for n in range(100)]
    await asyncio.sleep(0)  # They have begun.

    await client.close()

    assert sorted(task.result() for task in tasks) == list(range(1, 101))
    assert len(instance.ingest.stored) == 100
    with pytest.raises(Unavailable) as refused:
        await client.publish(b"late")
    assert refused.value.reason == "CLIENT_CLOSED"


async def test_closing_sleeps_while_a_publish_looks_for_its_shard(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    asked, known = asyncio.Event(), asyncio.Event()
    of_key, has_work = IngestShards.of_key, Gatherer._has_work

    async def of_key_once_known(shards: IngestShards, dedupe_key: str | None) -> int | None:
        asked.set()
        await known.wait()
        return await of_key(shards, dedupe_key)

    def noted_has_work(gatherer: Gatherer) -> bool:
        nonlocal looks
        looks += 1
        return has_work(gatherer)

    monkeypatch.setattr(IngestShards, "of_key", of_key_once_known)
    monkeypatch.setattr(Gatherer, "_has_work", noted_has_work)
    client = slatemq.connect(instance.endpoint, batches=BatchSettings(linger_s=60))
    await client.__aenter__()
    publishing = asyncio.create_task(client.publish(b"x", dedupe_key="k"))
    await asked.wait()

    # When the client is closed while a publish does not know its shard
    closing = asyncio.create_task(client.close())
    for _ in range(100):
        await asyncio.sleep(0)

    # Then it does not look at every turn of the loop, and sends the message once that is known
    assert 1 <= looks <= 3
    known.set()
    async with asyncio.timeout(60):
        await closing
        await publishing
    assert instance.ingest.stored == [b"x"]


async def test_closing_does_not_wait_for_ever(instance: Instance) -> None:
    # Given an ingest that never answers
    instance.ingest.gate.clear()
    client = slatemq.connect(instance.endpoint, call_timeout=0.2)
    await client.__aenter__()
    task = asyncio.create_task(client.publish(b"x"))
    await instance.ingest.asked.wait()

    async with asyncio.timeout(60):
        await client.close()

    assert isinstance(task.exception(), Unavailable | DeadlineExceeded)
    instance.ingest.gate.set()


async def test_calls_under_way_end_when_the_client_is_closed(instance: Instance) -> None:
    client = slatemq.connect(instance.endpoint)
    await client.__aenter__()
    waiting = asyncio.create_task(client.claim("q", wait=30))
    await instance.broker.report()
    await asyncio.sleep(0.05)

    await client.close()

    await asyncio.wait([waiting])
    error = waiting.exception()
    assert isinstance(error, Unavailable)
    assert error.reason == "CLIENT_CLOSED"


async def test_nothing_is_left_running(instance: Instance) -> None:
    before = asyncio.all_tasks()
    async with slatemq.connect(instance.endpoint) as client:
        await asyncio.gather(*(client.publish(b"x") for _ in range(100)))
        async with client.consume("q") as messages:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(messages), 0.05)
    mine = {t for t in asyncio.all_tasks() - before if "slatemq/" in str(t.get_coro())}
    assert not mine


async def test_a_client_of_another_loop_says_so(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client:

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(client.publish(b"x"))

        await asyncio.to_thread(elsewhere)


async def test_no_server_at_the_address_is_an_error_that_names_it() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 is not reachable"):
        async with slatemq.connect("127.0.0.1:1"):
            pass


@pytest.mark.parametrize(
    "settings",
    [
        BatchSettings(messages_max=0),
        BatchSettings(messages_max=10_001),
        BatchSettings(requests_max=0),
        BatchSettings(linger_s=-1),
    ],
)
def test_settings_that_could_not_work_are_refused(settings: BatchSettings) -> None:
    with pytest.raises(SlateMQError):
        slatemq.connect("127.0.0.1:1", batches=settings)


async def test_connecting_outlasts_a_restart_of_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "REACH_S", 60.0)
    # Given an endpoint where no one listens any more
    address = f"127.0.0.1:{free_ports(1)[0]}"

    # When someone connects, and it is back after the first tries
    async with Instance() as instance:
        connecting = asyncio.create_task(connect_once(address))
        await asyncio.sleep(0.5)
        assert not connecting.done()
        server = grpc.aio.server()
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(instance.directory, server)
        server.add_insecure_port(address)
        await server.start()

        # Then they are connected
        assert (await connecting).brokers
        await server.stop(None)


async def connect_once(address: str) -> slatemq.Topology:
    async with slatemq.connect(address) as client:
        return await client.topology()


async def test_a_batch_that_is_refused_names_the_message(instance: Instance) -> None:
    alike = [OutgoingMessage(b"x", {"a": "b"})] * 3
    async with slatemq.connect(instance.endpoint) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.publish_batch([*alike, OutgoingMessage(b"x"), OutgoingMessage(b"bad")])
        assert refused.value.field == "messages[4].payload"
        with pytest.raises(InvalidArgument) as empty:
            await client.publish_batch([])
    assert empty.value.field == "messages"
    assert instance.ingest.stored == []
    assert len(instance.ingest.calls) == 2


async def test_headers_without_a_value_and_those_that_are_none_are_alike(
    instance: Instance,
) -> None:
    without: list[OutgoingMessage] = [
        OutgoingMessage(b"a", None),  # type: ignore[arg-type]
        OutgoingMessage(b"b", {}),
        OutgoingMessage(b"c"),
    ]
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish_batch(without)
        await client.publish_many(without)
    assert instance.ingest.stored == [b"a", b"b", b"c"] * 2


async def test_no_request_is_larger_than_asked_for(instance: Instance) -> None:
    settings = BatchSettings(payload_bytes_max=100_000)
    large = OutgoingMessage(b"x" * 10, {"h": "ü" * 30_000})
    small = [OutgoingMessage(b"y" * 4_000)] * 20
    async with slatemq.connect(instance.endpoint, batches=settings) as client:
        publish_many = await client.publish_many([*small, large, *small, large, large])
    # Beside one of 60,000 bytes there is room for nine of 4,000.
    assert [count for _, _, count in instance.ingest.calls] == [20, 10, 11, 1, 1]
    assert len(publish_many) == 43
