import asyncio
from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1.ingest_pb2 import PublishRequest, PublishResponse, PublishRun
from tests.integration.ingest.server import Ingest, process, serving


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "data").as_uri()


def keyed(key: str, payload: bytes = b"", **fields: Any) -> PublishRun:
    return PublishRun(payloads=[payload], dedupe_keys=[key], **fields)


async def publish(ingest: Ingest, *messages: PublishRun, request_id: str = "") -> PublishResponse:
    with raising_slatemq_errors():
        answer: PublishResponse = await ingest.stub.Publish(
            PublishRequest(runs=messages, request_id=request_id), timeout=30
        )
        return answer


async def test_a_second_publish_gets_the_first_ones_id_whatever_its_content() -> None:
    async with serving() as ingest:
        first = await publish(ingest, keyed("a", b"one"))
        again = await publish(ingest, keyed("a", b"two"))
        assert again.message_ids == first.message_ids
        assert list(first.duplicates) == []
        assert list(again.duplicates) == [0]
        assert first.received_at_ms > 0
        assert again.received_at_ms == 0
        assert await ingest.payloads(*first.message_ids) == [b"one"]
        assert len(await ingest.log()) == 1


@pytest.mark.parametrize("cached", [0, 1000], ids=["looked up", "in memory"])
async def test_duplicates_stand_among_others_in_one_request(cached: int) -> None:
    async with serving(dedupe_cache_keys=cached) as ingest:
        (known,) = await ingest.publish(keyed("k"))
        answer = await publish(
            ingest,
            PublishRun(payloads=[b"0"], headers={"at": "0"}, delay_ms=5),
            keyed("k", b"1"),
            keyed("a", b"2", headers={"at": "2"}, visible_at_ms=77),
            keyed("a", b"3" * 70_000),
            keyed("b", b"4" * 70_000, headers={"at": "4"}),
            keyed("k", b"5"),
            keyed("a", b"6"),
            PublishRun(payloads=[b"7"], headers={"at": "7"}, delay_ms=9),
        )
        first = answer.message_ids[0]
        stored = [first, first + 1, first + 2, first + 3]
        zero, two, four, seven = stored
        assert list(answer.message_ids) == [zero, known, two, two, four, known, two, seven]
        assert list(answer.duplicates) == [1, 3, 5, 6]
        assert await ingest.payloads(*stored) == [b"0", b"2", b"4" * 70_000, b"7"]
        logged = (await ingest.log())[1:]
        assert [one.message_id for one in logged] == stored
        assert [dict(one.headers) for one in logged] == [{"at": n} for n in "0247"]
        assert [one.visible_at_ms for one in logged] == [0, 77, 0, 0]
        assert [one.delay_ms for one in logged] == [5, None, None, 9]
        assert [one.payload_bytes for one in logged] == [1, 1, 70_000, 1]
        assert answer.received_at_ms == logged[0].received_at_ms


@pytest.mark.parametrize("size", [1, 70_000], ids=["inline", "blobs"])
async def test_of_publishes_at_the_same_time_one_is_stored(root: str, size: int) -> None:
    async with serving(root) as ingest:
        answers = await asyncio.gather(
            *(publish(ingest, keyed("x", b"%d" % n * size), keyed("y")) for n in range(30))
        )
        assert len({tuple(answer.message_ids) for answer in answers}) == 1
        assert sorted(len(answer.duplicates) for answer in answers) == [0] + [2] * 29
        assert len(await ingest.log()) == 2


async def test_keys_are_known_after_a_restart(root: str) -> None:
    keys = [f"k{n}" for n in range(300)]
    async with serving(root) as ingest:
        first = await ingest.publish(*map(keyed, keys))
    async with serving(root) as ingest:
        again = await publish(ingest, *map(keyed, keys), keyed("new"))
        assert list(again.message_ids)[:-1] == first
        assert list(again.duplicates) == list(range(300))
        assert len(await ingest.log()) == 301


async def test_keys_are_known_after_a_kill(root: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    answers = []
    for n in range(3):
        async with process(root, ready) as (started, address):
            async with Ingest.at(address) as ingest:
                answers.append(await ingest.publish(keyed("a"), keyed("b"), keyed(f"new {n}")))
            started.kill()
            await started.wait()
    assert len({ids[0] for ids in answers}) == len({ids[1] for ids in answers}) == 1
    assert len({ids[2] for ids in answers}) == 3


async def test_kills_amid_publishes_leave_each_key_with_one_message(
    root: str, tmp_path: Path
) -> None:
    keys = [f"k{n}" for n in range(400)]
    stored: dict[str, int] = {}

    async def attempt(ingest: Ingest, some: list[str]) -> None:
        ids = await ingest.publish(*(keyed(key, headers={"key": key}) for key in some))
        for key, message_id in zip(some, ids, strict=True):
            assert stored.setdefault(key, message_id) == message_id

    for before_kill in (1, 7, 20):
        async with (
            process(root, tmp_path / "ready.json") as (started, address),
            Ingest.at(address) as ingest,
        ):
            parts = [keys[n : n + 10] for n in range(0, 400, 10)]
            attempts = [asyncio.create_task(attempt(ingest, part)) for part in parts]
            while len(running := [one for one in attempts if not one.done()]) > 40 - before_kill:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            started.kill()
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            assert all(one is None or isinstance(one, Unavailable) for one in outcomes)
            await started.wait()
    async with serving(root) as ingest:
        await attempt(ingest, keys)
        logged = await ingest.log()
    assert {one.headers["key"]: one.message_id for one in logged} == stored
    assert len(logged) == len(stored) == 400


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "after a restart"])
async def test_a_repeated_request_gets_its_ids_and_duplicates_again(
    root: str, restart: bool
) -> None:
    requests: list[tuple[str, list[PublishRun]]] = [
        ("some", [keyed("a"), keyed("b"), keyed("k"), keyed("b"), PublishRun(payloads=[b""])]),
        ("all", [keyed("k"), keyed("a"), keyed("k")]),
        ("all, too", [keyed("k"), keyed("a"), keyed("k")]),
        ("none", [PublishRun(payloads=[b"1"]), PublishRun(payloads=[b"2"])]),
    ]

    async def all_of(ingest: Ingest) -> list[PublishResponse]:
        return [await publish(ingest, *messages, request_id=name) for name, messages in requests]

    async with serving(root) as ingest:
        await ingest.publish(keyed("k"))
        first = await all_of(ingest)
        count = len(await ingest.log())
        if not restart:
            assert await all_of(ingest) == first
    async with serving(root) as ingest:
        assert await all_of(ingest) == first
        assert len(await ingest.log()) == count
        with pytest.raises(InvalidArgument) as refused:
            await publish(ingest, keyed("k"), keyed("a"), keyed("other"), request_id="all")
        assert refused.value.reason == "REQUEST_ID_REUSED"
    assert [bool(answer.received_at_ms) for answer in first] == [True, False, False, True]


