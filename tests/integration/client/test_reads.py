"""Reading stored messages by ID through the client, from a real ingest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import slatemq
from libs.serving.telemetry import Telemetry
from services.ingest.config import IngestConfig
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.ingest.server import Server


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = Server(IngestConfig(root="memory:///"), Telemetry())
    await server.start()
    yield server.address
    await server.stop()


async def test_messages_are_read_by_id_however_much_they_hold_together(
    address: str,
) -> None:
    async with slatemq.connect(address) as client:
        # Given messages that one answer cannot hold
        payloads = [b"%d" % number * (12 << 20) for number in range(3)]
        ids = [await client.publish(payload, {"n": str(len(payload))}) for payload in payloads]
        small = await client.publish(b"small", {"queue": "q"}, retention=60)

        # Then each is read, and one that is not stored is left out
        found = await client.read_messages([small, *ids, ids[0]])
        assert [found[one].payload == payload for one, payload in zip(ids, payloads, strict=True)]
        read = found[small]
        assert (read.message_id, read.payload, dict(read.headers)) == (
            small,
            b"small",
            {"queue": "q"},
        )
        assert (read.retention_s, read.received_at_ms) == (60, small.received_at_ms)
        assert len(found) == 4
        assert await client.read_messages([]) == {}


async def test_what_is_not_stored_is_an_error_and_no_hang(address: str) -> None:
    async with slatemq.connect(address, call_timeout=2) as client:
        message_id = await client.publish(b"x")
        with pytest.raises(Unavailable, match="no ingest 1 is known"):
            await client.read_messages([1 << 48 | 1])
        with pytest.raises(Unavailable) as caught:
            await client.read_messages([message_id + 1])
        assert caught.value.reason == "NOT_YET_STORED"
        with pytest.raises(InvalidArgument, match="at least 1"):
            await client.read_messages([0])
