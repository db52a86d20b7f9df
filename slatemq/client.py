"""The client: `async with slatemq.connect("127.0.0.1:7420") as client`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from slatemq import consumer as consuming
from slatemq.admin import UNCHANGED, Admin, Unchanged
from slatemq.batches import BatchConsumer, claim, claim_request
from slatemq.consumer import Consumer, Wish
from slatemq.delivered import Origin, Received
from slatemq.errors import SlateMQError
from slatemq.finishing import Finisher, nack_of
from slatemq.keeping import LeaseKeeper
from slatemq.models import (
    BatchSettings,
    DeletedQueue,
    Explanation,
    OutgoingMessage,
    Queue,
    Span,
    Status,
    Time,
    Topology,
    milliseconds,
    outgoing,
    seconds,
)
from slatemq.peers import CALL_S, Peers
from slatemq.processing import process_all
from slatemq.publisher import Publisher

if TYPE_CHECKING:
    from slatemq.otel import Telemetry


def connect(
    endpoint: str = "127.0.0.1:7420",
    *,
    batches: BatchSettings | None = None,
    call_timeout: Span = CALL_S,
    tracing: bool = False,
) -> Client:
    """A client of the instance that has a process at `endpoint` (`host:port`, any service).

    Use it as a context manager; entering it reaches out, tries for 3 s (or `call_timeout`, if that
    is shorter) so that a restart is no matter, and raises Unavailable when nobody is there.
    `call_timeout`: how long a call is repeated while processes are away. `tracing`: record
    OpenTelemetry spans and metrics, and carry the context in the headers; needs the extra `otel`.
    """
    return Client(endpoint, batches=batches, call_timeout=call_timeout, tracing=tracing)


class Client:
    """Publishes, consumes and administers. One event loop; any number of tasks."""

    def __init__(
        self,
        endpoint: str,
        *,
        batches: BatchSettings | None = None,
        call_timeout: Span = CALL_S,
        tracing: bool = False,
    ) -> None:
        """See `connect`."""
        self._telemetry = _telemetry(endpoint) if tracing else None
        self._peers = Peers(endpoint, seconds(call_timeout))
        self._publisher = Publisher(self._peers, batches or BatchSettings(), self._telemetry)
        self._finisher = Finisher(self._peers)
        self._keeper = LeaseKeeper(self._finisher)
        self._admin = Admin(self._peers)
        self._consumers: set[Consumer | BatchConsumer] = set()

    async def __aenter__(self) -> Client:
        try:
            await self._peers.reach()
        except BaseException:
            await self._peers.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Sends what was gathered, gives back what was prefetched, closes the connections.

        Waits for publishes for `call_timeout` at most, and for everything else for 5 s: what was
        not answered then is Unavailable (CLIENT_CLOSED), as is every later call.
        """
        try:
            await asyncio.gather(*(consumer.close() for consumer in list(self._consumers)))
            await self._publisher.close()
            await self._finisher.close(consuming.CLOSE_S)
        finally:
            await self._keeper.close()
            await self._publisher.close(0)
            await self._finisher.close(0)
            await self._peers.close()

    def _origin(self, queue_id: str, keeper: LeaseKeeper | None = None) -> Origin:
        return Origin(queue_id, self._finisher, keeper, self._telemetry)

    # --- Publishing ---------------------------------------------------------

    async def publish(
        self,
        payload: bytes | str,
        headers: Mapping[str, str] | None = None,
        *,
        created_at: Time | None = None,
        retention: Span | None = None,
    ) -> int:
        """Publishes one message; returns its ID when it is durable.

        Publishes that run at the same time share requests. Text is sent as UTF-8. `retention` is
        in whole seconds; 0 = for ever, None = the instance's default. A failure that may pass is
        tried again, with the same request ID, for as long as `call_timeout`. Raises
        InvalidArgument, Unavailable, ResourceExhausted.
        """
        return await self._publisher.publish(outgoing(payload, headers, created_at, retention))

    async def publish_many(
        self, messages: Iterable[OutgoingMessage | bytes | str], *, in_flight: int = 1
    ) -> list[int]:
        """Publishes messages in order, in as few requests as possible; returns their IDs.

        With more than one request `in_flight` it is faster, and the order holds within a request
        only. Not all or none: an error tells in `metadata["published_count"]` how many of the
        first messages are durable at least, and InvalidArgument which one is refused.
        """
        made = (m if isinstance(m, OutgoingMessage) else outgoing(m) for m in messages)
        return await self._publisher.publish_many(made, in_flight)

    async def publish_batch(
        self,
        messages: Sequence[OutgoingMessage],
        *,
        request_id: str = "",
        shard: int | None = None,
    ) -> list[int]:
        """Publishes 1 to 10,000 messages in one request, all or none; returns their IDs.

        A request ID of your own makes it safe to repeat the call yourself within 10 minutes, on
        the same ingest shard.
        """
        return await self._publisher.publish_batch(messages, request_id=request_id, shard=shard)

    # --- Consuming ----------------------------------------------------------

    def consume(
        self,
        queue_id: str,
        *,
        prefetch: int = consuming.PREFETCH,
        prefetch_bytes: int = consuming.PREFETCH_BYTES,
        lease: Span | None = None,
        consumer_id: str = "",
        hold: Span = consuming.HOLD_S,
    ) -> Consumer:
        """Messages of a queue as they come.

        As in::

            async with client.consume("orders") as messages:
                async for message in messages:
                    async with message:
                        work(message.payload)

        Leases are kept alive in the background for at most `hold`, so `lease` may be short: it
        says how soon others get the messages of a consumer that crashed. At most `prefetch`
        messages are held beyond those in work; on leaving they go back, uncounted. Broken
        connections are opened again. Iterating raises NotFound when there is no such queue.
        """
        wish = Wish(prefetch, prefetch_bytes, lease, consumer_id, hold)
        origin = self._origin(queue_id, self._keeper)
        consumer = Consumer(self._peers, origin, self._keeper, wish, self._consumers.discard)
        self._consumers.add(consumer)
        return consumer

    def consume_batches(
        self,
        queue_id: str,
        max_messages: int = 1000,
        *,
        max_bytes: int = consuming.PREFETCH_BYTES,
        lease: Span | None = None,
        consumer_id: str = "",
        hold: Span = consuming.HOLD_S,
    ) -> BatchConsumer:
        """Messages of a queue by the batch: what is there, up to `max_messages`, never none.

        As in::

            async with client.consume_batches("orders", 500) as batches:
                async for batch in batches:
                    async with batch:
                        work([message.payload for message in batch])

        While one batch is worked on, the next is claimed. Leases are kept as in `consume`. What is
        there is not waited for to become more.
        """
        wish = Wish(max_messages, max_bytes, lease, consumer_id, hold)
        origin = self._origin(queue_id, self._keeper)
        consumer = BatchConsumer(self._peers, origin, self._keeper, wish, self._consumers.discard)
        self._consumers.add(consumer)
        return consumer

    async def process(
        self,
        queue_id: str,
        handler: Callable[[Received], Awaitable[object]],
        *,
        concurrency: int = 8,
        lease: Span | None = None,
        consumer_id: str = "",
        hold: Span = consuming.HOLD_S,
    ) -> None:
        """Calls `handler` for every message, `concurrency` at a time, until cancelled.

        A message whose handler returns is acked, one whose handler raises is nacked and logged;
        when this is cancelled, what is in work is released. Raises NotFound, InvalidArgument.
        """
        async with self.consume(
            queue_id, prefetch=2 * concurrency, lease=lease, consumer_id=consumer_id, hold=hold
        ) as messages:
            await process_all(messages, handler, concurrency)

    async def claim(
        self,
        queue_id: str,
        max_messages: int = 1,
        *,
        wait: Span = 0,
        lease: Span | None = None,
        consumer_id: str = "",
        max_bytes: int = 0,
    ) -> list[Received]:
        """Claims messages once; nothing is extended in the background.

        Waits up to `wait` (60 s at most) for the first one; an empty list means that nothing came.
        """
        request = claim_request(
            queue_id,
            max_messages,
            wait=wait,
            lease=lease,
            consumer_id=consumer_id,
            max_bytes=max_bytes,
        )
        origin = self._origin(queue_id)
        began_ns = time.time_ns()
        wires = await claim(self._peers, request, self._peers.call_s)
        if self._telemetry is not None:
            self._telemetry.received(queue_id, began_ns, wires)
        return [Received(wire, origin) for wire in wires]

    async def ack(self, lease_tokens: Sequence[str]) -> list[SlateMQError | None]:
        """Acks by token; gives for each one None, or why it was refused."""
        self._keeper.drop_all(lease_tokens)
        return await self._finisher.ack_many(lease_tokens)

    async def nack(
        self,
        lease_tokens: Sequence[str],
        reason: str = "",
        delay: Span = 0,
        *,
        release: bool = False,
    ) -> list[SlateMQError | None]:
        """Nacks by token; gives for each one None, or why it was refused.

        `release`: the messages were not worked on, and their attempts are not counted.
        """
        items = [nack_of(token, reason, delay, release) for token in lease_tokens]
        self._keeper.drop_all(lease_tokens)
        return await self._finisher.nack_many(items)

    async def extend(
        self, lease_tokens: Sequence[str], lease: Span | None = None
    ) -> list[int | SlateMQError]:
        """Sets the ends of leases to now + `lease` (None: as long as at their claims).

        Gives for each one the new end in ms since the Unix epoch, or why it was refused.
        """
        length = milliseconds(lease) if lease is not None else 0
        return await self._finisher.extend_many(lease_tokens, length)

    # --- Queues -------------------------------------------------------------

    async def create_queue(
        self,
        queue_id: str,
        *,
        filter: str | None = None,  # noqa: A002 - the RFC's word
        priority: str | None = None,
        max_attempts: int | None = None,
        lease: Span | None = None,
        max_lease: Span | None = None,
        done_retention: Span | None = None,
        max_in_flight: int | None = None,
    ) -> Queue:
        """Creates a queue; None means the default. Raises AlreadyExists, InvalidArgument."""
        return await self._admin.create_queue(
            queue_id,
            filter=filter,
            priority=priority,
            max_attempts=max_attempts,
            lease=lease,
            max_lease=max_lease,
            done_retention=done_retention,
            max_in_flight=max_in_flight,
        )

    async def get_queue(self, queue_id: str) -> Queue:
        """Reads a queue, with the counts of its messages. Raises NotFound."""
        return await self._admin.get_queue(queue_id)

    def list_queues(self, prefix: str = "") -> AsyncIterator[Queue]:
        """All queues whose ID begins with `prefix`, by ID."""
        return self._admin.list_queues(prefix)

    async def update_queue(
        self,
        queue_id: str,
        *,
        etag: str = "",
        filter: str | Unchanged | None = UNCHANGED,  # noqa: A002 - the RFC's word
        priority: str | Unchanged | None = UNCHANGED,
        max_attempts: int | Unchanged | None = UNCHANGED,
        lease: Span | Unchanged | None = UNCHANGED,
        max_lease: Span | Unchanged | None = UNCHANGED,
        done_retention: Span | Unchanged | None = UNCHANGED,
        max_in_flight: int | Unchanged | None = UNCHANGED,
    ) -> Queue:
        """Changes the settings given; None sets one back to its default.

        With the etag of a queue that was read before, nobody else's change is overwritten: raises
        Aborted instead.
        """
        return await self._admin.update_queue(
            queue_id,
            etag,
            filter=filter,
            priority=priority,
            max_attempts=max_attempts,
            lease=lease,
            max_lease=max_lease,
            done_retention=done_retention,
            max_in_flight=max_in_flight,
        )

    async def delete_queue(self, queue_id: str, *, etag: str = "") -> None:
        """Deletes a queue with everything in it. Raises NotFound, Aborted."""
        await self._admin.delete_queue(queue_id, etag)

    def watch_queues(self, broker_shard: int = 0) -> AsyncIterator[Queue | DeletedQueue]:
        """The queues of a broker shard, then every change, without end."""
        return self._admin.watch_queues(broker_shard)

    async def explain(
        self,
        headers: Mapping[str, str],
        *,
        created_at: Time | None = None,
        received_at: Time | None = None,
        payload_bytes: int = 0,
        queue_ids: Iterable[str] = (),
    ) -> list[Explanation]:
        """Tells which queues such a message would reach, and why; stores nothing."""
        return await self._admin.explain(headers, created_at, received_at, payload_bytes, queue_ids)

    async def topology(self) -> Topology:
        """Where the processes of the instance are."""
        return await self._peers.topology()

    async def status(self) -> Status:
        """Every process, route and queue, as far as they answer."""
        return await self._admin.status()


def _telemetry(endpoint: str) -> Telemetry:
    # Loaded when asked for: nobody else pays for it, or needs the packages.
    try:
        made: Telemetry = import_module("slatemq.otel").Telemetry(endpoint)
    except ImportError as error:
        raise ImportError("tracing needs OpenTelemetry: install slatemq[otel]") from error
    return made
