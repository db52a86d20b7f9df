"""Payloads whose objects take longer to read than any call may last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from obstore.store import S3Store

from libs.storage.errors import StoreUnavailable
from libs.storage.objects import small_objects as objects
from libs.storage.objects.digests import digest_of, stored_digest
from libs.storage.objects.durability import NoSync
from libs.storage.objects.small_objects import Objects, open_objects
from services.broker.delivery.message_cache import Ingests
from services.ingest.read import blob_reads, reading
from slatemq.errors import Unavailable
from tests.integration.broker.rig import running
from tests.integration.ingest.server import serving
from tests.integration.waiting import eventually

REAL: Any = Ingests
"""In place of the rig's ingest."""

LARGE = b"x" * 70_000


class SlowStore:
    """Reads of `blobs/` that end when the test says so, and then only for those who wait long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = asyncio.Event()
        self.reads = 0
        self._get = Objects.get
        monkeypatch.setattr(Objects, "get", lambda one, path: self.get(one, path))
        monkeypatch.setattr(Objects, "get_slowly", lambda one, path, _: self.get_slowly(one, path))

    async def get(self, store: Objects, path: str) -> bytes:
        if path.startswith("blobs/"):
            raise StoreUnavailable(f"reading {path}: operation timed out")
        return await self._get(store, path)

    async def get_slowly(self, store: Objects, path: str) -> bytes:
        self.reads += 1
        await self.free.wait()
        return await self._get(store, path)


async def test_a_payload_that_takes_long_to_read_is_delivered_and_the_others_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "BLOB_WAIT_S", 0.05)
    root = (tmp_path / "data").as_uri()
    # Given a queue with a large payload before small ones, and another queue
    async with serving(root, payload_cache_bytes=0) as ingest:
        large, *small = await ingest.send(LARGE, b"1", b"2")
        store = SlowStore(monkeypatch)
        async with running(tmp_path / "data", ingest=REAL) as rig:
            await rig.create()
            await rig.create("other")
            await rig.assign([large, *small])
            await rig.assign(small, "other")

            # When its object takes long to read
            async with asyncio.timeout(60):
                given: list[Any] = []
                while len(given) < 2:
                    given += await rig.claim(max_messages=10, wait_ms=1_000)
                others = await rig.claim("other", max_messages=10, wait_ms=1_000)

            # Then those behind it pass, in both queues, and no one gets it without its payload
            assert [one.message.message_id for one in given] == small
            assert [one.message.message_id for one in others] == small
            assert await rig.counts() == {"available": 1, "in_flight": 2}

            # And when it is read at last, though each who asked has given up, it is delivered
            waiting = asyncio.create_task(rig.claim(wait_ms=30_000))
            await asyncio.sleep(0.2)
            store.free.set()
            (got,) = await waiting
            assert got.message.payload == LARGE
            assert got.attempts_count == 1
            assert store.reads == 1


async def test_who_wants_one_such_message_alone_is_asked_to_come_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "BLOB_WAIT_S", 0.05)
    async with serving((tmp_path / "data").as_uri(), payload_cache_bytes=0) as ingest:
        large, small = await ingest.send(LARGE, b"1")
        store = SlowStore(monkeypatch)
        answer = await ingest.read(large, small)
        assert (list(answer.slow_ids), list(answer.missing_ids)) == ([large], [])
        assert [one.message_id for one in answer.messages] == [small]
        store.free.set()
        async with asyncio.timeout(60):
            while not (answer := await ingest.read(large)).messages:
                pass
        assert answer.messages[0].payload == LARGE


async def test_an_object_that_takes_long_to_read_and_is_damaged_is_called_so_after_two_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "BLOB_WAIT_S", 0.05)
    async with serving((tmp_path / "data").as_uri(), payload_cache_bytes=0) as ingest:
        (large,) = await ingest.send(LARGE)
        (file,) = (one for one in (tmp_path / "data" / "blobs").rglob("*") if one.is_file())
        file.write_bytes(b"y" + LARGE[1:])
        store, kept = SlowStore(monkeypatch), kept_reads(monkeypatch)
        assert list((await ingest.read(large)).slow_ids) == [large]
        store.free.set()
        await eventually(lambda: kept)  # It is read to its end while no one waits.
        store.free.clear()

        answer = await ingest.read(large)

        assert list(answer.damaged_ids) == [large]
        assert store.reads == 2  # One answer may be wrong where the object is not.


def kept_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URIs whose reads have ended and are kept, from now on."""
    kept: list[str] = []
    keep = blob_reads.BlobReads._keep

    def noted(reads: blob_reads.BlobReads, uri: str, for_s: float) -> None:
        keep(reads, uri, for_s)
        kept.append(uri)

    monkeypatch.setattr(blob_reads.BlobReads, "_keep", noted)
    return kept


