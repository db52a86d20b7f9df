import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from libs.access.principals import PLACE_RETRY_MS
from libs.serving.peers.channels import open_channel
from libs.serving.telemetry import Telemetry
from services.ingest.config import IngestConfig
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq._rpc.stored_runs import messages_of
from slatemq.errors import InvalidArgument, ResourceExhausted, Unavailable
from slatemq.v1 import ingest_pb2, topology_pb2, topology_pb2_grpc
from slatemq.v1.message_pb2 import Message
from tests.integration.ingest.server import Ingest, Server, message, serving

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "data").as_uri()


async def test_what_is_published_can_be_read_and_stands_in_the_log() -> None:
    async with serving(shard=3) as ingest:
        # When a batch is published
        first, second = await ingest.publish(
            ingest_pb2.PublishRun(
                payloads=[b"one"],
                headers={"type": "order", "ü": ""},
                created_at_ms=5,
                retention_s=60,
            ),
            message(b""),
        )

        # Then its IDs are those of the shard, and the messages come back as they were
        assert first >> 48 == 3
        assert second == first + 1
        answer = await ingest.read(second, first)
        empty, one = answer.messages
        assert (one.message_id, one.payload) == (first, b"one")
        assert dict(one.headers) == {"type": "order", "ü": ""}
        assert (one.created_at_ms, one.retention_s) == (5, 60)
        assert (empty.message_id, empty.payload, dict(empty.headers)) == (second, b"", {})
        assert empty.created_at_ms == empty.received_at_ms == one.received_at_ms > 0
        assert empty.retention_s == 7 * 24 * 3600

        # And the log has one entry for both
        (entry,) = await ingest.tail()
        assert entry.sequence == first
        assert [m.message_id for m in entry.messages] == [first, second]
        assert dict(entry.messages[0].headers) == {"type": "order", "ü": ""}
        assert [m.payload_bytes for m in entry.messages] == [3, 0]
        assert [m.visible_at_ms for m in entry.messages] == [0, 0]
        status = await ingest.status()
        assert (status.shard, status.durable_sequence) == (3, second)


async def test_a_restart_keeps_everything_and_never_gives_an_id_twice(root: str) -> None:
    payloads = [b"%d" % n for n in range(20)] + [os.urandom(100_000)]
    async with serving(root) as ingest:
        ids = await ingest.send(*payloads, type="order")
        before = await ingest.log()

    async with serving(root) as ingest:
        assert await ingest.payloads(*ids) == payloads
        assert await ingest.payloads(ids[7], ids[20], ids[3]) == [payloads[n] for n in (7, 20, 3)]
        assert await ingest.log() == before
        (later,) = await ingest.send(b"later")
        assert later > ids[-1]
        assert await ingest.payloads(ids[0], later) == [b"0", b"later"]


@pytest.mark.parametrize("cache", [0, MIB], ids=["stored", "fresh"])
async def test_the_log_shows_delays_and_visible_times(cache: int) -> None:
    async with serving(log_cache_bytes=cache, max_message_delay_ms=5) as ingest:
        await ingest.publish(
            message(b"plain"),
            ingest_pb2.PublishRun(payloads=[b""], delay_ms=0),
            ingest_pb2.PublishRun(payloads=[b""], delay_ms=5),
            ingest_pb2.PublishRun(payloads=[b""], visible_at_ms=1 << 60),
            ingest_pb2.PublishRun(payloads=[b""], visible_at_ms=0),
        )
        logged = await ingest.log()
        delays = [one.delay_ms for one in logged]
        assert delays == [None, 0, 5, None, None]
        assert [one.visible_at_ms for one in logged] == [0, 0, 0, 1 << 60, 0]
        assert {one.direct_queue_id for one in logged} == {""}
        with pytest.raises(InvalidArgument) as refused:
            await ingest.publish(ingest_pb2.PublishRun(payloads=[b""], delay_ms=6))
        assert refused.value.description == "must be 0..5 (the setting max_message_delay_ms), not 6"


async def test_delays_reach_to_a_hundred_years() -> None:
    century_ms = 3_155_760_000_000
    async with serving(max_message_delay_ms=century_ms) as ingest:
        await ingest.publish(ingest_pb2.PublishRun(payloads=[b""], delay_ms=century_ms))
        assert [one.delay_ms for one in await ingest.log()] == [century_ms]


def run(payloads: list[bytes], **fields: Any) -> ingest_pb2.PublishRun:
    return ingest_pb2.PublishRun(payloads=payloads, **fields)


def one(**fields: Any) -> list[ingest_pb2.PublishRun]:
    """A message with these fields."""
    return [run([b""], **fields)]


def broken(field: str, value: Any) -> Any:
    return pytest.param(field, value, id=field)


