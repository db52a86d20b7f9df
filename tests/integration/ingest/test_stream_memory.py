"""What a publish stream holds of the memory for large requests."""

from __future__ import annotations

import pytest

from libs.serving.requests.reading import RequestReader
from services.ingest.rpc import ingest as servicer
from tests.integration.ingest.server import message
from tests.integration.ingest.test_streams import Stream, server


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
