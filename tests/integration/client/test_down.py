"""Calls to processes that are down: their errors say which one, in plain words."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import slatemq
from slatemq.errors import SlateMQError
from tests.integration.client.peers import Instance

RAW = re.compile(r"ipv[46]:|last error|all addresses|UNKNOWN|UNAVAILABLE|Socket|Failed to")
"""What gRPC says."""

LEASE = "0-9d934e94a7438e3a"

Call = Callable[[slatemq.Client], Awaitable[Any]]


async def only_result(results: Awaitable[list[SlateMQError | Any]]) -> None:
    (error,) = await results
    raise error


OF_THE_BROKER: dict[str, Call] = {
    "claim": lambda client: client.claim("q"),
    "a claim that waits": lambda client: client.claim("q", wait=1),
    "ack": lambda client: only_result(client.ack([LEASE])),
    "nack": lambda client: only_result(client.nack([LEASE])),
    "extend": lambda client: only_result(client.extend([LEASE])),
    "execute": lambda client: client.execute([slatemq.Push("q", b"x")]),
    "a queue": lambda client: client.get_queue("q"),
    "pause": lambda client: client.pause_queue("q"),
    "create": lambda client: client.create_queue("q"),
    "delete": lambda client: client.delete_queue("q"),
    "purge": lambda client: client.purge_queue("q"),
    "a list": lambda client: anext(client.list_entries("q", "available")),
    "a redrive": lambda client: client.start_redrive("q"),
    "all queues": lambda client: anext(client.list_queues()),
}


@pytest.mark.parametrize("name", OF_THE_BROKER)
async def test_an_error_names_the_broker_that_is_down(instance: Instance, name: str) -> None:
    # Given a broker whose address is known, and where nothing listens
    address = instance.directory.response.brokers[0].address
    async with slatemq.connect(instance.endpoint, call_timeout=0.5) as client:
        await instance.servers[-1].stop(None)
        # When it is called
        with pytest.raises(SlateMQError) as raised:
            await OF_THE_BROKER[name](client)
    # Then the error says so
    message = raised.value.message
    assert f"broker 0 at {address} cannot be reached: connection refused" in message
    assert not RAW.search(message), message


OF_THE_INGEST: dict[str, Call] = {
    "publish": lambda client: client.publish(b"x", {"queue": "q"}),
    "a batch": lambda client: client.publish_many([slatemq.OutgoingMessage(b"x", {})]),
}


@pytest.mark.parametrize("name", OF_THE_INGEST)
async def test_an_error_names_the_ingest_that_is_down(instance: Instance, name: str) -> None:
    address = instance.directory.response.ingests[0].address
    async with slatemq.connect(instance.endpoint, call_timeout=0.5) as client:
        await instance.servers[1].stop(None)
        with pytest.raises(SlateMQError) as raised:
            await OF_THE_INGEST[name](client)
    message = raised.value.message
    assert f"ingest 0 at {address} cannot be reached: connection refused" in message
    assert not RAW.search(message), message


async def test_an_error_names_the_broker_that_ended_under_the_call(instance: Instance) -> None:
    address = instance.directory.response.brokers[0].address
    async with (
        slatemq.connect(instance.endpoint, call_timeout=0.5) as client,
        client.consume("q", outage_timeout=0.1) as messages,
    ):
        await instance.servers[-1].stop(None)
        with pytest.raises(SlateMQError) as raised:
            await anext(messages)
    message = raised.value.message
    assert f"broker 0 at {address}" in message
    assert not RAW.search(message), message


async def test_an_endpoint_where_nothing_listens_is_named_once() -> None:
    with pytest.raises(SlateMQError) as raised:
        await slatemq.connect("127.0.0.1:1", call_timeout=0.5).__aenter__()
    assert raised.value.message == (
        "127.0.0.1:1 is not reachable: connection refused: no process listens there"
    )
