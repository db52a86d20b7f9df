"""One claim from one partition, of which nothing is lost where its caller is cancelled.

A response that crosses with the end of its call is lost: its messages keep their leases, and the
attempt. So the call goes on. A wait is ended at the broker (StopClaim); what the claim brings is
released, uncounted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Final

from slatemq._consume.delivered import Claimed, claimed_of
from slatemq._consume.finishing import Finisher
from slatemq._rpc.peers import ATTEMPT_S, errors_translated
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import INGEST_DOWN, SlateMQError, Unavailable
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

STOP_S: Final = 0.5
"""How soon a wait is ended again: the claim may get to the broker after its end."""


async def claim(
    locations: QueueLocations,
    finisher: Finisher,
    request: consumer_pb2.ClaimRequest,
    call_s: float,
    on_failure: Callable[[SlateMQError], None] | None = None,
    partition: int = 0,
) -> Claimed:
    """A claim from a partition; while its broker is down repeated, for `call_s` beyond its wait."""
    return await _Claim(locations, finisher, request, on_failure, partition).run(call_s)


class _Claim:
    def __init__(
        self,
        locations: QueueLocations,
        finisher: Finisher,
        request: consumer_pb2.ClaimRequest,
        on_failure: Callable[[SlateMQError], None] | None,
        partition: int,
    ) -> None:
        self._locations = locations
        self._finisher = finisher
        self._request = consumer_pb2.ClaimRequest()
        self._request.CopyFrom(request)  # The caller may use it again.
        self._on_failure = on_failure
        self._partition = partition
        self._is_given_up = False
        self._stub: Any = None  # That the call is under way on.
        if request.wait_ms:
            self._request.claim_id = secrets.token_hex(8)

    async def run(self, call_s: float) -> Claimed:
        wait_s = self._request.wait_ms / 1000
        calling = asyncio.create_task(
            self._locations.call(
                self._request.queue_id,
                self._attempt,
                self._partition,
                call_s=call_s,
                attempt_s=ATTEMPT_S + wait_s,
                wait_s=wait_s,
                on_failure=self._failed,
            )
        )
        try:
            await asyncio.wait([calling])
        except asyncio.CancelledError:
            self._is_given_up = True
            self._finisher.keep(asyncio.create_task(self._release(calling)))
            raise
        return calling.result()

    async def _attempt(self, shard: int, timeout: float) -> Claimed:
        if self._is_given_up:
            raise Unavailable("the caller of the claim has left")
        channel = await self._locations.peers.broker(shard)
        metadata = self._locations.naming(self._request.queue_id, self._partition)
        self._stub = consumer_pb2_grpc.ConsumerServiceStub(channel)
        try:
            # One whose answer got lost holds messages until their leases end: that is all the harm.
            response = await self._stub.Claim(self._request, timeout=timeout, metadata=metadata)
        finally:
            self._stub = None
        self._locations.note_count(self._request.queue_id, response.partitions_count)
        return claimed_of(response)

    def _failed(self, error: SlateMQError) -> None:
        if self._is_given_up:
            raise error
        if self._on_failure is not None:
            self._on_failure(error)

    async def _release(self, calling: asyncio.Task[Claimed]) -> None:
        """Ends a claim whose caller has left, and releases what it brings."""
        try:
            while not calling.done():
                if self._stub is None or not await self._stop():
                    calling.cancel()  # No call is under way, or none that brings anything.
                await asyncio.wait([calling], timeout=STOP_S)
        finally:
            calling.cancel()
        if not calling.cancelled() and calling.exception() is None:
            self._finisher.release_soon(calling.result().lease_tokens)

    async def _stop(self) -> bool:
        """Has the broker end the wait, where there is one; False where it cannot."""
        if not self._request.claim_id:
            return True
        request = consumer_pb2.StopClaimRequest(
            queue_id=self._request.queue_id, claim_id=self._request.claim_id
        )
        try:
            with errors_translated():
                await self._stub.StopClaim(request, timeout=ATTEMPT_S)
        except SlateMQError:
            return False
        return True


def raise_ingest_down(error: SlateMQError) -> None:
    """For one claim: the broker has waited for the ingest as long as the claim wants to."""
    if error.reason == INGEST_DOWN:
        raise error
