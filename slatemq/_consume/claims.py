"""One claim from one partition, of which nothing is lost where its caller is cancelled.

A response that crosses with the end of its call is lost: its messages keep their leases, and the
attempt. So the call goes on. A wait is ended at the broker (StopClaim); what the claim brings is
released, uncounted. Nor does a slow transfer end the call: pings find out that a broker is silent,
and a repeat would claim other messages.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from math import inf
from typing import Any, Final

import grpc

from slatemq._consume.delivered import Claimed, claimed_of
from slatemq._consume.finishing import Finisher
from slatemq._rpc.peers import ATTEMPT_S, NOT_REACHED, errors_translated, translated
from slatemq._rpc.queue_locations import QueueLocations
from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY
from slatemq.errors import INGEST_DOWN, DeadlineExceeded, SlateMQError, Unavailable
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
    """A claim from a partition; while its broker is down repeated, for `call_s` beyond its wait.

    `on_failure` gets what ends each try, and DeadlineExceeded for one that has no answer for long;
    that one goes on, since what comes slowly would be lost.
    """
    claiming = _Claim(locations, finisher, request, on_failure, partition, on_failure)
    return await claiming.run(call_s)


async def claim_once(
    locations: QueueLocations,
    finisher: Finisher,
    request: consumer_pb2.ClaimRequest,
    call_s: float,
    on_failure: Callable[[SlateMQError], None] | None = None,
    partition: int = 0,
    on_lost: Callable[[SlateMQError], None] | None = None,
) -> Claimed:
    """As `claim`, for a caller to whom no messages means that none were claimed.

    Raises Unavailable (INGEST_DOWN) where the broker has waited for an ingest as long as the claim
    wants to; and why an answer was lost, with perhaps messages, where the repeats bring none.
    `on_lost` gets that, also where the repeats fail.
    """

    def check(error: SlateMQError) -> None:
        if error.reason == INGEST_DOWN:
            raise error
        if on_failure is not None:
            on_failure(error)

    claiming = _Claim(locations, finisher, request, check, partition)
    try:
        claimed = await claiming.run(call_s)
    finally:
        if claiming.lost is not None and on_lost is not None:
            on_lost(claiming.lost)
    if claiming.lost is not None and not claimed.payloads:
        raise claiming.lost
    return claimed


class _Claim:
    lost: SlateMQError | None = None
    """Why a try, which may have claimed messages, has no answer."""

    def __init__(
        self,
        locations: QueueLocations,
        finisher: Finisher,
        request: consumer_pb2.ClaimRequest,
        on_failure: Callable[[SlateMQError], None] | None,
        partition: int,
        on_silence: Callable[[SlateMQError], None] | None = None,
    ) -> None:
        self._locations = locations
        self._finisher = finisher
        self._request = consumer_pb2.ClaimRequest()
        self._request.CopyFrom(request)  # The caller may use it again.
        self._on_failure = on_failure
        self._on_silence = on_silence
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
                attempt_s=inf,
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
        noting: asyncio.TimerHandle | None = None
        if self._on_silence is not None:
            silence_s = self._request.wait_ms / 1000 + ATTEMPT_S
            noting = asyncio.get_running_loop().call_later(silence_s, self._note_silence)
        try:
            response = await self._stub.Claim(
                self._request, timeout=None if timeout == inf else timeout, metadata=metadata
            )
        except grpc.RpcError as error:
            problem = translated(error, self._locations.peers.process("broker", shard))
            if problem.reason not in NOT_REACHED and not _is_answered(error):
                self.lost = problem
            raise problem from None
        finally:
            if noting is not None:
                noting.cancel()
            self._stub = None
        self._locations.note_count(self._request.queue_id, response.partitions_count)
        return claimed_of(response)

    def _note_silence(self) -> None:
        """Pings are answered also where the broker hangs; its answer may still come."""
        if self._on_silence is not None and not self._is_given_up:
            self._on_silence(DeadlineExceeded("the broker has not answered a claim yet"))

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


def _is_answered(call: Any) -> bool:
    """Whether the server itself refused a call, and not gRPC."""
    return any(key == STATUS_DETAILS_KEY for key, _ in call.trailing_metadata() or ())
