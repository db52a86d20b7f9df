"""Editing a delayed message: while its content is replaced at ingest, nobody gets it here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.broker.delivery import Delivery
from services.broker.owner import ShardOwner
from services.broker.payloads import Ingests, Payloads
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1.entry_pb2 import EditMessageRequest
from slatemq.v1.ingest_pb2 import ReplaceMessageRequest

WRONG_STATE: Final = "WRONG_STATE"

Find = Callable[[int], int]
"""A command that finds an available or delayed entry, given the time: when it is visible (0 = at
once). Raises what the handle gives, and Needs."""


def replacement(request: EditMessageRequest) -> ReplaceMessageRequest:
    """What ingest is asked, but for the message ID; InvalidArgument where nothing would change."""
    keeps_payload = not request.HasField("payload")
    if keeps_payload and not request.replace_headers:
        raise InvalidArgument("payload", "give a payload, or headers with replace_headers")
    if request.headers and not request.replace_headers:
        raise InvalidArgument("headers", "are given without replace_headers")
    return ReplaceMessageRequest(
        etag=request.etag,
        payload=request.payload,
        headers=request.headers,
        keep_payload=keeps_payload,
        keep_headers=not request.replace_headers,
    )


class MessageEditor:
    """Edits messages of one broker shard's queues."""

    def __init__(
        self, owner: ShardOwner, delivery: Delivery, payloads: Payloads, ingests: Ingests
    ) -> None:
        """Keep messages back from this delivery, and forget their payloads there."""
        self._owner = owner
        self._delivery = delivery
        self._payloads = payloads
        self._ingests = ingests
        self._running: set[asyncio.Task[str]] = set()

    async def edit(self, wanted: ReplaceMessageRequest, find: Find) -> str:
        """Replaces the message of an entry that is delayed; gives its new etag.

        Raises what `find` does, FailedPrecondition (WRONG_STATE) where it is not delayed, what
        ingest refuses, and Unavailable.
        """
        task = asyncio.create_task(self._edit(wanted, find))
        self._running.add(task)
        task.add_done_callback(self._ended)
        # Whoever gives up waiting: what is on its way at ingest may still happen.
        return await asyncio.shield(task)

    async def _edit(self, wanted: ReplaceMessageRequest, find: Find) -> str:
        def check(now_ms: int) -> None:
            if find(now_ms) <= now_ms:
                raise FailedPrecondition(
                    WRONG_STATE,
                    f"message {wanted.message_id} is not delayed",
                    subject=str(wanted.message_id),
                )

        # First kept back, then looked at: nobody can claim it in between.
        with self._delivery.keeping_back(wanted.message_id):
            await self._owner.run(check)
            try:
                etag = await self._ingests.replace(wanted)
            finally:
                self._payloads.forget(wanted.message_id)
        await self._owner.durable()
        return etag

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone
