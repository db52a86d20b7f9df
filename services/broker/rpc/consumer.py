"""ConsumerService: claims, and what becomes of them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from google.rpc.status_pb2 import Status

from libs.access.current import caller_name, caller_quota, require_publish_any, require_pushes
from libs.serving.requests.doors import current_visit
from libs.serving.requests.guard import encoded
from libs.storage.layout.ids import MAX_SHARD
from services.broker.core.lease_table import lease_ended, lease_unknown
from services.broker.core.leases import PLACE_BITS
from services.broker.core.queue import Queue
from services.broker.core.settings import MAX_LEASE_MS
from services.broker.core.shard import Finish, Nack
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.responses import (
    consumer_id,
    encode_messages,
    lease_length,
    release,
    too_late,
)
from services.broker.delivery.streams import Streams
from services.broker.delivery.waiters import OneClaim, packed_shards
from services.broker.outbox.executor import Executor
from services.broker.requests.limits import (
    KNOWN_AWAITED_MAX,
    REASON_BYTES_MAX,
    lease_ms_of,
    within,
    within_bytes,
    within_count,
)
from services.broker.requests.queues import checked_id
from services.broker.requests.tokens import denied_queues, parse_token, parse_tokens
from services.broker.shard.owner import ShardOwner
from slatemq._rpc.rpc_status import to_status
from slatemq.errors import (
    InvalidArgument,
    NotFound,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

MESSAGES_MAX = 10_000
"""Messages or tokens in one call at most."""

STEP_LEASES = 500
"""Leases released or extended, or tokens refused, in one step at most: some 10 ms, in which nothing
else runs."""

CLAIM_BYTES = 32 << 20
CLAIM_BYTES_MAX = 64 << 20
WAIT_MS_MAX = 60_000
CLAIM_ID_BYTES_MAX = 64
RUN_MAX = 1 << PLACE_BITS
"""Tokens of one block, which an ack may name as a run."""

FINISHED_BYTES = 100
"""About what finishing a lease adds to a commit."""

_OK = Status()
_OK_RESULT = consumer_pb2.AckResponse(results=[_OK]).SerializeToString()
"""One result of an answer in which every item succeeded."""


T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class ConsumerServicer(consumer_pb2_grpc.ConsumerServiceServicer):
    _shard: int
    _owner: ShardOwner
    _delivery: Dispatcher
    _streams: Streams
    _executor: Executor
    _waits: dict[tuple[str, str], asyncio.Timeout] = field(default_factory=dict, init=False)
    """The waits of claims that can be stopped, by queue and claim ID."""

    # --- Claims -------------------------------------------------------------

    async def Claim(
        self, request: consumer_pb2.ClaimRequest, context: Any
    ) -> consumer_pb2.ClaimResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        count = within("max_messages", request.max_messages, 0, MESSAGES_MAX) or 1
        size = within("max_bytes", request.max_bytes, 0) or CLAIM_BYTES
        asked_ms = lease_ms_of("lease_ms", request.lease_ms)
        wait_ms = within("wait_ms", request.wait_ms, 0, WAIT_MS_MAX)
        consumer = consumer_id(request.consumer_id)
        queue = await self._owner.find(queue_id)
        lease_ms = lease_length(asked_ms, queue)
        size = min(size, CLAIM_BYTES_MAX)
        known = _known_awaited(request)
        name = queue_id, within_bytes("claim_id", request.claim_id, CLAIM_ID_BYTES_MAX)
        principal = caller_name()
        self._delivery.admit(principal)
        claim = OneClaim(consumer, lease_ms, count, size, patient=wait_ms > 0, known_awaited=known)
        claim.principal = principal
        claim.quota = caller_quota()
        try:
            answer = await self._answer(queue, claim, wait_ms, name)
        except BaseException:
            self._sent(claim)
            raise
        context.add_done_callback(lambda _: self._sent(claim))
        return encoded(consumer_pb2.ClaimResponse, answer)

    def _sent(self, claim: OneClaim) -> None:
        """Lets go of the messages: gRPC's objects of a call are in a cycle, and hold the claim."""
        batches, claim.batches = claim.batches, []
        self._delivery.sent(batches, claim.principal)

    async def _answer(
        self, queue: Queue, claim: OneClaim, wait_ms: int, name: tuple[str, str]
    ) -> bytes:
        try:
            with self._delivery.places.place(claim.quota):
                await self._wait(queue, claim, wait_ms, name)
            await self._owner.durable()
            if claim.error is not None:
                raise claim.error
            if too_late(self._owner, claim.batches):
                raise Unavailable(
                    "storing the claim took half of its lease; it was undone", reason="SLOW_COMMIT"
                )
            # It may have waited for a minute; refused here, its messages go back.
            await current_visit.get().renew()
            head = consumer_pb2.ClaimResponse(
                consumer_id=claim.consumer,
                awaited_ingest_shards=sorted(claim.awaited_shards),
                partitions_count=queue.settings.partitions_count,
            )
            return await encode_messages(self._shard, claim.batches, head.SerializeToString())
        except BaseException:
            # The caller gets no response: its messages need not wait for their leases to end.
            await release(self._owner, claim.batches)
            raise

    async def _wait(
        self, queue: Queue, claim: OneClaim, wait_ms: int, name: tuple[str, str]
    ) -> None:
        try:
            self._delivery.add(queue, claim)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000 if wait_ms else None) as wait:
                    with self._stoppable(name, wait):
                        await claim.done.wait()
            # What is being fetched now may be for it.
            self._delivery.wait_no_more(queue, claim)
            await claim.done.wait()
        except SlateMQError as refused:
            claim.error = refused
        finally:
            self._delivery.remove(queue, claim)

    @contextmanager
    def _stoppable(self, name: tuple[str, str], wait: asyncio.Timeout) -> Iterator[None]:
        """Within it StopClaim ends a wait."""
        if name[1]:
            self._waits[name] = wait
        try:
            yield
        finally:
            if self._waits.get(name) is wait:
                del self._waits[name]

    async def StopClaim(
        self, request: consumer_pb2.StopClaimRequest, context: Any
    ) -> consumer_pb2.StopClaimResponse:
        claim_id = within_bytes("claim_id", request.claim_id, CLAIM_ID_BYTES_MAX)
        if not claim_id:
            raise InvalidArgument("claim_id", "must not be empty")
        wait = self._waits.pop((checked_id(request.queue_id, "queue_id"), claim_id), None)
        if wait is not None and not wait.expired():
            wait.reschedule(asyncio.get_running_loop().time())
        return consumer_pb2.StopClaimResponse()

    async def Consume(
        self, request_iterator: AsyncIterator[consumer_pb2.ConsumeRequest], context: Any
    ) -> AsyncIterator[consumer_pb2.ConsumeResponse]:
        async with aclosing(self._streams.consume(request_iterator)) as answers:
            async for answer in answers:
                yield answer
                del answer  # It is sent: the next may be hours away.

    # --- Finishing ----------------------------------------------------------

    async def Ack(self, request: consumer_pb2.AckRequest, context: Any) -> consumer_pb2.AckResponse:
        # Each run has a token at least: millions of them are refused without a look at each.
        _check_count("lease_tokens", len(request.lease_tokens) + len(request.runs))
        for index, run in enumerate(request.runs):
            within(f"runs[{index}].count", run.count, 1, RUN_MAX)
        counts = [run.count for run in request.runs]
        _check_count("lease_tokens", len(request.lease_tokens) + sum(counts))
        tokens, results = await self._leases(request.lease_tokens, "lease_tokens[{}]")
        if counts:
            tokens, results = await self._leases_in_runs(request.runs, [*tokens], results)
        tokens, results = self._permitted(tokens, results)
        done = await self._owner.run(
            lambda now_ms: self._owner.shard.leases.ack(tokens, now_ms),
            len(tokens) * FINISHED_BYTES,
        )
        await self._confirm(done)
        if done.count(Finish.OK) == len(results):
            return encoded(consumer_pb2.AckResponse, _OK_RESULT * len(results))
        return consumer_pb2.AckResponse(results=merged(results, map(_STATUSES.__getitem__, done)))

    async def Nack(
        self, request: consumer_pb2.NackRequest, context: Any
    ) -> consumer_pb2.NackResponse:
        _check_count("items", len(request.items))
        arrived_ms = self._owner.clock.now_ms()
        items = request.items
        # All of them are looked at before anything is released.
        for first in range(0, len(items), STEP_LEASES):
            await asyncio.sleep(0)
            for index, item in enumerate(items[first : first + STEP_LEASES], first):
                within(f"items[{index}].delay_ms", item.delay_ms, 0, MAX_LEASE_MS)
                within_bytes(f"items[{index}].reason", item.reason, REASON_BYTES_MAX)
        texts = [item.lease_token for item in items]
        tokens, results = self._permitted(*await self._leases(texts, "items[{}].lease_token"))
        rows = [item for item, status in zip(items, results, strict=True) if status is None]

        def nack(pairs: Sequence[tuple[int, consumer_pb2.NackItem]], now_ms: int) -> list[Finish]:
            nacks = [_nack(token, item) for token, item in pairs]
            return self._owner.shard.leases.nack(nacks, now_ms, arrived_ms)

        pairs = list(zip(tokens, rows, strict=True))
        done = await self._in_steps(pairs, nack, request.ByteSize())
        await self._confirm(done)
        return consumer_pb2.NackResponse(results=merged(results, map(_STATUSES.__getitem__, done)))

    async def ExtendLease(
        self, request: consumer_pb2.ExtendLeaseRequest, context: Any
    ) -> consumer_pb2.ExtendLeaseResponse:
        lease_ms = lease_ms_of("lease_ms", request.lease_ms)
        _check_count("lease_tokens", len(request.lease_tokens))
        leases = await self._leases(request.lease_tokens, "lease_tokens[{}]")
        tokens, results = self._permitted(*leases)

        def extend(part: Sequence[int], now_ms: int) -> list[tuple[Finish, int]]:
            return self._owner.shard.leases.extend(part, lease_ms, now_ms)

        done = await self._in_steps(tokens, extend)
        await self._confirm([finish for finish, _ in done])
        statuses = merged(results, (_STATUSES[finish] for finish, _ in done))
        ends = iter(deadline_ms for _, deadline_ms in done)
        ends_ms = [next(ends) if refused is None else 0 for refused in results]
        answer = consumer_pb2.ExtendLeaseResponse()
        for first in range(0, len(statuses), STEP_LEASES):
            await asyncio.sleep(0)
            step = slice(first, first + STEP_LEASES)
            for status, end_ms in zip(statuses[step], ends_ms[step], strict=True):
                answer.results.add(status=status, lease_deadline_ms=end_ms)
        return answer

    async def _confirm(self, done: Collection[Finish]) -> None:
        """Wait until results may be answered; that a lease is unknown as `ShardOwner.confirm`."""
        is_unknown = Finish.UNKNOWN in done
        await (self._owner.commits.prove_ownership() if is_unknown else self._owner.durable())

    async def _in_steps(
        self,
        items: Sequence[T],
        command: Callable[[Sequence[T], int], list[R]],
        size_bytes: int = 0,
    ) -> list[R]:
        """Runs a command on STEP_LEASES items after the other; between two, others have turns.

        Not all together or none: each item is answered for itself, and may be sent again.
        """
        done: list[R] = []
        for first in range(0, len(items), STEP_LEASES):
            if first:  # Not faster than it is stored: a nack may write long histories.
                await (self._owner.durable() if self._owner.is_full else asyncio.sleep(0))
            part = items[first : first + STEP_LEASES]
            done += await self._owner.run(partial(command, part), size_bytes)
            size_bytes = 0
        return done

    async def Execute(
        self, request: consumer_pb2.ExecuteRequest, context: Any
    ) -> consumer_pb2.ExecuteResponse:
        for command in request.commands:
            if command.HasField("transfer"):
                require_publish_any(command.transfer.target_queue_id)
        pushes = (
            (place, command.push.queue_id, command.push.headers, len(command.push.payload))
            for place, command in enumerate(request.commands)
            if command.HasField("push")
        )
        await require_pushes(pushes, "command")
        return await self._executor.execute(request)

    async def _leases(
        self, texts: Sequence[str], field: str
    ) -> tuple[Sequence[int], list[Status | None]]:
        """The leases of this shard, and for every token None or why it is refused unseen.

        Where one is refused, it looks at STEP_LEASES at a time: in between, others have turns.
        """
        known = parse_tokens(texts, self._shard)
        if known is not None:
            return known, [None] * len(texts)
        leases: list[int] = []
        refused: list[Status | None] = []
        for index, text in enumerate(texts):
            if index and index % STEP_LEASES == 0:
                await asyncio.sleep(0)
            found = self._lease(text, field.format(index))
            if isinstance(found, Status):
                refused.append(found)
            else:
                leases.append(found)
                refused.append(None)
        return leases, refused

    def _lease(self, text: str, field: str) -> int | Status:
        """The lease of this shard that has a token, or why that is refused unseen."""
        try:
            shard, lease = parse_token(text, field)
            if shard != self._shard:
                raise NotFound("lease", text, reason="LEASE_UNKNOWN")
        except SlateMQError as error:
            return to_status(error)
        return lease

    def _permitted(
        self, leases: Sequence[int], refused: list[Status | None]
    ) -> tuple[Sequence[int], list[Status | None]]:
        """The arguments without the leases of queues from which the caller may not consume."""
        denied = denied_queues(self._owner.shard.leases, leases)
        if not denied:
            return leases, refused
        statuses = {queue_id: to_status(error) for queue_id, error in denied.items()}
        found = [self._owner.shard.leases.running(lease) for lease in leases]
        of_leases = [statuses.get(one.queue.queue_id) if one is not None else None for one in found]
        kept = [lease for lease, status in zip(leases, of_leases, strict=True) if status is None]
        rest = iter(of_leases)
        return kept, [status if status is not None else next(rest) for status in refused]

    async def _leases_in_runs(
        self,
        runs: Iterable[consumer_pb2.LeaseRun],
        leases: list[int],
        refused: list[Status | None],
    ) -> tuple[list[int], list[Status | None]]:
        """Like `_leases`, behind those that are known already."""
        for index, run in enumerate(runs):
            if index and index % STEP_LEASES == 0:
                await asyncio.sleep(0)
            found = self._lease(run.lease_token, f"runs[{index}].lease_token")
            if isinstance(found, Status):
                refused += [found] * run.count
            else:
                within(f"runs[{index}].count", run.count, 1, RUN_MAX - found % RUN_MAX)
                leases += range(found, found + run.count)
                refused += [None] * run.count
        return leases, refused


def _check_count(field: str, count: int) -> None:
    if not count:
        raise InvalidArgument(field, "must not be empty", reason="OUT_OF_RANGE")
    within_count(field, count, MESSAGES_MAX)


def _known_awaited(request: consumer_pb2.ClaimRequest) -> array[int] | None:
    if not request.HasField("known_awaited"):
        return None
    shards = request.known_awaited.shards
    within_count("known_awaited.shards", len(shards), KNOWN_AWAITED_MAX)
    for index, shard in enumerate(shards):
        within(f"known_awaited.shards[{index}]", shard, 0, MAX_SHARD)
    return packed_shards(shards)


def _nack(token: int, item: consumer_pb2.NackItem) -> Nack:
    delay_ms = item.delay_ms if item.HasField("delay_ms") else None
    return Nack(token, item.reason, delay_ms, item.release)


def merged(refused: Sequence[Status | None], others: Any) -> list[Status]:
    """One status for each item: why it was refused unseen, or the next of the others."""
    rest = iter(others)
    return [status if status is not None else next(rest) for status in refused]


_STATUSES = {
    Finish.OK: _OK,
    Finish.ENDED: to_status(lease_ended()),
    Finish.UNKNOWN: to_status(lease_unknown()),
}
