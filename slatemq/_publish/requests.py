"""Sending one request of messages, on the shard that it belongs to, as often as it takes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import grpc.aio

from slatemq._checks import check_text
from slatemq._publish.published import Published, published
from slatemq._publish.wire import Runs
from slatemq._rpc.liveness import Liveness
from slatemq._rpc.outages import OutageWatch
from slatemq._rpc.peers import NOT_TAKEN, Peers, connect_s, connected, errors_translated
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import ingest_pb2

if TYPE_CHECKING:
    from slatemq.otel import Telemetry

ATTEMPT_S = 30.0
"""How long one try of a publish may take: it may have 64 MiB, and a store may be slow."""

REPEAT_S_MAX = 540.0
"""How long a publish is repeated at most: the server knows its request ID for 600 s."""

AWAY_S = 5.0
"""How long new requests avoid a shard that could not be reached, where there are others."""

WRONG_SHARD = "WRONG_SHARD"
"""The server's reason for refusing a dedupe key that falls to another shard by now."""

_METHOD = "/slatemq.v1.IngestService/Publish"
_DECODE = ingest_pb2.PublishResponse.FromString


class StreamAttempt(NamedTuple):
    """How a request fared that was sent on a stream at `began_s`, by the monotonic clock."""

    shard: int
    error: SlateMQError
    began_s: float


class PublishRequests:
    """Sends requests, each under one ID to one shard."""

    def __init__(self, peers: Peers, telemetry: Telemetry | None = None) -> None:
        """Send through these peers."""
        self._peers = peers
        self._telemetry = telemetry
        # Clients begin at different shards, and name their requests differently.
        self._next_shard = random.randrange(1 << 14)
        self._name = uuid4().hex
        self._names = itertools.count()
        self._away: dict[int, float] = {}
        self._outages: dict[int, OutageWatch] = {}
        self._liveness: dict[int, Liveness] = {}

    async def shard_of(self, dedupe_key: str | None) -> int | None:
        """The ingest shard that a message must go to; None without a key: any."""
        if not dedupe_key:
            return None
        check_text("dedupe_key", dedupe_key)

        async def known(_: float) -> list[int]:
            shards = await self._peers.ingest_shards()
            if not shards:
                self._peers.forget()
                raise Unavailable("no ingest is known", reason="PEER_UNKNOWN")
            return shards

        shards = await self._peers.call(known)
        return dedupe_shard(dedupe_key, shards)

    async def places(self, runs: Runs) -> dict[int | None, list[int]]:
        """The places of messages by the shards that they must go to, as the topology is now."""
        await self._peers.fresh_topology()
        by_shard: dict[int | None, list[int]] = {}
        for place, key in enumerate(runs.dedupe_keys or [None] * len(runs)):
            by_shard.setdefault(await self.shard_of(key), []).append(place)
        return by_shard

    async def one_shard(self, runs: Runs) -> int | None:
        """The shard of all keys together. Raises InvalidArgument (MIXED_SHARDS)."""
        chosen: int | None = None
        for place, key in enumerate(runs.dedupe_keys):
            shard = await self.shard_of(key)
            if chosen is not None and shard not in (None, chosen):
                raise InvalidArgument(
                    f"messages[{place}].dedupe_key",
                    f"belongs to ingest shard {shard}, a key before it to {chosen}: "
                    "a batch is stored on one shard",
                    reason="MIXED_SHARDS",
                )
            chosen = shard if chosen is None else chosen
        return chosen

    async def send_batch(
        self, runs: Runs, shard: int | None = None, request_id: str = ""
    ) -> list[Published]:
        """The same as `send`, in a span where there are any."""
        request_id = request_id or self.new_id()
        if self._telemetry is None:
            return await self.send(runs, request_id, shard)
        with self._telemetry.publishing(runs, is_batch=True):
            return await self.send(runs, request_id, shard)

    async def send(
        self,
        runs: Runs,
        request_id: str,
        shard: int | None = None,
        call_s: float | None = None,
        tried: StreamAttempt | None = None,
    ) -> list[Published]:
        """One request, under one ID on one shard, however often it is tried.

        `tried`: the first try, which failed, and the shard that it went to.
        """
        encoded = runs.encoded(request_id)
        chosen = shard if tried is None else tried.shard
        was_sent = False
        full: set[int] = set()

        def failed(at: int, problem: SlateMQError, began_s: float) -> None:
            """Decides where the next try goes: elsewhere only if nothing can have been stored."""
            nonlocal chosen, was_sent
            if isinstance(problem, Unavailable | DeadlineExceeded):
                self._away[at] = time.monotonic() + AWAY_S
                self._outage_of(at).begin(problem, began_s)
                was_sent = was_sent or problem.reason not in NOT_TAKEN
                if shard is None and not was_sent:
                    chosen = None

        async def attempt(timeout: float) -> list[Published]:
            nonlocal chosen, tried
            if tried is not None:
                (at, problem, began_s), tried = tried, None
                failed(at, problem, began_s)
                raise problem
            if chosen is None:
                chosen = await self._choose_shard(full)
            at = chosen
            channel = await self._peers.ingest(at)
            may_leave = shard is None and not was_sent and self.has_several
            liveness = self.liveness(at) if may_leave else None
            began_s = time.monotonic()
            try:
                answer = await _publish(channel, encoded, timeout, connect_s(bound_s), liveness)
            except SlateMQError as error:
                failed(at, error, began_s)
                raise
            self._away.pop(at, None)
            self.liveness(at).answered()
            self.answered(at)
            return published(
                answer.message_ids, answer.received_at_ms, answer.duplicates, answer.task_id
            )

        bound_s = min(self._peers.call_s if call_s is None else call_s, REPEAT_S_MAX)
        while True:
            try:
                return await self._peers.call(attempt, call_s=bound_s, attempt_s=ATTEMPT_S)
            except ResourceExhausted as error:
                # That shard stored nothing and never will; another one may.
                if error.reason != "SHARD_FULL" or shard is not None or chosen is None:
                    raise
                full.add(chosen)
                if full.issuperset(await self._peers.ingest_shards()):
                    raise
                chosen, was_sent = None, False
            except (Unavailable, DeadlineExceeded) as error:
                if shard is None or error.reason == "CLIENT_CLOSED":
                    raise
                raise _waited_for(shard, error) from None

    def answered(self, shard: int) -> None:
        """An ingest has stored a request: it is up."""
        if self._outages and (watch := self._outages.pop(shard, None)) is not None:
            watch.end()

    @property
    def has_several(self) -> bool:
        """Whether a request may go to another ingest shard, as far as it is known."""
        return len(self._peers.ingests_at_hand()) > 1

    def liveness(self, shard: int) -> Liveness:
        """When this ingest shard last answered."""
        liveness = self._liveness.get(shard)
        if liveness is None:
            liveness = self._liveness[shard] = Liveness()
        return liveness

    def _outage_of(self, shard: int) -> OutageWatch:
        watch = self._outages.get(shard)
        if watch is None:
            watch = self._outages[shard] = OutageWatch(f"ingest shard {shard}")
        return watch

    def close(self) -> None:
        """Forgets the outages."""
        for watch in self._outages.values():
            watch.close()
        self._outages.clear()

    def new_id(self) -> str:
        """The ID of a new request."""
        return f"{self._name}-{next(self._names)}"

    def shards_at_hand(self) -> Sequence[int]:
        """The shards known now but for those just away; first the one whose turn it is."""
        shards = self._peers.ingests_at_hand()
        if len(shards) < 2:
            return shards
        now = time.monotonic()
        at = self._next_shard % len(shards)
        turned = [*shards[at:], *shards[:at]]
        return [shard for shard in turned if self._away.get(shard, 0.0) < now] or turned

    async def _choose_shard(self, full: set[int]) -> int:
        shards = [shard for shard in await self._peers.ingest_shards() if shard not in full]
        if not shards:
            self._peers.forget()
            raise Unavailable("no ingest is known", reason="PEER_UNKNOWN")
        now = time.monotonic()
        at_hand = [shard for shard in shards if self._away.get(shard, 0.0) < now] or shards
        at = self._next_shard % len(at_hand)
        self.turn()
        return at_hand[at]

    def turn(self) -> None:
        """The next request that may go to any shard is another one's."""
        self._next_shard += 1


