"""What a client makes of a topology without brokers: of queues it says nothing."""

from __future__ import annotations

import asyncio

import pytest

import slatemq
from slatemq.errors import Unavailable
from tests.integration.client.peers import Instance

BROKERS_COME_S = 0.3


async def test_no_queue_is_absent_where_no_broker_is_known() -> None:
    async with Instance() as instance:
        del instance.directory.response.brokers[:]
        async with slatemq.connect(instance.endpoint, call_timeout=1) as client:
            for asked in (
                client.get_queue("q"),
                anext(aiter(client.list_queues())),
                client.claim("q"),
            ):
                with pytest.raises(Unavailable, match="no broker is known"):
                    await asked


async def test_a_call_finds_the_broker_that_is_known_after_a_while() -> None:
    async with Instance() as instance:
        (address,) = [one.address for one in instance.directory.response.brokers]
        del instance.directory.response.brokers[:]
        async with slatemq.connect(instance.endpoint) as client:
            claiming = asyncio.create_task(client.claim("q"))
            await asyncio.sleep(BROKERS_COME_S)
            instance.directory.put("brokers", 0, address)
            assert await claiming == []
