"""Runs of messages have what was published, fresh from the cache or not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from libs.storage.records.metadata import MessageMetadata, encode_headers
from services.ingest.batches import NOT_SET, Columns
from services.ingest.read.message_runs import ReadResult, ResponseBudget, common_of
from services.ingest.read.payload_cache import CachedRun, PayloadCache
from services.ingest.read.reading import Reader
from slatemq.v1.ingest_pb2 import BatchGetMessagesResponse
from slatemq.v1.message_pb2 import Message
from tests.stored_messages import StoredMessages, to_message

Stored = Mapping[int, tuple[MessageMetadata, bytes]]


class Disk(Reader):
    """A reader whose database is a mapping."""

    def __init__(self, stored: Stored, cache: PayloadCache) -> None:
        nothing = cast("Any", None)
        super().__init__(nothing, nothing, nothing, cache)
        self.stored = stored
        self.reads: list[list[int]] = []

    async def _read_once(
        self, message_ids: Sequence[int], room: ResponseBudget, with_etags: bool
    ) -> ReadResult:
        self.reads.append(list(message_ids))
        read = ReadResult([], [], [], [])
        for message_id in message_ids:
            if message_id not in self.stored:
                read.missing_ids.append(message_id)
                continue
            metadata, payload = self.stored[message_id]
            if not room.take(len(payload), 0):
                break
            read.add(common_of(metadata), [message_id], [payload], ())
        return read


def stored(count: int, size: int = 10) -> Stored:
    return {
        at: (
            MessageMetadata(at, 1000 + at, 5000, 0, at % 3, {"n": str(at % 2), "": ""}),
            b"%d" % at * size,
        )
        for at in range(1, count + 1)
    }


def cached(messages: Stored, first: int, last: int, *, without: int = 0) -> CachedRun:
    chosen = [messages[at] for at in range(first, last + 1)]
    columns = Columns(
        [dict(metadata.headers) for metadata, _ in chosen],
        [encode_headers(metadata.headers) for metadata, _ in chosen],
        [metadata.created_at_ms for metadata, _ in chosen],
        [metadata.retention_s for metadata, _ in chosen],
        [len(payload) for _, payload in chosen],
    )
    payloads = [None if meta.message_id == without else payload for meta, payload in chosen]
    return CachedRun(first, 5000, payloads, columns)


def read(disk: Disk, ids: Sequence[int], room: ResponseBudget) -> BatchGetMessagesResponse:
    result = asyncio.run(disk.read(list(ids), room))
    return BatchGetMessagesResponse.FromString(result.encode())


def ids_of(found: BatchGetMessagesResponse) -> list[int]:
    return [message_id for run in found.runs for message_id in run.message_ids]


def messages_of(found: BatchGetMessagesResponse) -> list[Message]:
    return StoredMessages.of(found).messages


def big_room() -> ResponseBudget:
    return ResponseBudget(1 << 30, 1 << 30)


@given(st.lists(st.integers(1, 25), unique=True), st.integers(0, 20))
def test_all_that_is_asked_for_comes_in_order_wherever_it_is(ids: list[int], without: int) -> None:
    # 1-5 were evicted, 9 and 10 were published with something between, 21-25 do not exist.
    messages = stored(20)
    cache = PayloadCache(10_000)
    for first, last in ((6, 8), (11, 20)):
        cache.add(cached(messages, first, last, without=without), 100)

    found = read(Disk(messages, cache), ids, big_room())

    expected = [messages[at] for at in ids if at in messages]
    assert messages_of(found) == [to_message(*one) for one in expected]
    assert found.missing_ids == [at for at in ids if at not in messages]


@given(st.integers(0, 400), st.integers(1, 20))
def test_an_answer_holds_the_first_messages_up_to_its_bound(bytes_max: int, fresh: int) -> None:
    messages = stored(20)
    cache = PayloadCache(10_000)
    cache.add(cached(messages, fresh, 20), 100)

    found = read(Disk(messages, cache), range(1, 21), ResponseBudget(bytes_max, 1 << 30))

    sizes = [len(messages[at][1]) for at in ids_of(found)]
    assert ids_of(found) == list(range(1, len(sizes) + 1))
    assert len(sizes) == 1 or sum(sizes) <= bytes_max
    assert len(sizes) == 20 or sum(sizes) + len(messages[len(sizes) + 1][1]) > bytes_max


def test_what_is_in_the_cache_is_not_read_from_the_disk() -> None:
    messages = stored(9)
    cache = PayloadCache(10_000)
    cache.add(cached(messages, 4, 9, without=7), 100)
    disk = Disk(messages, cache)

    read(disk, range(1, 10), big_room())

    assert disk.reads == [[1, 2, 3], [7]]


def test_a_message_without_a_time_of_its_own_was_made_when_it_was_received() -> None:
    columns = Columns([{}], [encode_headers({})], [NOT_SET], [0], [1])
    cache = PayloadCache(100)
    cache.add(CachedRun(1, 5000, [b"x"], columns), 1)

    (message,) = messages_of(read(Disk({}, cache), [1], big_room()))

    assert message.created_at_ms == 5000


def test_a_large_message_of_a_late_shard_is_encoded_as_protobuf_does() -> None:
    message = MessageMetadata(0x3FFF << 48 | 7, 1, 2, 0, 3, {"key": "value"})
    disk = Disk({message.message_id: (message, b"p" * 20_000)}, PayloadCache(0))

    (encoded,) = messages_of(read(disk, [message.message_id], big_room()))

    assert encoded == to_message(message, b"p" * 20_000)


@given(
    st.sampled_from((1, 100, 16_300, 0x3FFF << 48 | 16_370)),
    st.lists(st.tuples(st.sampled_from((b"", b"x", b"y" * 200)), st.integers(0, 1)), min_size=1),
    st.data(),
)
def test_runs_are_what_was_published(
    first: int, published: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    messages = [
        (MessageMetadata(first + at, 7 + kind, 5000, 0, kind, {"kind": str(kind)}), payload)
        for at, (payload, kind) in enumerate(published)
    ]
    cache = PayloadCache(1 << 20)
    cache.add(cached(dict(enumerate(messages)), 0, len(messages) - 1)._replace(first_id=first), 1)
    in_a_row = data.draw(st.lists(st.sampled_from(messages), max_size=6), "before") + messages
    wanted = data.draw(st.one_of(st.just(in_a_row), st.permutations(in_a_row)), "wanted")

    found = read(Disk({}, cache), [metadata.message_id for metadata, _ in wanted], big_room())

    assert messages_of(found) == [to_message(*one) for one in wanted]
    # Neighbours that are alike are in one run
    kinds = [metadata.retention_s for metadata, _ in wanted]
    assert len(found.runs) == len(list(groupby(kinds)))


def test_stored_neighbours_that_are_alike_are_in_one_run() -> None:
    headers = {"a": "b"}
    messages = {
        at: (MessageMetadata(at, 1, 5000 + at // 5, 0, 0, headers), b"%d" % at)
        for at in range(1, 10)
    }

    found = read(Disk(messages, PayloadCache(0)), range(1, 10), big_room())

    assert [list(run.message_ids) for run in found.runs] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert messages_of(found) == [to_message(*one) for one in messages.values()]