BAD_PUBLISHES = [
    broken("runs", ingest_pb2.PublishRequest()),
    broken("runs", [message()] * 10_001),
    broken("runs", [run([b""] * 5001), run([b""] * 5000)]),
    broken("runs", [run([b""] * 10_000, headers={"x": "v" * 450})]),
    broken("runs", [message(), run([b""] * 5_000, headers={"x": "v" * 900})]),
    broken("request_id", {"request_id": "é" * 65}),
    broken("runs[1].payloads", [message(), run([])]),
    # Above the limit of payloads, and above that of records, which is higher here.
    broken("runs[1].payloads[0]", [message(), run([bytes(70_000)])]),
    broken("runs[1].payloads[2]", [message(), run([b"a", b"b", bytes(70_000), b"d"])]),
    broken("runs[0].headers", one(headers={f"k{n}": "" for n in range(256)})),
    broken('runs[0].headers["x"]', [message(x="v" * 70_000)]),
    broken('runs[0].headers["x"]', [message(x="é" * 32_768)]),
    broken('runs[0].headers[""]', one(headers={"": "v"})),
    broken(f'runs[0].headers["{"k" * 64}…"]', one(headers={"k" * 65_536: ""})),
    broken("runs[0].created_at_ms", one(created_at_ms=-1)),
    broken("runs[1].retention_s", [message(), *one(retention_s=-1)]),
    broken("runs[0].retention_s", one(retention_s=1 << 32)),
    broken("runs[0].delay_ms", one(delay_ms=-1)),
    broken("runs[1].delay_ms", [message(), *one(delay_ms=900_001)]),
    broken("runs[0].delay_ms", one(delay_ms=0, visible_at_ms=0)),
    broken("runs[0].delay_ms", one(delay_ms=5, visible_at_ms=9)),
    broken("runs[0].visible_at_ms", one(visible_at_ms=-1)),
    broken("runs[0].dedupe_keys[0]", one(dedupe_keys=["é" * 128])),
    broken("runs[1].dedupe_keys[1]", [message(), run([b"", b""], dedupe_keys=["", "é" * 128])]),
    broken("runs[0].dedupe_keys", [run([b"a", b"b"], dedupe_keys=["k"])]),
    broken("runs[0].dedupe_keys", one(dedupe_keys=["k", "l"])),
]
"""Fields at fault, with requests or parts of them."""


def bad_publish(request_: Any) -> ingest_pb2.PublishRequest:
    if isinstance(request_, list):
        request_ = ingest_pb2.PublishRequest(runs=request_)
    elif isinstance(request_, dict):
        request_ = ingest_pb2.PublishRequest(runs=[message()], **request_)
    made: ingest_pb2.PublishRequest = request_
    return made


@pytest.mark.parametrize(("field", "request_"), BAD_PUBLISHES)
async def test_a_bad_publish_names_its_field_and_changes_nothing(field: str, request_: Any) -> None:
    async with serving(payload_bytes_max=1000) as ingest:
        with pytest.raises(InvalidArgument) as refused, raising_slatemq_errors():
            await ingest.stub.Publish(bad_publish(request_))

        assert refused.value.field == field
        assert (await ingest.status()).durable_sequence == 0
        assert len(await ingest.send(b"fine")) == 1


async def test_the_largest_headers_are_accepted() -> None:
    headers = {f"k{n}": "" for n in range(254)} | {"k" * 65_535: "v" * 65_535}
    async with serving() as ingest:
        (message_id,) = await ingest.publish(ingest_pb2.PublishRun(payloads=[b""], headers=headers))
        assert dict((await ingest.read(message_id)).messages[0].headers) == headers
        (entry,) = await ingest.tail()
        assert dict(entry.messages[0].headers) == headers


async def test_the_largest_payload_is_accepted_and_one_byte_more_is_not(root: str) -> None:
    largest = os.urandom(MIB) * 64
    async with serving(root) as ingest:
        (message_id,) = await ingest.send(largest)
        with pytest.raises(InvalidArgument) as refused:
            await ingest.send(largest + b"x")
        assert refused.value.field == "runs[0].payloads[0]"
        assert await ingest.payloads(message_id) == [largest]
    async with serving(root) as ingest:
        assert await ingest.payloads(message_id) == [largest]


@pytest.mark.parametrize("cache", [0, MIB], ids=["stored", "fresh"])
@pytest.mark.parametrize("size", [65_535, 65_536])
async def test_payloads_around_the_limit_of_a_record_come_back_whole(cache: int, size: int) -> None:
    payload = os.urandom(size)
    async with serving(payload_cache_bytes=cache, log_cache_bytes=cache) as ingest:
        ids = await ingest.send(b"a", payload, b"b")
        assert await ingest.payloads(*ids) == [b"a", payload, b"b"]