async def test_a_request_that_stores_nothing_takes_no_message_id(root: str) -> None:
    async with serving(root) as ingest:
        (known,) = await ingest.publish(keyed("k"))
        repeats = [await publish(ingest, keyed("k"), request_id=f"r{n}") for n in range(3)]
        assert await ingest.publish(keyed("new")) == [known + 1]
        # A repeat first in its commit beside one that stores: each keeps its answer.
        for n in range(3):
            (last,) = await ingest.publish(keyed(f"n{n}"), request_id=f"n{n}")
            assert last == known + 2 + n
            repeats.append(await publish(ingest, keyed("k"), request_id=f"m{n}"))
    async with serving(root) as ingest:
        names = [*(f"r{n}" for n in range(3)), *(f"m{n}" for n in range(3))]
        assert [await publish(ingest, keyed("k"), request_id=name) for name in names] == repeats
        # After the restart, too, no row of the same minute takes the place of another.
        more = [await publish(ingest, keyed("k"), request_id=f"s{n}") for n in range(3)]
    async with serving(root) as ingest:
        names += [f"s{n}" for n in range(3)]
        repeats += more
        assert [await publish(ingest, keyed("k"), request_id=name) for name in names] == repeats
        with pytest.raises(InvalidArgument):
            await publish(ingest, keyed("other"), request_id="r0")


async def test_requests_that_store_nothing_share_a_commit_with_others(root: str) -> None:
    async with serving(root) as ingest:
        (known,) = await ingest.publish(keyed("k"))

        async def some(n: int) -> PublishResponse:
            key = "k" if n % 2 else f"new {n}"
            return await publish(ingest, keyed(key), request_id=f"r{n}")

        first = await asyncio.gather(*map(some, range(40)))
        assert all(list(one.message_ids) == [known] for one in first[1::2])
        assert len(await ingest.log()) == 21
    async with serving(root) as ingest:
        assert await asyncio.gather(*map(some, range(40))) == first
        assert len(await ingest.log()) == 21


async def test_a_key_of_another_shard_is_refused_with_its_shard(root: str) -> None:
    shards = [0, 1, 4]
    directory = TopologyDirectory(open_root(root).objects)
    for shard in (1, 4):
        await directory.announce(Peer("ingest", shard, f"127.0.0.1:{shard + 1}"))
    keys = [f"key {n}" for n in range(50)]
    mine = [key for key in keys if dedupe_shard(key, shards) == 0]
    others = [key for key in keys if key not in mine]
    assert mine
    assert {dedupe_shard(key, shards) for key in others} == {1, 4}
    async with serving(root) as ingest:
        for key in others:
            keys_of_run = [*mine, "", key]
            run = PublishRun(payloads=[b""] * len(keys_of_run), dedupe_keys=keys_of_run)
            with pytest.raises(InvalidArgument) as refused:
                await publish(ingest, PublishRun(payloads=[b"", b""]), run, keyed(mine[0]))
            assert refused.value.reason == "WRONG_SHARD"
            assert refused.value.field == f"runs[1].dedupe_keys[{len(mine) + 1}]"
            assert refused.value.metadata["shard"] == str(dedupe_shard(key, shards))
        assert (await ingest.status()).durable_sequence == 0
        assert len(await ingest.publish(*map(keyed, mine))) == len(mine)

        # Also when there are so many that they are hashed elsewhere
        many = [key for n in range(6000) if dedupe_shard(key := f"many {n}", shards) == 0]
        assert len(many) > 1500
        assert len(await ingest.publish(*map(keyed, many))) == len(many)
        with pytest.raises(InvalidArgument) as refused:
            await publish(ingest, *map(keyed, many), keyed(others[0]))
        assert refused.value.field == f"runs[{len(many)}].dedupe_keys[0]"


async def test_a_repeat_gets_its_answer_though_its_key_is_of_another_shard_by_now(
    root: str,
) -> None:
    key = next(key for n in range(100) if dedupe_shard(key := f"key {n}", [0, 1]) == 1)
    async with serving(root) as ingest:
        first = await publish(ingest, keyed(key), request_id="r")
    await TopologyDirectory(open_root(root).objects).announce(Peer("ingest", 1, "127.0.0.1:2"))
    async with serving(root) as ingest:
        assert await publish(ingest, keyed(key), request_id="r") == first
        for _ in range(2):
            with pytest.raises(InvalidArgument) as refused:
                await publish(ingest, keyed(key), request_id="other")
            assert refused.value.reason == "WRONG_SHARD"
        assert len(await ingest.log()) == 1
