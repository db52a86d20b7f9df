"""ReplaceMessage: one message changes, its neighbours stay, and no reader sees halves."""

import asyncio
import os
from pathlib import Path

import pytest

from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import Aborted, InvalidArgument, NotFound, Unavailable
from slatemq.v1 import ingest_pb2, message_pb2
from tests.integration.ingest.server import Ingest, message, serving


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "data").as_uri()


async def replace(ingest: Ingest, message_id: int, **fields: object) -> str:
    request = ingest_pb2.ReplaceMessageRequest(message_id=message_id, **fields)  # type: ignore[arg-type]
    with raising_slatemq_errors():
        answer: ingest_pb2.ReplaceMessageResponse = await ingest.stub.ReplaceMessage(
            request, timeout=60
        )
    return answer.etag


async def read(ingest: Ingest, *ids: int) -> list[tuple[message_pb2.Message, str]]:
    read = await ingest.read(*ids, with_etags=True)
    return list(zip(read.messages, read.etags, strict=True))


async def contents(ingest: Ingest, *ids: int) -> list[tuple[bytes, dict[str, str]]]:
    return [(one.payload, dict(one.headers)) for one, _ in await read(ingest, *ids)]


async def test_payload_and_headers_are_replaced_and_nothing_else(root: str) -> None:
    async with serving(root) as ingest:
        publish_run = ingest_pb2.PublishRun(
            payloads=[b"two"], headers={"n": "2"}, created_at_ms=5, retention_s=60, delay_ms=9
        )
        ids = await ingest.publish(message(b"one", n="1"), publish_run, message(b"three", n="3"))
        before = await ingest.log()

        etag = await replace(ingest, ids[1], payload=b"zwei", headers={"z": "2", "a": "b"})

        expected = [(b"one", {"n": "1"}), (b"zwei", {"z": "2", "a": "b"}), (b"three", {"n": "3"})]
        assert await contents(ingest, *ids) == expected
        assert [publish_run for _, publish_run in await read(ingest, ids[1])] == [etag]
        assert await ingest.payloads(*ids) == [payload for payload, _ in expected]
        # The log tells it at once, from memory, and nothing else has changed in it.
        after = await ingest.log()
        assert dict(after[1].headers) == {"z": "2", "a": "b"}
        assert after[1].payload_bytes == 4
        after[1] = after[1]._replace(headers={"n": "2"}, payload_bytes=3)
        assert after == before
    async with serving(root) as ingest:
        assert await contents(ingest, *ids) == expected
        assert [dict(one.headers) for one in await ingest.log()] == [one for _, one in expected]
        assert [publish_run for _, publish_run in await read(ingest, ids[1])] == [etag]


async def test_either_part_may_be_kept(root: str) -> None:
    async with serving(root) as ingest:
        (one,) = await ingest.send(b"payload", a="1")
        await replace(ingest, one, keep_payload=True, headers={"b": "2"})
        assert await contents(ingest, one) == [(b"payload", {"b": "2"})]
        await replace(ingest, one, payload=b"", keep_headers=True)
        assert await contents(ingest, one) == [(b"", {"b": "2"})]


async def test_large_payloads_come_and_go(root: str) -> None:
    large, larger = os.urandom(70_000), os.urandom(300_000)
    async with serving(root) as ingest:
        small, big = await ingest.send(b"small", large)
        ((_, was),) = await read(ingest, big)
        await replace(ingest, small, payload=larger, keep_headers=True)
        etag = await replace(ingest, big, payload=large, keep_headers=True)
        assert etag != was, "the same payload, but another object"
        assert await ingest.payloads(small, big) == [larger, large]
        await replace(ingest, big, payload=b"now small", keep_headers=True)
    async with serving(root) as ingest:
        assert await ingest.payloads(small, big) == [larger, b"now small"]
        assert [one.payload_bytes for one in await ingest.log()] == [300_000, 9]


async def test_only_the_etag_seen_last_replaces() -> None:
    async with serving() as ingest:
        (one,) = await ingest.send(b"1", n="1")
        ((_, first),) = await read(ingest, one)
        second = await replace(ingest, one, etag=first, payload=b"2", keep_headers=True)
        with pytest.raises(Aborted) as refused:
            await replace(ingest, one, etag=first, payload=b"3", keep_headers=True)
        assert refused.value.etag == second != first
        third = await replace(ingest, one, etag=second, keep_payload=True, headers={"n": "3"})
        assert third not in (first, second)
        assert await contents(ingest, one) == [(b"2", {"n": "3"})]


