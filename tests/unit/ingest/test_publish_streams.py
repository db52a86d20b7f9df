"""A stream of publishes, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from services.ingest.batches import Accepted
from services.ingest.rpc.ingest import _Stream
from slatemq.errors import Unavailable
from slatemq.v1 import ingest_pb2


async def test_a_request_that_is_judged_when_the_stream_ends_is_answered() -> None:
    judging = asyncio.Event()

    async def accept(_: ingest_pb2.PublishRequest) -> Accepted:
        judging.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def requests() -> AsyncGenerator[ingest_pb2.PublishStreamRequest, bool]:
        yield ingest_pb2.PublishStreamRequest(number=7)

    unused: Any = None
    stream = _Stream(unused, accept, unused, unused, publishes_all=True)
    stream.begin(requests())
    await judging.wait()

    stream.end(Unavailable("the service is stopping"))

    async with asyncio.timeout(120):
        (answer,) = await stream.next()
        assert await stream.next() == []
    assert answer.number == 7
    assert answer.error.code
