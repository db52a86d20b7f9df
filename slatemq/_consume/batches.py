"""Claiming: once, or batch after batch with the next claim under way while one is worked on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import overload

from slatemq._consume.claims import claim
from slatemq._consume.consumer import (
    PAUSED,
    ConsumeOptions,
    PartitionFetcher,
    QueueConsumer,
    lease_of,
)
from slatemq._consume.delivered import (
    Claimed,
    LeaseKeeper,
    Origin,
    Received,
    acks_soon,
    has_failed,
    reason_of,
    received,
    release_soon,
    settle_all,
)
from slatemq._consume.finishing import Nack, nack_of
from slatemq._requests import message_of
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import (
    INGEST_DOWN,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    SlateMQError,
)
from slatemq.models import Duration, milliseconds, seconds
from slatemq.v1 import consumer_pb2

log = logging.getLogger(__name__)

WAIT_S_MAX = 60.0
"""The longest single long poll that the server takes."""

BATCH_WAIT_S = 20.0
"""The long poll of a batch consumer, after which it notices a peer that is down."""

KNOWN_AWAITED_MAX = 1000
"""Shards of ingests that a claim may name as known."""

PAUSED_S = 1.0
"""The pause of a batch consumer between two claims from a paused queue."""


class Batch(Sequence[Received]):
    """Messages that were claimed together; as a context manager acked or given back together.

    Messages that were finished one by one are left out of that. Where a call in the block had no
    answer, leaving acks again what was acked, and leaves other leases to end.
    """

    __slots__ = ("_messages", "_origin")

    def __init__(self, messages: Sequence[Received], origin: Origin) -> None:
        self._messages = messages
        self._origin = origin

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, place: int) -> Received: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Received]: ...
    def __getitem__(self, place: int | slice) -> Received | Sequence[Received]:
        return self._messages[place]

    def __iter__(self) -> Iterator[Received]:
        return iter(self._messages)

    async def ack_all(self) -> list[SlateMQError | None]:
        """All are processed; returns when that is durable.

        Gives for each message that was not finished before None, or why it was refused. Raises
        Unavailable when nothing was answered; then it may be repeated.
        """
        return await self._finish("ack", self._origin.finisher.ack_many)

    async def nack_all(
        self, reason: str = "", delay: Duration | None = None
    ) -> list[SlateMQError | None]:
        """All failed: they come again, after `delay`, or are dead letters. Gives as `ack_all`.

        `delay` None: as the queue's backoff says; 0: at once.
        """
        item = nack_of("", reason, delay)  # A bad delay is refused before anything is taken.
        return await self._nack(item)

    async def release_all(self) -> list[SlateMQError | None]:
        """None was worked on: they go back, and the attempt is not counted."""
        return await self._nack(Nack("", release=True))

    async def _nack(self, item: Nack) -> list[SlateMQError | None]:
        nack_many = self._origin.finisher.nack_many
        return await self._finish(
            "release" if item.release else "nack",
            lambda tokens: nack_many([item._replace(lease_token=token) for token in tokens]),
        )

    async def _finish(
        self, name: str, send: Callable[[list[str]], Awaitable[list[SlateMQError | None]]]
    ) -> list[SlateMQError | None]:
        messages = self._take()
        tokens, origin = [message.lease_token for message in messages], self._origin
        try:
            return await settle_all(origin.telemetry, name, origin.queue_id, tokens, send)
        except SlateMQError:
            for message in messages:  # Their outcome is unknown.
                message.unsettled(name)
            raise

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._leave_unanswered(error)
        if error is None:
            await self._ack_on_leaving()
        elif has_failed(error):
            try:
                await self.nack_all(reason_of(error))
            except SlateMQError as problem:
                self._take()  # No caller repeats it: the leases are left to end.
                log.warning("%d messages could not be released: %s", len(self), problem)
        else:
            release_soon(self._origin, self._take())

    def _leave_unanswered(self, error: BaseException | None) -> None:
        """Leaves what had no answer, but for acks that `ack_all` is about to repeat."""
        unanswered = [one for one in self._messages if one._unanswered and not one._finished]
        acked = [one for one in unanswered if one._unanswered == "ack"]
        for message in unanswered:
            if error is not None or message._unanswered != "ack":
                message.settled()  # It may have taken effect: the lease is left to end.
        if error is not None:
            acks_soon(self._origin, acked)  # The work is done.

    async def _ack_on_leaving(self) -> None:
        try:
            refused = [one for one in await self.ack_all() if one is not None]
        except SlateMQError:
            for message in self._messages:
                message.drop_lease()  # A caller may repeat it, but few do.
            raise
        if refused:
            log.warning("%d messages may come again: %s", len(refused), refused[0])

    def _take(self) -> list[Received]:
        """What is not finished, which now is."""
        messages = [message for message in self._messages if not message._finished]
        for message in messages:
            message.settled()
        return messages

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} of {self._origin.queue_id!r}>"


def claim_request(
    queue_id: str,
    max_messages: int,
    *,
    wait: Duration = 0,
    lease: Duration | None,
    consumer_id: str,
    max_bytes: int = 0,
) -> consumer_pb2.ClaimRequest:
    """The request; raises InvalidArgument for what it cannot hold, and for too long a wait."""
    if seconds(wait, "wait") > WAIT_S_MAX:
        raise InvalidArgument("wait", f"must be 0 to {WAIT_S_MAX:g} s, not {seconds(wait):g} s")
    if max_messages == 0:  # Absent on the wire, which means one.
        raise InvalidArgument("max_messages", "must be at least 1, not 0", reason="OUT_OF_RANGE")
    return message_of(
        consumer_pb2.ClaimRequest,
        queue_id=queue_id,
        max_messages=max_messages,
        max_bytes=max_bytes,
        lease_ms=milliseconds(lease, "lease") if lease is not None else 0,
        wait_ms=milliseconds(wait, "wait"),
        consumer_id=consumer_id,
    )


class BatchConsumer(QueueConsumer):
    """Batches of one queue, as an asynchronous iterator and context manager.

    See Client.consume_batches. Several tasks may iterate: each batch goes to one of them.
    """

    def __init__(
        self,
        locations: QueueLocations,
        origin: Origin,
        keeper: LeaseKeeper,
        options: ConsumeOptions,
        on_close: Callable[[BatchConsumer], None],
    ) -> None:
        """Made by the client; `options.prefetch` is the size of a batch."""
        super().__init__(locations, origin, keeper, options, on_close)
        self._ready: deque[Batch] = deque()
        self._changed = asyncio.Condition()

    async def __anext__(self) -> Batch:
        """The next batch, never empty; ends when the consumer is closed. Raises NotFound."""
        if (telemetry := self._origin.telemetry) is None:
            return await self._next()
        with telemetry.receiving(self.queue_id, SlateMQError) as received:
            received.extend(batch := await self._next())
        return batch

    async def _next(self) -> Batch:
        if not self._parts:
            self._begin()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._ready or self._error or self._closed)
                if self._closed:
                    raise StopAsyncIteration
                if not self._ready:
                    assert self._error is not None
                    raise self._error
                batch = self._taken(self._ready.popleft())
                for part in self._parts:
                    part.ingests.progress()
                self._changed.notify_all()
            if batch:
                return batch

    def _taken(self, batch: Batch) -> Batch:
        """Without the messages whose leases were lost while they waited."""
        messages = [message for message in batch if self._keeper.take(lease_of(message))]
        return Batch(messages, self._origin)

    def requeue(self, batch: Batch) -> None:
        """Returns the batch of a caller that was interrupted while it took it."""
        self._ready.appendleft(batch)

    async def _close(self) -> None:
        for part in self._parts:
            part.close()
        await self._end_parts()  # A broker takes back what it claims for a caller that left.
        async with self._changed:
            self._changed.notify_all()
        leases = [lease_of(message) for batch in self._ready for message in batch]
        self._ready.clear()
        tokens = [lease.token for lease in leases if not lease.refused]
        self._keeper.drop_all(tokens)
        await self._settle(tokens)
        self._on_close(self)

    def _part(self, index: int) -> _Claims:
        return _Claims(self, index)

    def _has_work(self) -> bool:
        return bool(self._ready)

    async def _put(self, claimed: Claimed) -> None:
        """Offers a batch, and waits until it is taken."""
        batch = Batch(received(claimed, self._origin, self._hold_s), self._origin)
        self._ready.append(batch)
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: batch not in self._ready)


class _Claims(PartitionFetcher):
    """Claims from one partition whenever none of its batches waits to be taken."""

    def __init__(self, consumer: BatchConsumer, index: int) -> None:
        self._consumer = consumer
        options = consumer._options
        self._request = claim_request(
            consumer.queue_id,
            options.prefetch,
            wait=BATCH_WAIT_S,
            lease=options.lease,
            consumer_id=options.consumer_id,
            max_bytes=options.prefetch_bytes,
        )
        self._request.known_awaited.SetInParent()
        super().__init__(consumer, index)

    async def run(self) -> None:
        consumer = self._consumer
        try:
            await self._claim_on()
        except asyncio.CancelledError:
            if consumer._error is None:
                raise
        except SlateMQError as error:
            consumer._fail(error)
        except Exception as error:
            log.exception("claiming from %s ended by a fault", consumer.queue_id)
            consumer._fail(Internal(f"a fault of the client: {error!r}"))
        async with consumer._changed:
            consumer._changed.notify_all()

    async def _find(self) -> None:
        """Finds the partition, and by the first of them the others."""

        async def locate(_: float) -> int:
            return await self.locate(self._consumer)

        peers = self._consumer._peers
        await peers.call(locate, call_s=float("inf"), on_failure=self._note)

    def _note(self, error: SlateMQError) -> None:
        if error.reason == INGEST_DOWN:
            self.watch.end()
            self.ingests.begin(error)
        else:
            self._forget_ingests()
            self.watch.begin(error)

    def _forget_ingests(self) -> None:
        """Forgets the ingests that messages wait for, until the next response names them."""
        self.ingests.close()
        self._request.known_awaited.ClearField("shards")

    def _know_awaited(self, shards: Sequence[int]) -> None:
        self._request.ClearField("known_awaited")
        if len(shards) <= KNOWN_AWAITED_MAX:
            self._request.known_awaited.SetInParent()
            self._request.known_awaited.shards.extend(shards)

    async def _claim_on(self) -> None:
        consumer = self._consumer
        locations = consumer._locations
        while True:
            if not self.index:
                await self._find()
            try:
                claimed = await claim(
                    locations,
                    consumer._origin.finisher,
                    self._request,
                    float("inf"),
                    self._note,
                    self.index,
                )
                self.watch.end()
                self.ingests.note(claimed.awaited_shards)
                self._know_awaited(claimed.awaited_shards)
            except FailedPrecondition as error:
                if error.reason != PAUSED:
                    raise
                self.watch.end()
                self._forget_ingests()
                await asyncio.sleep(PAUSED_S * random.uniform(0.5, 1.0))
                continue
            if claimed.payloads:
                await consumer._put(claimed)
