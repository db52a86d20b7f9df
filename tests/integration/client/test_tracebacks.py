"""What a program that does not catch an error prints: one traceback, without what gRPC raised."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

import slatemq
from slatemq.errors import InvalidArgument, NotFound, SlateMQError, Unavailable
from slatemq.models import OutgoingMessage
from tests.integration.client.peers import Instance


async def _consume(client: slatemq.Client) -> object:
    async with client.consume("q") as messages:
        return await anext(messages)


async def _consume_batches(client: slatemq.Client) -> object:
    async with client.consume_batches("q") as batches:
        return await anext(batches)


async def _list(client: slatemq.Client) -> object:
    return [one async for one in client.list_entries("q", cast("Any", "nostate"))]


def test_errors_among_the_responses_of_streams_are_the_only_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(client: slatemq.Client) -> list[Any]:
        return [1 / 0 async for _ in client.watch_queues()]

    async def program() -> list[Any]:
        async with Instance() as running, slatemq.connect(running.endpoint) as client:
            failing = [fail(client) for _ in range(20)]
            return list(await asyncio.gather(*failing, return_exceptions=True))

    # The errors keep the streams until the loop ends, which closes them in any order.
    errors = asyncio.run(program())

    assert {type(error) for error in errors} == {ZeroDivisionError}
    assert caplog.messages == []


Call = Callable[[slatemq.Client], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda client: client.claim("q"), NotFound),
        (_consume, NotFound),
        (_consume_batches, NotFound),
        (_list, InvalidArgument),
        (lambda client: client.publish("\ud800"), InvalidArgument),
        (lambda client: client.publish(b"", {"n": cast("Any", 1)}), InvalidArgument),
        (lambda client: client.claim("q", cast("Any", "1")), InvalidArgument),
        (lambda client: client.publish_many(["fine", "\ud800"]), InvalidArgument),
        (lambda client: client.publish(b"lost"), Unavailable),
        (lambda client: client.publish_batch([OutgoingMessage(b"lost")], shard=0), Unavailable),
    ],
)
async def test_an_error_has_no_cause_that_says_the_same_in_grpcs_words(
    instance: Instance, call: Call, kind: type[SlateMQError]
) -> None:
    instance.broker.exists = False
    instance.ingest.before.extend([Unavailable("it starts", retry_after_ms=1)] * 1000)
    async with slatemq.connect(instance.endpoint, call_timeout=2) as client:
        with pytest.raises(kind) as raised:
            await call(client)

    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback") == 1, printed
    assert "grpc.aio._call.AioRpcError" not in printed


async def test_an_address_where_nothing_listens_is_one_traceback() -> None:
    with pytest.raises(Unavailable) as raised:
        await slatemq.connect("127.0.0.1:1").__aenter__()

    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback") == 1, printed
    assert "connection refused: no process listens there" in printed
