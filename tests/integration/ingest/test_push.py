"""Push: rows of an outbox are stored once, whoever sends them how often, and whoever is killed."""

import asyncio
import os
from pathlib import Path

import pytest

from libs.serving.peers.channels import open_channel
from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import open_root
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError
from slatemq.v1 import ingest_pb2
from tests.integration.ingest.server import Ingest, process, serving

QUEUE = "invoices"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "data").as_uri()


def row(number: int, **fields: object) -> ingest_pb2.PushedMessage:
    if "payload_uri" not in fields:
        fields.setdefault("payload", b"%d" % number)
    fields.setdefault("queue_id", QUEUE)
    return ingest_pb2.PushedMessage(**fields)  # type: ignore[arg-type]


async def push(ingest: Ingest, first: int, count: int, broker: int = 0) -> int:
    rows = [row(number) for number in range(first, first + count)]
    return await push_rows(ingest, first, *rows, broker=broker)


async def push_rows(
    ingest: Ingest,
    first: int,
    *rows: ingest_pb2.PushedMessage,
    broker: int = 0,
    set_aside: int = 0,
) -> int:
    request = ingest_pb2.PushRequest(
        broker_shard=broker, first_number=first, messages=rows, set_aside_count=set_aside
    )
    with raising_slatemq_errors():
        answer: ingest_pb2.PushResponse = await ingest.stub.Push(request, timeout=60)
    return answer.last_number


async def metadata(ingest: Ingest, message_id: int) -> ingest_pb2.GetMessageMetadataResponse:
    request = ingest_pb2.GetMessageMetadataRequest(message_id=message_id)
    with raising_slatemq_errors():
        return await ingest.stub.GetMessageMetadata(request, timeout=60)


async def stored(ingest: Ingest) -> list[bytes]:
    """The payloads of all messages, in the order of the log."""
    log = await ingest.log()
    return await ingest.payloads(*(one.message_id for one in log)) if log else []


def numbers(last: int) -> list[bytes]:
    return [b"%d" % number for number in range(1, last + 1)]


def objects(root: str) -> list[Path]:
    return list(Path(root.removeprefix("file://")).rglob("blobs/*/*"))


async def test_what_is_pushed_is_in_the_log_for_its_queue_alone() -> None:
    async with serving() as ingest:
        other = row(2, payload=b"x", queue_id="other", headers={"a": "b"}, delay_ms=7_000_000_000)
        assert await push_rows(ingest, 1, row(1), other) == 2
        (published,) = await ingest.send(b"published")

        first, second, third = await ingest.log()
        assert [one.direct_queue_id for one in (first, second, third)] == [QUEUE, "other", ""]
        assert dict(second.headers) == {"a": "b"}
        # A delay that the broker has taken is not judged again: it would hold the outbox up.
        assert second.delay_ms == 7_000_000_000
        assert first.delay_ms is None
        assert third.message_id == published
        assert await stored(ingest) == [b"1", b"x", b"published"]
        # Brokers ask for both before they edit a message.
        decides = [await metadata(ingest, one.message_id) for one in (second, third)]
        assert [(dict(one.headers), one.direct_queue_id) for one in decides] == [
            ({"a": "b"}, "other"),
            ({}, ""),
        ]


async def test_rows_sent_again_are_passed_over_also_after_a_restart(root: str) -> None:
    async with serving(root) as ingest:
        assert await push(ingest, 1, 3) == 3
        assert await push(ingest, 1, 3) == 3
        assert await push(ingest, 2, 3) == 4
        assert await push(ingest, 1, 1, broker=7) == 1
    async with serving(root) as ingest:
        assert await push(ingest, 1, 2) == 4
        assert await push(ingest, 1, 5) == 5
        assert await push(ingest, 1, 2, broker=7) == 2
        assert await stored(ingest) == [b"1", b"2", b"3", b"4", b"1", b"5", b"2"]


async def test_a_gap_is_refused_and_changes_nothing() -> None:
    async with serving() as ingest:
        for first in (2, 1 << 40):
            with pytest.raises(FailedPrecondition) as refused:
                await push(ingest, first, 2)
            assert refused.value.reason == "OUTBOX_GAP"
            assert refused.value.metadata["last_number"] == "0"
        assert await push(ingest, 1, 2) == 2
        with pytest.raises(FailedPrecondition) as refused:
            await push(ingest, 4, 1)
        assert refused.value.metadata["last_number"] == "2"
        assert await stored(ingest) == numbers(2)


async def test_rows_that_are_set_aside_count_as_stored_with_those_behind_or_alone(
    root: str,
) -> None:
    async with serving(root) as ingest:
        # Given rows 1 and 2 that the broker has set aside, and 3
        assert await push_rows(ingest, 3, row(3), set_aside=2) == 3
        # When it is sent again, and 5 and 6 are set aside with no row behind them
        assert await push_rows(ingest, 3, row(3), row(4), set_aside=2) == 4
        assert await push_rows(ingest, 7, set_aside=2) == 6
        assert await push_rows(ingest, 7, set_aside=2) == 6
        assert await push_rows(ingest, 4, row(4)) == 6, "what was sent before comes again, late"
    async with serving(root) as ingest:
        # Then each number counts once, also after a restart, and a gap before them is still one
        assert await push_rows(ingest, 6, set_aside=1) == 6
        with pytest.raises(FailedPrecondition) as refused:
            await push_rows(ingest, 9, row(9), set_aside=1)
        assert refused.value.metadata["last_number"] == "6"
        assert await push_rows(ingest, 8, row(8), set_aside=3) == 8
        assert await stored(ingest) == [b"3", b"4", b"8"]