class ThrottledStore(SlowStore):
    """All reads of `blobs/` together get this many bytes a second, each an equal part."""

    bytes_a_s = 500_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.reading = self.reading_max = 0

    async def get_slowly(self, store: Objects, path: str) -> bytes:
        self.reads += 1
        self.reading += 1
        self.reading_max = max(self.reading_max, self.reading)
        try:
            payload = await self._get(store, path)
            left = float(len(payload))
            while left > 0:
                await asyncio.sleep(0.01)
                left -= 0.01 * self.bytes_a_s / self.reading
            return payload
        finally:
            self.reading -= 1


async def test_a_backlog_of_large_payloads_on_a_throttled_store_is_read_a_few_at_a_time_each_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given room for two of six large payloads, none of which comes before its caller's deadline
    monkeypatch.setattr(reading, "BLOB_WAIT_S", 0.05)
    monkeypatch.setattr(blob_reads, "BYTES_MAX", 2 * len(LARGE))
    monkeypatch.setattr(blob_reads, "TAKEN_S", 2.0)
    async with serving((tmp_path / "data").as_uri(), payload_cache_bytes=0) as ingest:
        ids = await ingest.send(*[LARGE] * 6)
        store = ThrottledStore(monkeypatch)
        settings = {"payload_cache_bytes": 0}
        async with running(tmp_path / "data", ingest=REAL, settings=settings) as rig:
            await rig.create()
            await rig.assign(ids)

            # When they are claimed
            async with asyncio.timeout(60):
                given: list[Any] = []
                while len(given) < 6:
                    try:
                        given += await rig.claim(max_messages=10, wait_ms=1_000)
                    except grpc.aio.AioRpcError as none_came:
                        assert "still reading payloads" in str(none_came.details())  # noqa: PT017

            # Then all are delivered, none was read twice, and never more at once than have room
            assert sorted(one.message.message_id for one in given) == sorted(ids)
            assert all(one.message.payload == LARGE for one in given)
            assert {one.attempts_count for one in given} == {1}
            assert store.reading_max <= 2
            assert store.reads == 6


async def test_a_payload_that_waits_for_room_is_not_read_if_its_caller_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "BLOB_WAIT_S", 0.05)
    monkeypatch.setattr(blob_reads, "BYTES_MAX", len(LARGE))
    async with serving((tmp_path / "data").as_uri(), payload_cache_bytes=0) as ingest:
        first, second = await ingest.send(LARGE, LARGE)
        store = SlowStore(monkeypatch)
        for _ in range(3):
            answer = await ingest.read(first, second)
            assert list(answer.slow_ids) == [first, second]
        assert store.reads == 1


@asynccontextmanager
async def trickling(pieces: int, pause_s: float) -> AsyncIterator[str]:
    """An S3 server with one object, whose bytes come a piece at a time."""

    served: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served[writer] = asyncio.create_task(answer(reader, writer))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            head = (
                'HTTP/1.1 200 OK\r\nconnection: close\r\netag: "a"\r\n'
                "last-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
                f"content-length: {pieces * 70_000}\r\n\r\n"
            )
            writer.write(head.encode())
            for _ in range(pieces):
                writer.write(b"y" * 70_000)
                await writer.drain()
                await asyncio.sleep(pause_s)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for _ in range(5):  # Until a connection that was just accepted is among them.
            await asyncio.sleep(0)
        for writer, task in served.items():
            writer.transport.abort()  # A task that never began closes nothing.
            task.cancel()
        await asyncio.gather(*served.values(), return_exceptions=True)


async def test_an_object_is_read_for_as_long_as_its_bytes_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a store that takes longer for an object than an answer may
    monkeypatch.setattr(objects, "_ATTEMPT_S", 1)
    monkeypatch.setattr(objects, "_RETRIES", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    async with trickling(pieces=20, pause_s=0.1) as endpoint:
        options = {"endpoint": endpoint, "region": "us-east-1", "allow_http": "true"}
        store = open_objects("s3", "bucket", "", None, options.items(), NoSync())
        assert isinstance(store._store.store, S3Store)
        with pytest.raises(StoreUnavailable):
            await store.get("one")

        # Then it comes whole where its bytes are waited for, and not where they stay out
        assert await store.get_slowly("one", silence_s=30) == b"y" * 20 * 70_000
        with pytest.raises(TimeoutError):
            await store.get_slowly("one", silence_s=0.001)

        # And so does one that is read to be checked
        assert await stored_digest(store, "one") == await digest_of(b"y" * 20 * 70_000)
        monkeypatch.setattr(objects, "_SILENCE_S", 0.001)
        with pytest.raises(StoreUnavailable, match="reading one: no bytes for"):
            await stored_digest(store, "one")


async def test_a_broker_says_that_a_payload_is_still_being_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "BLOB_WAIT_S", 0.05)
    async with serving((tmp_path / "data").as_uri(), payload_cache_bytes=0) as ingest:
        (large,) = await ingest.send(LARGE)
        SlowStore(monkeypatch)
        async with running(tmp_path / "data", ingest=REAL) as rig:
            reads = Ingests(rig.service.channels)
            with pytest.raises(Unavailable) as refused:
                await reads.read(0, [large])
            assert refused.value.reason == "PAYLOAD_SLOW"
