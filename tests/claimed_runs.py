"""Runs of claimed messages, read as the proto tells."""

from __future__ import annotations

from typing import NamedTuple

from slatemq.v1.consumer_pb2 import ClaimedRun, ClaimResponse, ConsumeResponse
from slatemq.v1.message_pb2 import Message


class ClaimedMessage(NamedTuple):
    """A message of a run, by itself."""

    message: Message
    lease_token: str
    lease_deadline_ms: int = 0
    attempts_count: int = 0
    priority: int = 0
    lease_ms: int = 0


def messages_of(answer: ClaimResponse | ConsumeResponse) -> list[ClaimedMessage]:
    """All messages of an answer, each by itself."""
    return [message for run in answer.runs for message in each_of(run)]


def each_of(run: ClaimedRun) -> list[ClaimedMessage]:
    """The messages of a run."""
    assert 256 >= len(run.message_ids) == len(run.payloads) > 0
    start, digits = run.lease_token[:-2], run.lease_token[-2:]
    each = []
    for at, (message_id, payload) in enumerate(zip(run.message_ids, run.payloads, strict=True)):
        assert int(digits, 16) + at < 256
        message = Message(message_id=message_id, payload=payload)
        message.MergeFrom(run.common)
        each.append(
            ClaimedMessage(
                message,
                f"{start}{int(digits, 16) + at:02x}",
                run.lease_deadline_ms,
                run.attempts_count,
                run.priority,
                run.lease_ms,
            )
        )
    return each
