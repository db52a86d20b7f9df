"""Messages read from an ingest, each by itself."""

from __future__ import annotations

from typing import NamedTuple

from libs.storage.records.metadata import MessageMetadata
from services.broker.delivery.message_cache import CachedMessage
from services.ingest.read.message_runs import ResponseBudget
from services.ingest.shard import Shard
from slatemq._rpc.stored_runs import messages_of
from slatemq.v1.ingest_pb2 import BatchGetMessagesResponse
from slatemq.v1.message_pb2 import Message


class StoredMessages(NamedTuple):
    """A response, its runs taken apart."""

    messages: list[Message]
    etags: list[str]
    missing_ids: list[int]
    damaged_ids: list[int]
    slow_ids: list[int]

    @classmethod
    def of(cls, response: BatchGetMessagesResponse) -> StoredMessages:
        for run in response.runs:
            assert len(run.message_ids) == len(run.payloads) > 0
            assert len(run.etags) in (0, len(run.payloads))
            common = Message.FromString(run.common)
            assert (common.message_id, common.payload) == (0, b"")
        return cls(
            messages_of(response.runs),
            [etag for run in response.runs for etag in run.etags],
            list(response.missing_ids),
            list(response.damaged_ids),
            list(response.slow_ids),
        )


async def read_messages(
    shard: Shard, *ids: int, bytes_max: int = 1 << 30, with_etags: bool = False
) -> StoredMessages:
    """Read from an opened shard."""
    budget = ResponseBudget(bytes_max, bytes_max)
    result = await shard.reader.read(ids, budget, with_etags=with_etags)
    return StoredMessages.of(BatchGetMessagesResponse.FromString(result.encode()))


def to_message(metadata: MessageMetadata, payload: bytes) -> Message:
    """A message as consumers receive it."""
    return Message(
        message_id=metadata.message_id,
        payload=payload,
        headers=metadata.headers,
        created_at_ms=metadata.created_at_ms,
        received_at_ms=metadata.received_at_ms,
        retention_s=metadata.retention_s,
    )


def cached(message: Message) -> CachedMessage:
    """A message as a broker keeps it."""
    common = Message()
    common.CopyFrom(message)
    common.ClearField("message_id")
    common.ClearField("payload")
    return message.payload, common.SerializeToString()