@pytest.mark.parametrize("cache", [0, MIB], ids=["stored", "fresh"])
async def test_ids_that_were_never_given_out_are_missing(tmp_path: Path, cache: int) -> None:
    root = (tmp_path / "data").as_uri()
    settings: dict[str, Any] = {"payload_cache_bytes": cache, "log_cache_bytes": cache}
    async with serving(root, **settings) as ingest:
        (first, second) = await ingest.send(b"x", b"y")
    async with serving(root, **settings) as ingest:
        # IDs go on in a new block
        (third,) = await ingest.send(b"z")
        answer = await ingest.read(second + 1, second, first, third - 1, third)
        assert [m.message_id for m in answer.messages] == [second, first, third]
        assert list(answer.missing_ids) == [second + 1, third - 1]


@pytest.mark.parametrize("cache", [0, MIB], ids=["stored", "fresh"])
async def test_an_id_behind_the_end_of_the_log_is_not_here_yet_and_never_missing(
    cache: int,
) -> None:
    async with serving(payload_cache_bytes=cache, log_cache_bytes=cache) as ingest:
        (first, second) = await ingest.send(b"x", b"y")
        for beyond in (second + 1, second + 5000):
            with pytest.raises(Unavailable) as refused:
                await ingest.read(first, beyond)
            assert refused.value.reason == "NOT_YET_STORED"
        with pytest.raises(Unavailable), raising_slatemq_errors():
            await ingest.stub.ReplaceMessage(
                ingest_pb2.ReplaceMessageRequest(message_id=second + 1, keep_headers=True)
            )


async def test_reading_stops_at_max_bytes_but_gives_one_message_at_least() -> None:
    async with serving() as ingest:
        ids = await ingest.send(b"x" * 100, b"y" * 100, b"z" * 100)
        assert [m.message_id for m in (await ingest.read(*ids, max_bytes=1)).messages] == ids[:1]
        assert [m.message_id for m in (await ingest.read(*ids, max_bytes=200)).messages] == ids[:2]
        assert [m.message_id for m in (await ingest.read(*ids, max_bytes=299)).messages] == ids[:2]
        assert not (await ingest.read(*ids, max_bytes=1)).missing_ids


async def test_many_scattered_messages_are_read_from_the_database(root: str) -> None:
    async with serving(root) as ingest:
        ids: list[int] = []
        for n in range(40):
            ids += await ingest.send(*(b"%d-%d" % (n, m) for m in range(n % 7 + 1)))
        expected = dict(zip(ids, await ingest.payloads(*ids), strict=True))
    async with serving(root) as ingest:
        for some in (ids[::-1], ids[::3], ids[::17], ids[5:9], [ids[4], ids[4]]):
            assert await ingest.payloads(*some) == [expected[i] for i in some]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("message_ids", ingest_pb2.BatchGetMessagesRequest()),
        ("message_ids", ingest_pb2.BatchGetMessagesRequest(message_ids=[1] * 10_001)),
        ("message_ids[1]", ingest_pb2.BatchGetMessagesRequest(message_ids=[1, (1 << 48) + 1])),
        ("message_ids[0]", ingest_pb2.BatchGetMessagesRequest(message_ids=[0])),
        ("message_ids[0]", ingest_pb2.BatchGetMessagesRequest(message_ids=[-5])),
        ("max_bytes", ingest_pb2.BatchGetMessagesRequest(message_ids=[1], max_bytes=-1)),
    ],
)
async def test_a_bad_read_names_its_field(
    field: str, request_: ingest_pb2.BatchGetMessagesRequest
) -> None:
    async with serving() as ingest:
        with pytest.raises(InvalidArgument) as refused, raising_slatemq_errors():
            await ingest.stub.BatchGetMessages(request_)
        assert refused.value.field == field


@pytest.mark.parametrize("after", [-1, 1 << 40])
async def test_a_tail_from_nowhere_is_refused(after: int) -> None:
    async with serving() as ingest:
        await ingest.send(b"x")
        with pytest.raises(InvalidArgument) as refused:
            await ingest.tail(after)
        assert refused.value.field == "after_sequence"


async def test_a_tailer_hears_at_once_and_then_by_heartbeats_where_the_log_ends() -> None:
    async with serving(heartbeat_ms=1) as ingest:
        (message_id,) = await ingest.send(b"x")
        call = ingest.stub.TailLog(ingest_pb2.TailLogRequest(after_sequence=message_id))
        for _ in range(3):
            update = await call.read()
            assert isinstance(update, ingest_pb2.TailLogResponse)
            assert (list(update.entries), update.durable_sequence) == ([], message_id)
        call.cancel()