async def test_only_headers_that_were_judged_are_replaced_or_kept() -> None:
    async with serving() as ingest:
        (one,) = await ingest.send(b"1", n="1")
        request = ingest_pb2.GetMessageMetadataRequest(message_id=one)
        judged = (await ingest.stub.GetMessageMetadata(request, timeout=60)).headers_etag
        # Another payload does not matter
        await replace(ingest, one, payload=b"2", keep_headers=True)
        await replace(ingest, one, headers_etag=judged, payload=b"3", keep_headers=True)
        current = await replace(ingest, one, keep_payload=True, headers={"n": "2"})
        for etag in ("", current):
            with pytest.raises(Aborted) as refused:
                await replace(
                    ingest, one, etag=etag, headers_etag=judged, payload=b"4", keep_headers=True
                )
            assert refused.value.etag == current
        assert await contents(ingest, one) == [(b"3", {"n": "2"})]


@pytest.mark.parametrize("size", [5, 70_000])
async def test_a_replace_that_is_repeated_gets_the_first_answer(root: str, size: int) -> None:
    new, other = b"n" * size, b"o" * size
    parts: list[dict[str, object]] = [
        {"payload": new, "headers": {"n": "2"}},
        {"payload": new, "keep_headers": True},
        {"keep_payload": True, "headers": {"n": "2"}},
    ]
    for part in parts:
        async with serving(root) as ingest:
            (one,) = await ingest.send(b"1" * size, n="1")
            ((_, first),) = await read(ingest, one)
            second = await replace(ingest, one, etag=first, **part)
        # The answer was lost, and ingest began again.
        async with serving(root) as ingest:
            assert await replace(ingest, one, etag=first, **part) == second
            assert [data for _, data in await read(ingest, one)] == [second]
            # Not for who wants something else, nor after someone else's change of either part.
            for wanted in (
                {"payload": other, "keep_headers": True},
                {"payload": new, "headers": {}},
            ):
                with pytest.raises(Aborted):
                    await replace(ingest, one, etag=first, **wanted)
            third = await replace(ingest, one, etag=second, payload=other, keep_headers=True)
            with pytest.raises(Aborted) as refused:
                await replace(ingest, one, etag=first, **part)
            assert refused.value.etag == third
            await replace(ingest, one, payload=new, headers={"n": "9"})
            with pytest.raises(Aborted):
                await replace(ingest, one, etag=first, **part)


def damage_object(data: Path) -> None:
    (path,) = data.glob("blobs/*/*")
    path.write_bytes(b"\0" + path.read_bytes()[1:])


async def test_an_edit_by_an_old_etag_is_refused_as_such_where_the_payload_is_damaged(
    tmp_path: Path, root: str
) -> None:
    new = b"n" * 70_000
    async with serving(root) as ingest:
        (one,) = await ingest.send(b"1")
        ((_, first),) = await read(ingest, one)
        second = await replace(ingest, one, payload=b"o" * len(new), keep_headers=True)
    damage_object(tmp_path / "data")
    async with serving(root) as ingest:
        with pytest.raises(Aborted) as refused:
            await replace(ingest, one, etag=first, payload=new, keep_headers=True)
        assert refused.value.etag == second
        # And the edit that names it puts a whole payload in its place
        await replace(ingest, one, etag=second, payload=new, keep_headers=True)
        assert await contents(ingest, one) == [(new, {})]


@pytest.mark.parametrize("etag", ["x", "-", "x-", "\n", "0" * 100_000])
async def test_an_etag_that_none_is_fits_no_message(etag: str) -> None:
    async with serving() as ingest:
        (one,) = await ingest.send(b"1")
        for part in ({"payload": b"2", "keep_headers": True}, {"keep_payload": True}):
            with pytest.raises(Aborted):
                await replace(ingest, one, etag=etag, **part)


async def test_replaces_in_one_entry_lose_none_of_one_another(root: str) -> None:
    async with serving(root) as ingest:
        ids = await ingest.send(*(b"old" for _ in range(20)))
        publishing = asyncio.gather(*(ingest.send(b"other %d" % n) for n in range(20)))
        await asyncio.gather(
            *(replace(ingest, one, payload=b"%d" % one, headers={"id": str(one)}) for one in ids)
        )
        expected = [(b"%d" % one, {"id": str(one)}) for one in ids]
        assert await contents(ingest, *ids) == expected
        await publishing
    async with serving(root) as ingest:
        assert await contents(ingest, *ids) == expected
        assert len(await ingest.log()) == 40


