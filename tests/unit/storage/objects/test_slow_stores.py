"""Objects that are put at once: a large one may take longer than an answer about a small one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from libs.storage.errors import StoreUnavailable
from libs.storage.objects import small_objects
from libs.storage.objects.durability import NoSync
from libs.storage.objects.small_objects import Objects, open_objects

ANSWER_S = 1
LARGE = bytes(2 << 20)


@asynccontextmanager
async def slow_store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Objects]:
    """An S3 server that takes an object whole, and answers later than it is waited for."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            found = re.search(r"content-length: (\d+)", head)
            await reader.readexactly(int(found[1]) if found else 0)
            await asyncio.sleep(2 * ANSWER_S)
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 0\r\netag: "a"\r\n\r\n')
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The client waits no longer.
        finally:
            writer.close()

    monkeypatch.setattr(small_objects, "_ATTEMPT_S", ANSWER_S)
    monkeypatch.setattr(small_objects, "_RETRIES", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = {"endpoint": endpoint, "region": "us-east-1", "allow_http": "true"}
        yield open_objects("s3", "bucket", "", None, options.items(), NoSync())


async def test_a_large_object_that_must_be_the_first_has_time_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with slow_store(monkeypatch) as objects:
        assert await objects.put_if_absent("part", LARGE)

        with pytest.raises(StoreUnavailable):
            await objects.put_if_absent("claim", b"{}")


async def test_what_takes_too_long_for_its_size_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(small_objects, "_COPY_S", 0)
    monkeypatch.setattr(small_objects, "_COPIED_BYTES_A_S", len(LARGE))
    async with slow_store(monkeypatch) as objects:
        with pytest.raises(StoreUnavailable, match="creating part: too slow"):
            await objects.put_if_absent("part", LARGE)
