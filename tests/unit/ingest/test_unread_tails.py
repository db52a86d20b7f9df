"""Tails that no one reads: each takes a share of the memory for answers."""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing
from typing import Any

from libs.serving.peers.topology import TopologyDirectory
from libs.serving.requests.budget import SMALL_BYTES
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.records.metadata import decode_log_entry, remove_messages
from services.ingest.config import IngestConfig
from services.ingest.rpc.ingest import IngestServicer
from services.ingest.shard import Shard
from slatemq.v1 import ingest_pb2
from tests.unit.ingest.shards import batch, opened

TAILS = 40

ENTRIES = 40
HEADER_BYTES = 60_000


async def test_tails_that_are_not_read_refuse_no_others() -> None:
    root = open_root("memory:///")
    config = IngestConfig(root=root.url, answers_bytes_max=1 << 20)
    async with opened(root) as shard, AsyncExitStack() as unread:
        servicer = IngestServicer(config, shard, TopologyDirectory(root.objects), Telemetry())
        for _ in range(ENTRIES):
            await shard.publisher.publish(batch(b"", header="v" * HEADER_BYTES))

        # When tails from the beginning hold an update each, together more than there may be
        for _ in range(TAILS):
            tail: Any = servicer.TailLog(ingest_pb2.TailLogRequest(), None)
            update = await anext(await unread.enter_async_context(aclosing(tail)))
            assert update.entries
        assert servicer.held_bytes > config.answers_bytes_max

        # Then the next one, which is read, gets all
        tail = servicer.TailLog(ingest_pb2.TailLogRequest(), None)
        count = 0
        async with aclosing(tail) as updates:
            while count < ENTRIES:
                count += len((await anext(updates)).entries)
    assert servicer.held_bytes == 0


async def test_large_log_entries_reach_a_tail_while_unread_answers_take_all_the_memory() -> None:
    root = open_root("memory:///")
    config = IngestConfig(root=root.url, answers_bytes_max=1 << 20)
    async with opened(root) as shard:
        servicer = IngestServicer(config, shard, TopologyDirectory(root.objects), Telemetry())
        sent: list[int] = []
        for count, header_bytes in ((1, 1), (40, 10_000), (1, 60_000), (3, 3 * 60_000), (2, 1)):
            headers = {f"h{n}": "v" * 60_000 for n in range(header_bytes // 60_000)}
            headers["rest"] = "v" * (header_bytes % 60_000)
            sent += await published(shard, count, **headers)

        # When unread answers take more than there may be
        held_bytes = config.answers_bytes_max + 1
        servicer._answers.take(held_bytes)

        # Then a tail, from wherever it begins, gets every message behind that once, in order, and
        # an answer has 64 KiB, or one message
        for position in (0, sent[0], sent[20], sent[41], sent[43]):
            tail: Any = servicer.TailLog(ingest_pb2.TailLogRequest(after_sequence=position), None)
            got: list[int] = []
            async with aclosing(tail) as updates:
                while not got or got[-1] < sent[-1]:
                    update = await anext(updates)
                    ids = [
                        one.message_id
                        for entry in update.entries
                        for one in decode_log_entry(entry.value)
                    ]
                    assert len(ids) == 1 or servicer.held_bytes - held_bytes <= SMALL_BYTES
                    got += ids
            assert [one for one in got if one > position] == [one for one in sent if one > position]
            assert len(got) == len(set(got))
        servicer._answers.release(held_bytes)
    assert servicer.held_bytes == 0


async def test_a_tail_goes_on_where_the_rest_of_an_entry_in_parts_is_purged() -> None:
    root = open_root("memory:///")
    config = IngestConfig(root=root.url, answers_bytes_max=1 << 20)
    async with opened(root) as shard:
        servicer = IngestServicer(config, shard, TopologyDirectory(root.objects), Telemetry())
        large = await published(shard, 40, header="v" * 10_000)
        small = await published(shard, 1)
        servicer._answers.take(config.answers_bytes_max + 1)
        tail: Any = servicer.TailLog(ingest_pb2.TailLogRequest(), None)
        async with aclosing(tail) as updates:
            (first,) = (await anext(updates)).entries

            # When the messages behind the first part go
            came = [one.message_id for one in decode_log_entry(first.value)]
            entry = shard.log.recent(large[0])
            assert entry is not None
            left = remove_messages(entry.value, set(large) - set(came), lambda *_: True).kept
            shard.log.rewritten({entry.sequence: left})

            # Then the next entry comes
            (second,) = (await anext(updates)).entries
            assert [one.message_id for one in decode_log_entry(second.value)] == small


async def published(shard: Shard, count: int, **headers: str) -> list[int]:
    answered = await shard.publisher.publish(batch(*[b""] * count, **headers))
    return list(range(answered.first_message_id, answered.first_message_id + count))
