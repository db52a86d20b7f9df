"""Stored messages, out of the runs in which an ingest returns them."""

from __future__ import annotations

from collections.abc import Iterable

from slatemq.v1.ingest_pb2 import StoredRun
from slatemq.v1.message_pb2 import Message


def messages_of(runs: Iterable[StoredRun]) -> list[Message]:
    """The messages of these runs, in order, each by itself."""
    messages = []
    for run in runs:
        for message_id, payload in zip(run.message_ids, run.payloads, strict=True):
            message = Message.FromString(run.common)
            message.message_id, message.payload = message_id, payload
            messages.append(message)
    return messages