async def _publish(
    channel: grpc.aio.Channel,
    encoded: bytes,
    timeout_s: float,
    connecting_s: float,
    liveness: Liveness | None,
) -> ingest_pb2.PublishResponse:
    """One try, which sends nothing before there is a connection, or a sign of life if asked to.

    Raises as `connected` and `Liveness.prove`.
    """
    until = time.monotonic() + timeout_s
    publish: Any = channel.unary_unary(_METHOD, response_deserializer=_DECODE)
    with errors_translated():
        if liveness is None:
            await connected(channel, min(timeout_s, connecting_s))
        else:
            await liveness.prove(channel, min(timeout_s, connecting_s))
        answer: ingest_pb2.PublishResponse = await publish(
            encoded, timeout=max(until - time.monotonic(), 0.001)
        )
    return answer


def _waited_for(shard: int, error: Unavailable | DeadlineExceeded) -> SlateMQError:
    """The same error about a request that only one shard may store."""
    message = (
        f"only ingest shard {shard} may store this, by its dedupe key or since it was named, and "
        f"it does not answer: {error.message}"
    )
    metadata = {**error.metadata, "ingest_shard": str(shard)}
    if isinstance(error, Unavailable):
        return Unavailable(
            message,
            retry_after_ms=error.retry_after_ms,
            reason=error.reason,
            metadata=metadata,
        )
    return DeadlineExceeded(message, reason=error.reason, metadata=metadata)