async def test_calls_at_the_same_time_store_each_row_once() -> None:
    async with serving() as ingest:
        calls = [push(ingest, first, 50) for first in (1, 1, 20, 51, 1, 90, 60)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                assert isinstance(answer, FailedPrecondition), answer
        # What was refused for a gap is sent again, from where ingest is.
        last = max(answer for answer in answers if isinstance(answer, int))
        assert await push(ingest, last + 1, 139 - last + 1) == 139 + 1
        assert await stored(ingest) == numbers(140)


async def test_large_payloads_come_with_the_call_or_as_objects_stored_before(root: str) -> None:
    large, stored_before = os.urandom(100_000), os.urandom(200_000)
    uri = await Blobs(open_root(root)).put(stored_before)
    async with serving(root) as ingest:
        rows = [
            row(1, payload=large),
            row(2, payload_uri=uri, payload_bytes=len(stored_before)),
            row(3),
        ]
        assert await push_rows(ingest, 1, *rows) == 3
        assert await push_rows(ingest, 1, *rows, row(4)) == 4
        assert await stored(ingest) == [large, stored_before, b"3", b"4"]
        assert [one.payload_bytes for one in await ingest.log()] == [100_000, 200_000, 1, 1]
    async with serving(root) as ingest:
        assert await stored(ingest) == [large, stored_before, b"3", b"4"]
    assert len(objects(root)) == 2, "rows that are stored are not uploaded again"


def bad(field: str, **fields: object) -> object:
    request = {"broker_shard": 0, "first_number": 1, "messages": [row(1), row(2)], **fields}
    return pytest.param(field, ingest_pb2.PushRequest(**request), id=f"{field} {[*fields]}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        bad("broker_shard", broker_shard=-1),
        bad("broker_shard", broker_shard=1 << 14),
        bad("first_number", first_number=0),
        bad("first_number", first_number=-1),
        bad("first_number", first_number=(1 << 62) + 1),
        bad("messages", messages=[]),
        bad("set_aside_count", set_aside_count=-1),
        bad("set_aside_count", first_number=3, set_aside_count=3),
        bad("messages", messages=[row(1)] * 10_001),
        bad("messages[1].queue_id", messages=[row(1), row(2, queue_id="")]),
        bad("messages[1].queue_id", messages=[row(1), row(2, queue_id="q" * 256)]),
        bad("messages[0].retention_s", messages=[row(1, retention_s=-1)]),
        bad("messages[0].delay_ms", messages=[row(1, delay_ms=-1)]),
        bad('messages[1].headers[""]', messages=[row(1), row(2, headers={"": "x"})]),
        bad(
            "messages[0].payload_uri",
            messages=[row(1, payload=b"x", payload_uri="memory:///blobs/ab/cd")],
        ),
        bad(
            "messages[0].payload_uri",
            messages=[row(1, payload_uri="file:///etc/passwd")],
        ),
        bad(
            "messages[0].payload_uri",
            messages=[row(1, payload_uri="memory:///blobs/../cd")],
        ),
        bad(
            "messages[0].payload_bytes",
            messages=[row(1, payload_uri="memory:///blobs/ab/cd", payload_bytes=-1)],
        ),
    ],
)
async def test_bad_rows_name_their_field_and_change_nothing(
    field: str, request_: ingest_pb2.PushRequest
) -> None:
    async with serving() as ingest:
        with pytest.raises(InvalidArgument) as refused, raising_slatemq_errors():
            await ingest.stub.Push(request_)
        assert refused.value.field == field
        assert await ingest.log() == []
        assert await push(ingest, 1, 1) == 1


async def test_a_kill_at_any_time_neither_loses_nor_doubles_a_row(
    root: str, tmp_path: Path
) -> None:
    last, batch, kills = 0, 20, 6
    for turn in range(kills):
        async with (
            process(root, tmp_path / "ready") as (ingest, address),
            open_channel(address) as channel,
        ):
            client = Ingest(channel)

            async def send(client: Ingest = client) -> None:
                nonlocal last
                while True:
                    # Two senders at once, as after a change of brokers: one repeats the other.
                    answers = await asyncio.gather(
                        push(client, last + 1, batch), push(client, max(last - 5, 1), batch)
                    )
                    assert max(answers) <= last + batch
                    last = max(answers)

            sending = asyncio.create_task(send())
            before = last
            async with asyncio.timeout(60):
                while last <= before + turn * batch and not sending.done():
                    await asyncio.sleep(0.001)
            ingest.kill()
            with pytest.raises(SlateMQError):
                await sending
    async with serving(root) as server:
        answered = last
        last = await push(server, 1, 1)
        assert last >= answered
        assert await stored(server) == numbers(last)
        assert len(await server.log()) == last
