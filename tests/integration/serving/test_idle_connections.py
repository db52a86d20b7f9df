"""Connections without a call: those of clients are closed, those with a stream stay."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from libs.serving import limits
from tests.integration.serving.echo_service import METHODS, EchoService
from tests.integration.serving.test_server import running

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a connection of HTTP/2 begins, with settings that change nothing."""


async def test_an_idle_connection_is_closed_and_one_with_a_silent_stream_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CONNECTION_IDLE_MS_MAX", 200)
    service = EchoService()
    async with running(service) as stack:
        await stack.until_healthy()
        # Given a stream that says nothing
        method: Any = stack.channel.unary_stream(METHODS["us"], StringValue.SerializeToString)
        stream = method(StringValue(value="first wait last"))
        assert StringValue.FromString(await stream.read()).value == "first"
        await service.servicer.waiting.wait()

        # When connections that came later were idle for so long that they are closed
        host, _, port = service.steps[0].removeprefix("start ").rpartition(":")
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            with closing(writer):
                writer.write(PREFACE)
                said_last = b""
                while data := await reader.read(1 << 16):
                    said_last += data
                assert b"connection idle" in said_last  # Not for a ping that was not answered.

        # Then the stream goes on
        service.servicer.release.set()
        said = [StringValue.FromString(await stream.read()).value for _ in range(2)]
        assert said == ["wait", "last"]
