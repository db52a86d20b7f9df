import asyncio
from pathlib import Path
from typing import Any

import pytest

from slatemq.errors import InvalidArgument
from slatemq.v1 import ingest_pb2
from tests.integration.ingest.server import message, serving


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "data").as_uri()


async def test_a_repeat_gets_the_first_ids_and_stores_nothing() -> None:
    async with serving() as ingest:
        first = await ingest.send(b"a", b"b", request_id="r", type="order", region="eu")
        await ingest.send(b"other", request_id="s")
        again = await ingest.send(b"a", b"b", request_id="r", region="eu", type="order")
        assert again == first
        assert len(await ingest.log()) == 3


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "after a restart"])
async def test_messages_repeated_in_other_runs_are_the_same(root: str, restart: bool) -> None:
    payloads = [b"%d" % n for n in range(40)]
    common: dict[str, Any] = {"headers": {"type": "order"}, "delay_ms": 5}
    alone = ingest_pb2.PublishRun(payloads=[b"last"], retention_s=60)
    in_runs = ingest_pb2.PublishRequest(
        request_id="r", runs=[ingest_pb2.PublishRun(payloads=payloads, **common), alone]
    )
    singles = [ingest_pb2.PublishRun(payloads=[payload], **common) for payload in payloads]
    in_singles = ingest_pb2.PublishRequest(request_id="r", runs=[*singles, alone])

    async with serving(root) as ingest:
        first = await ingest.stub.Publish(in_runs)
        assert len(first.message_ids) == 41
        if not restart:
            assert await ingest.stub.Publish(in_singles) == first
    async with serving(root) as ingest:
        assert await ingest.stub.Publish(in_singles) == first
        log = await ingest.log()
        assert [one.message_id for one in log] == list(first.message_ids)
        assert [(dict(one.headers), one.delay_ms) for one in log[:40]] == [
            ({"type": "order"}, 5)
        ] * 40
        assert (log[40].retention_s, dict(log[40].headers)) == (60, {})
        read = await ingest.read(*first.message_ids)
        assert [one.payload for one in read.messages] == [*payloads, b"last"]


async def test_repeats_at_the_same_time_store_one(root: str) -> None:
    async with serving(root) as ingest:
        answers = await asyncio.gather(*(ingest.send(b"a", request_id="r") for _ in range(20)))
        assert len({tuple(ids) for ids in answers}) == 1
        assert len(await ingest.log()) == 1


async def test_a_repeat_of_a_large_payload_on_its_way_stores_one_blob(
    root: str, tmp_path: Path
) -> None:
    payload = bytes(5_000_000)
    async with serving(root) as ingest:
        answers = await asyncio.gather(*(ingest.send(payload, request_id="r") for _ in range(4)))
        assert len({tuple(ids) for ids in answers}) == 1
    assert len([p for p in (tmp_path / "data" / "blobs").rglob("*") if p.is_file()]) == 1


async def test_a_repeat_is_known_after_a_restart(root: str) -> None:
    async with serving(root) as ingest:
        first = await ingest.send(b"a", b"b", request_id="r")
        await asyncio.gather(*(ingest.send(b"x", request_id=f"x{n}") for n in range(30)))
    async with serving(root) as ingest:
        assert await ingest.send(b"a", b"b", request_id="r") == first
        assert len(await ingest.log()) == 32
        with pytest.raises(InvalidArgument):
            await ingest.send(b"a", request_id="x7")


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "after a restart"])
async def test_other_content_under_a_used_request_id_is_refused(root: str, restart: bool) -> None:
    others = [
        [message(b"a")],
        [message(b"b"), message(b"a")],
        [message(b"a", type="x"), message(b"b")],
        [message(b"ab"), message(b"")],
    ]
    async with serving(root) as ingest:
        await ingest.send(b"a", b"b", request_id="r")
        if not restart:
            for other in others:
                with pytest.raises(InvalidArgument) as refused:
                    await ingest.publish(*other, request_id="r")
                assert refused.value.field == "request_id"
            assert len(await ingest.log()) == 2
    if restart:
        async with serving(root) as ingest:
            for other in others:
                with pytest.raises(InvalidArgument) as refused:
                    await ingest.publish(*other, request_id="r")
                assert refused.value.reason == "REQUEST_ID_REUSED"
            assert len(await ingest.log()) == 2


async def test_a_publish_that_was_refused_leaves_its_request_id_free() -> None:
    async with serving() as ingest:
        with pytest.raises(InvalidArgument):
            await ingest.send(request_id="r")
        assert len(await ingest.send(b"a", request_id="r")) == 1
