"""Sending a request: on the stream of its shard first, then by calls for as long as it takes.

::

    Gatherer ──── stream() ──▶ answer
                     │ error, no answer
                     ▼
    Publisher ──── send() ──▶ a call, repeated under the same request ID ──▶ answer
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

import grpc.aio

from slatemq._publish.published import Published, published
from slatemq._publish.shards import IngestShards, Liveness
from slatemq._publish.streams import PublishStream, PublishStreams
from slatemq._publish.wire import Runs
from slatemq._rpc.peers import NOT_TAKEN, Peers, connect_s, connected, errors_translated
from slatemq.errors import (
    WRONG_SHARD,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import ingest_pb2

REPEAT_S_MAX = 540.0
"""A publish is repeated for at most this long: the server knows its request ID for 600 s."""

SHARD_DRAINING = "SHARD_DRAINING"

TAKES_NOTHING = frozenset({"SHARD_FULL", SHARD_DRAINING})
"""Reasons of a shard that has not stored a request, and will not."""

MOVED_S = 3.0
"""How long the topology may be older than what an ingest knows of it."""

LOOK_S = 0.3
"""How often it is read again meanwhile, and the ingest tried again."""

_METHOD = "/slatemq.v1.IngestService/Publish"
_DECODE = ingest_pb2.PublishResponse.FromString

T = TypeVar("T")


class Request(Generic[T]):
    """Messages for one ingest shard.

    Attributes:
        shard: None = any.
        runs: The messages, encoded.
        owners: What belongs to each message: the future of its publish, or its place among many.
        request_id: Empty = none yet.
        refused_until: Until when it is sent again to a shard that refuses keys which are its own by
            the topology; by the monotonic clock. None: none has refused it.
    """

    __slots__ = ("owners", "refused_until", "request_id", "runs", "shard")

    def __init__(self, shard: int | None, runs: Runs, owners: list[T]) -> None:
        self.shard = shard
        self.runs = runs
        self.owners = owners
        self.request_id = ""
        self.refused_until: float | None = None

    def keep(self, places: Iterable[int]) -> None:
        """Leaves out all other messages. The request has a new ID then: its content is another."""
        kept = list(places)
        self.runs = self.runs.only(kept)
        self.owners = [self.owners[place] for place in kept]
        self.request_id = ""


class StreamAttempt(NamedTuple):
    """A request that failed on a stream; it was sent at `began_s`, by the monotonic clock."""

    shard: int
    error: SlateMQError
    began_s: float


class Sender:
    """Sends requests, each under one ID to one shard."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.shards = IngestShards(peers)
        self.streams = PublishStreams(peers, self.shards)
        self._name = uuid4().hex
        self._numbers = itertools.count()

    def stream(
        self,
        request: Request[Any],
        stream: PublishStream,
        until: float,
        done: Callable[[list[Published] | StreamAttempt], None],
    ) -> None:
        """Sends a request of at most `streams.BYTES_MAX` on a stream.

        Calls `done` once, by `until` (loop time): with the answer, or with what `send` needs to try
        again.
        """
        request.request_id = self._new_id()
        self.shards.turn()
        shard, began_s = stream.shard, time.monotonic()

        def answered(answer: list[Published] | SlateMQError) -> None:
            if isinstance(answer, SlateMQError):
                done(StreamAttempt(shard, answer, began_s))
            else:
                self.shards.answered(shard)
                done(answer)

        stream.send(request.runs.encoded(request.request_id), answered, until)

    async def send(
        self,
        request: Request[Any],
        call_s: float | None = None,
        tried: StreamAttempt | None = None,
    ) -> list[Published]:
        """Sends a request by calls, under one ID on one shard, however often it is tried.

        `tried`: the first try, which failed, on a stream.
        """
        request.request_id = request.request_id or self._new_id()
        encoded, shard = request.runs.encoded(request.request_id), request.shard
        chosen = shard if tried is None else tried.shard
        was_sent = False
        full: set[int] = set()

        def failed(at: int, problem: SlateMQError, began_s: float) -> None:
            """Decides where the next try goes: elsewhere only if nothing can have been stored."""
            nonlocal chosen, was_sent
            if isinstance(problem, Unavailable | DeadlineExceeded):
                self.shards.failed(at, problem, began_s)
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
                chosen = await self.shards.choose(full)
            at = chosen
            channel = await self._peers.ingest(at)
            may_leave = shard is None and not was_sent and self.shards.are_several
            liveness = self.shards.liveness(at) if may_leave else None
            began_s = time.monotonic()
            try:
                answer = await self._try(channel, at, encoded, timeout, bound_s, liveness)
            except SlateMQError as error:
                failed(at, error, began_s)
                raise
            self.shards.liveness(at).answered()
            self.shards.answered(at)
            return published(
                answer.message_ids, answer.received_at_ms, answer.duplicates, answer.task_id
            )

        bound_s = min(self._peers.call_s if call_s is None else call_s, REPEAT_S_MAX)
        while True:
            try:
                # A large request takes as long as the link needs: another try would begin again.
                return await self._peers.call(attempt, call_s=bound_s, attempt_s=inf)
            except (ResourceExhausted, FailedPrecondition) as error:
                # That shard stored nothing and never will; another one may.
                if error.reason not in TAKES_NOTHING or shard is not None or chosen is None:
                    raise
                full.add(chosen)
                if error.reason == SHARD_DRAINING:
                    self._peers.forget()  # The topology says by now which shards drain.
                if full.issuperset(await self._peers.ingest_shards()):
                    raise
                chosen, was_sent = None, False
            except (Unavailable, DeadlineExceeded) as error:
                if shard is None or error.reason == "CLIENT_CLOSED":
                    raise
                raise _waited_for(shard, error) from None

    async def _try(
        self,
        channel: grpc.aio.Channel,
        shard: int,
        encoded: bytes,
        timeout_s: float,
        call_s: float,
        liveness: Liveness | None,
    ) -> ingest_pb2.PublishResponse:
        """One try, which sends nothing before there is a connection, or a sign of life if asked to.

        Raises as `connected` and `Liveness.prove`.
        """
        process = self._peers.process("ingest", shard)
        until = time.monotonic() + timeout_s
        connecting_s = min(timeout_s, connect_s(call_s))
        publish: Any = channel.unary_unary(_METHOD, response_deserializer=_DECODE)
        with errors_translated(process):
            if liveness is None:
                await connected(channel, connecting_s, process)
            else:
                await liveness.prove(channel, connecting_s, process)
            answer: ingest_pb2.PublishResponse = await publish(
                encoded, timeout=max(until - time.monotonic(), 0.001)
            )
        return answer

    async def split(self, request: Request[T], error: InvalidArgument) -> list[Request[T]]:
        """What to send in place of a request that was refused over keys of other shards.

        None where the error has another reason, or the topology does not explain it.
        """
        if error.reason != WRONG_SHARD:
            return []
        by_shard = await self.shards.places(request.runs)
        if list(by_shard) == [request.shard]:
            return [request] if await self._may_repeat(request) else []
        return [
            Request(shard, request.runs.only(places), [request.owners[place] for place in places])
            for shard, places in by_shard.items()
        ]

    async def moved(self, request: Request[Any]) -> bool:
        """Whether to send a request again that was refused over keys of another shard.

        It goes to the one shard that has all of its keys now. Raises as `IngestShards.of_all`.
        """
        await self._peers.fresh_topology()
        shard = await self.shards.of_all(request.runs)
        if shard == request.shard and not await self._may_repeat(request):
            return False
        request.shard = shard
        return True

    async def _may_repeat(self, request: Request[Any]) -> bool:
        """Whether to try again where the topology has the keys at the shard that refused them.

        The shard may know of a drain that the topology lacks, or of one that is over by now. Pauses
        before each of these tries, which end after `MOVED_S`.
        """
        now = time.monotonic()
        if request.refused_until is None:
            request.refused_until = now + MOVED_S
        if now > request.refused_until:
            return False
        await asyncio.sleep(LOOK_S)
        self._peers.forget()
        return True

    def _new_id(self) -> str:
        return f"{self._name}-{next(self._numbers)}"


def _waited_for(shard: int, error: Unavailable | DeadlineExceeded) -> SlateMQError:
    """The error about a request that only one shard may store."""
    message = (
        f"only ingest shard {shard} may store this, by its dedupe key or since it was named, and "
        f"it does not answer: {error.message}"
    )
    metadata = {**error.metadata, "ingest_shard": str(shard)}
    waited = type(error)(message, reason=error.reason, metadata=metadata)
    if isinstance(waited, Unavailable) and isinstance(error, Unavailable):
        waited.retry_after_ms = error.retry_after_ms
    return waited
