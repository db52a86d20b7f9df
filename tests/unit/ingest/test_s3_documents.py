"""Documents of S3 stores while they are read."""

from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus
from typing import Any

import pytest

from services.ingest.events import s3_events
from services.ingest.events.s3_events import S3Events
from slatemq.events.s3 import Notifications, read_notifications
from tests.integration.waiting import WAIT_SECONDS
from tests.unit.events.test_s3 import document, record

UNUSED: Any = None
"""Nothing of these is published."""


async def test_the_loop_turns_while_a_document_is_read_and_its_bytes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_turned = threading.Event()

    def read_once_it_turned(body: bytes, event_bytes_max: int) -> Notifications:
        assert has_turned.wait(WAIT_SECONDS)
        return read_notifications(body, event_bytes_max)

    monkeypatch.setattr(s3_events, "read_notifications", read_once_it_turned)
    events = S3Events(UNUSED, UNUSED, lambda: "", 1 << 20)
    body = document(*[record("ObjectTagging:Put")] * 100)

    # When a document is being read, then the loop turns, and the document counts
    answering = asyncio.ensure_future(events.post.answer(body))
    await asyncio.sleep(0)
    assert events.held_bytes == len(body)
    has_turned.set()
    reply = await answering
    assert reply.status == HTTPStatus.OK
    assert events.held_bytes == 0
