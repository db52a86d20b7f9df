"""Reading stored messages by their IDs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from slatemq._admin.entry_models import StoredMessage, stored_message
from slatemq._checks import check_whole, iterable
from slatemq._rpc.queue_locations import Calls
from slatemq._rpc.stored_runs import messages_of
from slatemq.errors import DataLoss, DeadlineExceeded
from slatemq.v1.ingest_pb2 import BatchGetMessagesRequest
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub

__all__ = ["MessageReads"]

SHARD_BITS: Final = 48
"""The lower bits of a message ID: its number within the ingest shard that the upper ones name."""

REQUEST_IDS_MAX: Final = 1_000

DAMAGED_IDS: Final = "message_ids"
"""The metadata of the error that names damaged messages, separated by commas."""

PAUSE_S: Final = 0.05
"""The pause after a response without payloads: the ingest has waited for them already."""


class MessageReads(Calls):
    """Reading stored messages by their IDs; a part of the client."""

    async def read_messages(self, message_ids: Iterable[int]) -> dict[int, StoredMessage]:
        """The messages with these IDs, headers and payload; without those that were removed.

        Returns a message past its retention while it is stored. Keeps all payloads in memory at
        once. Raises DeadlineExceeded when a payload cannot be read in time; DataLoss where stored
        messages are damaged: `metadata["message_ids"]` names them all, separated by commas; read
        the others without them.
        """
        by_shard: dict[int, list[int]] = {}
        given = iterable("message_ids", "whole numbers", message_ids)
        for place, message_id in enumerate(dict.fromkeys(given)):
            check_whole(f"message_ids[{place}]", message_id, 1)
            by_shard.setdefault(message_id >> SHARD_BITS, []).append(message_id)
        found: dict[int, StoredMessage] = {}
        damaged: list[int] = []
        for shard, ids in by_shard.items():
            for begin in range(0, len(ids), REQUEST_IDS_MAX):
                await self._read(shard, ids[begin : begin + REQUEST_IDS_MAX], found, damaged)
        if damaged:
            others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise DataLoss(
                f"message {damaged[0]}{others}: the stored bytes are damaged",
                metadata={DAMAGED_IDS: ",".join(map(str, damaged))},
            )
        return found

    async def _read(
        self, shard: int, ids: Sequence[int], found: dict[int, StoredMessage], damaged: list[int]
    ) -> None:
        """Asks until each is found or missing: one response has up to 32 MiB of payloads."""
        left = list(ids)
        until = time.monotonic() + self._peers.call_s
        while left:
            answer = await self._peers.ask(
                partial(self._peers.ingest, shard),
                lambda channel: IngestServiceStub(channel).BatchGetMessages,
                BatchGetMessagesRequest(message_ids=left),
            )
            settled = set(answer.missing_ids)
            for message in messages_of(answer.runs):
                found[message.message_id] = stored_message(message)
                settled.add(message.message_id)
            damaged += answer.damaged_ids
            if settled:
                until = time.monotonic() + self._peers.call_s
            elif time.monotonic() > until:
                raise DeadlineExceeded(f"the payload of message {left[0]} takes too long to read")
            else:
                await asyncio.sleep(PAUSE_S)
            left = [message_id for message_id in left if message_id not in settled]
