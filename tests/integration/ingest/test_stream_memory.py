"""What a publish stream holds of the memory for large requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from libs.access import current
from libs.serving.requests.reading import RequestReader
from services.ingest.rpc import ingest as servicer
from slatemq._rpc.rpc_status import from_status
from slatemq.errors import SlateMQError
from slatemq.v1.ingest_pb2 import PublishRequest, PublishStreamRequest
from tests.integration.ingest.server import message
from tests.integration.ingest.test_publish_limits import limited, limited_by
from tests.integration.ingest.test_streams import Stream, server

pytestmark = pytest.mark.usefixtures("cheap_hashes")


async def test_a_stream_whose_answers_are_not_read_holds_no_share_of_the_request_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer, "UNANSWERED_MAX", 1)
    seen: list[tuple[str, int]] = []
    reserve, release = RequestReader._reserve, RequestReader.release
    async with server(commit_interval_ms="500") as (running, ingest):
        stream = Stream(ingest)
        await stream.send(message(b"first"))
        await stream.ids(1)
        (served,) = running.servicer._streams

        async def noted_reserve(reader: RequestReader, size_bytes: int) -> None:
            seen.append(("reserved", served._unanswered))
            await reserve(reader, size_bytes)

        def noted_release(reader: RequestReader, size_bytes: int) -> None:
            seen.append(("released", served._unanswered))
            release(reader, size_bytes)

        monkeypatch.setattr(RequestReader, "_reserve", noted_reserve)
        monkeypatch.setattr(RequestReader, "release", noted_release)
        for _ in range(2):
            await stream.send(message(b"x" * (1 << 20)))
        await stream.ids(2)

        assert seen == [("reserved", 0), ("released", 1)] * 2


async def test_a_refused_request_keeps_no_memory_while_its_stream_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = list[RequestReader]()
    kept = list[tuple[int, bool]]()
    reserve, hold_back = RequestReader._reserve, current.hold_back

    async def noted_reserve(reader: RequestReader, size_bytes: int) -> None:
        readers.append(reader)
        await reserve(reader, size_bytes)

    async def noted_hold_back(error: SlateMQError, *, is_publish: bool) -> None:
        # The frames of an error would keep the request.
        kept.append((readers[-1]._budget.used_bytes, error.__traceback__ is not None))
        await hold_back(error, is_publish=is_publish)

    monkeypatch.setattr(RequestReader, "_reserve", noted_reserve)
    monkeypatch.setattr(servicer, "hold_back", noted_hold_back)
    # Given a principal over its limit, on a stream of which one request may be unanswered
    monkeypatch.setattr(servicer, "UNANSWERED_MAX", 1)
    async with limited(tmp_path, publish_bytes_per_s=1000) as made:
        await made.publish("shop", 1, b"", note="x" * 60_000)
        stream = made.stub.PublishStream(metadata=made.proofs["shop"])
        publish = PublishRequest(runs=[message(b"x" * (1 << 20), queue="q")])

        async def send() -> None:
            for number in (1, 2, 3):
                await stream.write(PublishStreamRequest(number=number, publish=publish))

        # When it sends large requests all the same
        sending = asyncio.create_task(send())
        answered = list[Any]()
        async with asyncio.timeout(60):
            while len(answered) < 3:
                answered += (await stream.read()).answers
            await sending

        # Then each is refused, and keeps nothing while the stream is held back
        assert [one.number for one in answered] == [1, 2, 3]
        for one in answered:
            limited_by(from_status(one.error), "publish_bytes_per_s")
        assert kept == [(0, False)] * 3
        stream.cancel()