async def test_of_those_who_saw_the_same_one_replaces() -> None:
    async with serving() as ingest:
        (one,) = await ingest.send(b"0")
        ((_, etag),) = await read(ingest, one)
        outcomes = await asyncio.gather(
            *(
                replace(ingest, one, etag=etag, payload=b"%d" % n, keep_headers=True)
                for n in range(1, 9)
            ),
            return_exceptions=True,
        )
        (winner,) = [n for n, item in enumerate(outcomes, 1) if isinstance(item, str)]
        losers = [item for item in outcomes if isinstance(item, Aborted)]
        assert len(losers) == 7
        assert {item.etag for item in losers} == {outcomes[winner - 1]}
        assert await ingest.payloads(one) == [b"%d" % winner]


async def test_a_replace_whose_caller_has_gone_does_not_lose_the_next_one() -> None:
    async with serving() as ingest:
        first, second = await ingest.send(b"1", b"2")
        for turn in range(20):
            giving_up = asyncio.create_task(
                replace(ingest, first, payload=b"a%d" % turn, keep_headers=True)
            )
            await asyncio.sleep(0)
            next_one = asyncio.create_task(
                replace(ingest, second, payload=b"b%d" % turn, keep_headers=True)
            )
            await asyncio.sleep(0.0005 * (turn % 5))
            giving_up.cancel()
            await next_one
            payloads = await ingest.payloads(first, second)
            assert payloads[1] == b"b%d" % turn
        log = await ingest.log()
        assert [len(one) for one in payloads] == [one.payload_bytes for one in log]


async def test_readers_never_see_halves(root: str) -> None:
    async with serving(root, log_cache_bytes=0, payload_cache_bytes=0) as ingest:
        ids = await ingest.send(b"0", b"0", n="0")
        done = asyncio.Event()

        async def watch() -> None:
            while not done.is_set():
                for payload, headers in await contents(ingest, *ids):
                    assert payload == headers["n"].encode()

        watching = [asyncio.create_task(watch()) for _ in range(3)]
        for n in range(1, 60):
            await replace(ingest, ids[n % 2], payload=b"%d" % n, headers={"n": str(n)})
        done.set()
        await asyncio.gather(*watching)


def bad(field: str, **fields: object) -> object:
    return pytest.param(field, fields, id=f"{field} {[*fields]}")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        bad("message_id", message_id=0),
        bad("message_id", message_id=-1),
        bad("message_id", message_id=(1 << 48) + 1),
        bad("keep_headers", keep_payload=True, keep_headers=True),
        bad("payload", keep_payload=True, payload=b"x"),
        bad("headers", keep_headers=True, headers={"a": "b"}),
        bad("payload", payload=b"x" * 100_001),
        bad('headers[""]', headers={"": "x"}),
        bad("headers", headers={str(n): "x" for n in range(256)}),
        bad('headers["k"]', headers={"k": "x" * 65_536}),
    ],
)
async def test_bad_replacements_name_their_field_and_change_nothing(
    field: str, fields: dict[str, object]
) -> None:
    async with serving(payload_bytes_max=100_000) as ingest:
        (one,) = await ingest.send(b"payload", a="1")
        with pytest.raises(InvalidArgument) as refused:
            await replace(ingest, **{"message_id": one, **fields})  # type: ignore[arg-type]
        assert refused.value.field == field
        assert await contents(ingest, one) == [(b"payload", {"a": "1"})]


async def test_what_is_not_stored_is_not_found(tmp_path: Path) -> None:
    root = (tmp_path / "data").as_uri()
    async with serving(root, shard=2) as ingest:
        (first,) = await ingest.send(b"1")
    async with serving(root, shard=2) as ingest:
        # IDs go on in a new block
        (second,) = await ingest.send(b"2")
        for message_id in (first + 1, second - 1):
            with pytest.raises(NotFound):
                await replace(ingest, message_id, payload=b"x")
        with pytest.raises(Unavailable):  # not yet, perhaps
            await replace(ingest, second + 1, payload=b"x")
        assert len(await ingest.log()) == 2


async def test_headers_for_which_a_shared_entry_has_no_room_are_refused() -> None:
    huge = {str(n): "x" * 65_535 for n in range(100)}
    async with serving() as ingest:
        ids = await ingest.send(*(b"%d" % n for n in range(5)))
        await replace(ingest, ids[0], keep_payload=True, headers=huge)
        await replace(ingest, ids[1], keep_payload=True, headers=huge)
        with pytest.raises(InvalidArgument) as refused:
            await replace(ingest, ids[2], keep_payload=True, headers=huge)
        assert refused.value.field == "headers"
        # It can be made smaller again, and the log still goes out.
        await replace(ingest, ids[0], keep_payload=True, headers={})
        assert len(await ingest.log()) == 5