def fresh_of(update: object) -> list[Message]:
    """The messages that came with log entries."""
    assert isinstance(update, ingest_pb2.TailLogResponse)
    return messages_of(update.messages)


async def test_the_last_messages_come_with_their_entries_as_far_as_they_are_few_and_small() -> None:
    async with serving() as ingest:
        # Given two publishes, of which the first alone is few and small
        few = await ingest.send(b"one", b"two", region="eu")
        call = ingest.stub.TailLog(ingest_pb2.TailLogRequest())
        first = await call.read()
        many = await ingest.publish(ingest_pb2.PublishRun(payloads=[b"x"] * 1000))
        second = await call.read()
        large = await ingest.send(b"y" * 65_000, b"z" * 1000)
        third = await call.read()
        call.cancel()

        # Then its messages come along, as they are read; of the others those at the front that fit
        assert fresh_of(first) == (await ingest.read(*few)).messages
        assert [one.message_id for one in fresh_of(first)] == few
        assert (len(many), fresh_of(second)) == (1000, [])
        assert [one.message_id for one in fresh_of(third)] == large[:1]

        # And none to a stream that begins far behind
        call = ingest.stub.TailLog(ingest_pb2.TailLogRequest())
        assert fresh_of(await call.read()) == []
        call.cancel()


async def test_a_message_that_was_edited_comes_along_as_it_is_now_or_not_at_all() -> None:
    async with serving() as ingest:
        (message_id,) = await ingest.send(b"old")
        (etag,) = (await ingest.read(message_id, with_etags=True)).etags
        await ingest.stub.ReplaceMessage(
            ingest_pb2.ReplaceMessageRequest(
                message_id=message_id, etag=etag, payload=b"new", keep_headers=True
            )
        )

        call = ingest.stub.TailLog(ingest_pb2.TailLogRequest())
        update = await call.read()
        call.cancel()

        assert b"old" not in [one.payload for one in fresh_of(update)]


async def test_streams_over_the_bound_are_refused_until_one_ends() -> None:
    async with serving(tail_streams_max=1) as ingest:
        first = ingest.stub.TailLog(ingest_pb2.TailLogRequest())
        await first.read()
        with pytest.raises(ResourceExhausted) as refused:
            await ingest.tail()
        assert refused.value.reason == "TOO_MANY_STREAMS"
        assert refused.value.retry_after_ms == PLACE_RETRY_MS
        first.cancel()
        await ingest.send(b"x")
        async with asyncio.timeout(60):
            while True:
                try:
                    assert len(await ingest.tail()) == 1
                    return
                except ResourceExhausted:
                    await asyncio.sleep(0)


async def test_a_publish_that_does_not_fit_beside_another_must_wait() -> None:
    async with serving(uncommitted_bytes_max=1) as ingest:
        # One larger than the bound goes when nothing else does; of many at once some must wait.
        results = await asyncio.gather(
            *(ingest.send(b"x" * 1000) for _ in range(20)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, ResourceExhausted)]
        stored = [result for result in results if isinstance(result, list)]
        assert len(refused) + len(stored) == 20
        assert stored
        assert refused
        assert {error.reason for error in refused} == {"UNCOMMITTED_BYTES"}
        assert all((error.retry_after_ms or 0) > 0 for error in refused)
        assert len(await ingest.log()) == len(stored)


async def test_draining_ends_streams_and_answers_publishes_in_flight(root: str) -> None:
    server = Server(IngestConfig(root=root), Telemetry())
    await server.start()
    async with open_channel(server.address) as channel:
        ingest = Ingest(channel)
        await ingest.send(b"before")
        stream = asyncio.create_task(ingest.tail(0, count=1000))
        publishes = [asyncio.create_task(ingest.send(b"%d" % n)) for n in range(50)]
        while not any(task.done() for task in publishes):
            await asyncio.sleep(0)
        await server.stop()
        with pytest.raises(Unavailable):
            await stream
        results = await asyncio.gather(*publishes, return_exceptions=True)
    answered = [result for result in results if isinstance(result, list)]
    assert all(isinstance(result, list | Unavailable) for result in results)

    async with serving(root) as after:
        in_log = {m.message_id for m in await after.log()}
        assert {ids[0] for ids in answered} <= in_log


async def test_every_ingest_shows_the_topology(root: str) -> None:
    async with serving(root, shard=1) as one, serving(root, shard=0):
        topology: Any = topology_pb2_grpc.TopologyServiceStub(one.channel)
        answer = await topology.GetTopology(topology_pb2.GetTopologyRequest())
        assert [endpoint.shard for endpoint in answer.ingests] == [0, 1]
        assert all(endpoint.address.startswith("127.0.0.1:") for endpoint in answer.ingests)
