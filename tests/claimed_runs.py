"""Runs of claimed messages, read as the proto tells."""

from __future__ import annotations

from slatemq.v1.consumer_pb2 import ClaimedMessage, ClaimedRun, ClaimResponse, ConsumeResponse
from slatemq.v1.message_pb2 import Message


def messages_of(answer: ClaimResponse | ConsumeResponse) -> list[ClaimedMessage]:
    """All messages of an answer, each for itself."""
    return [*answer.messages, *(message for run in answer.runs for message in each_of(run))]


def each_of(run: ClaimedRun) -> list[ClaimedMessage]:
    """The messages of a run."""
    assert len(run.message_ids) == len(run.payloads) > 0
    start, digits = run.lease_token[:-2], run.lease_token[-2:]
    each = []
    for at, (message_id, payload) in enumerate(zip(run.message_ids, run.payloads, strict=True)):
        assert int(digits, 16) + at < 256
        message = Message(message_id=message_id, payload=payload)
        message.MergeFrom(run.common)
        each.append(
            ClaimedMessage(
                message=message,
                lease_token=f"{start}{int(digits, 16) + at:02x}",
                lease_deadline_ms=run.lease_deadline_ms,
                attempts_count=run.attempts_count,
                priority=run.priority,
                lease_ms=run.lease_ms,
            )
        )
    return each
