"""The client: `async with slatemq.connect("127.0.0.1:7420") as client`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slatemq._admin.access import AccessCalls
from slatemq._admin.entries import EntryCalls
from slatemq._admin.janitor import JanitorCalls
from slatemq._admin.outbox import OutboxCalls
from slatemq._admin.queue_calls import QueueCalls
from slatemq._admin.redrives import RedriveCalls
from slatemq._admin.settling import SettlingCalls
from slatemq._admin.shards import ShardCalls
from slatemq._admin.tasks import TaskCalls
from slatemq._checks import (
    check_flag,
    check_kind,
    check_text,
    check_whole,
    iterable,
    moved,
    wrong,
)
from slatemq._commands.command_calls import CommandCalls
from slatemq._consume import consumer as consuming
from slatemq._consume.batches import BatchConsumer, claim_request
from slatemq._consume.consumer import ConsumeOptions, Consumer
from slatemq._consume.delivered import LeaseKeeper, Origin, Received, settle_all
from slatemq._consume.finishing import Finisher, nack_of
from slatemq._consume.gathering import claim_from_all
from slatemq._consume.processing import check_handler, ending_at_sigterm, process_all
from slatemq._publish.published import Published
from slatemq._publish.publisher import Publisher
from slatemq._publish.wire import check
from slatemq._rpc.connecting import Connecting
from slatemq._rpc.endpoints import addresses_of
from slatemq._rpc.forks import refuse_pickling
from slatemq._rpc.peers import CALL_S, Peers
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.credentials import Credentials
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import (
    BatchSettings,
    Duration,
    OutgoingMessage,
    Payload,
    Time,
    milliseconds,
    outgoing,
    sealed,
    sealer_of,
    seconds,
)

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing
    from slatemq.otel import Telemetry


def connect(
    endpoint: str | Iterable[str] = "127.0.0.1:7420",
    *,
    batches: BatchSettings | None = None,
    call_timeout: Duration = CALL_S,
    tracing: bool = False,
    credentials: Credentials | None = None,
    encryption: KeyRing | None = None,
) -> Client:
    """A client of the instance that has a process at `endpoint` (`host:port`, any service).

    Several addresses may be given, in a list or separated by commas; any one that answers will do.
    Use it as a context manager; entering it reaches out, tries for 3 s (or `call_timeout`, if
    that is shorter) so that a restart does not matter, and raises Unavailable when no process
    answers (after some 6 s where one takes the connection and says nothing, since it is frozen),
    InvalidArgument when another server does (NOT_SLATEMQ), or where only one side speaks
    TLS (TLS_MISMATCH).
    `call_timeout`: how long a call is repeated while processes are down. `tracing`: record
    OpenTelemetry spans and metrics, and carry the context in the headers; needs the extra `otel`.
    `credentials`: certificates and a token, for instances that need them. `encryption`: the keys
    with which payloads are encrypted before they are sent, and decrypted when they are read, so
    that no server knows them; the keys in the file of the credentials where this is None.
    """
    return Client(
        endpoint,
        batches=batches,
        call_timeout=call_timeout,
        tracing=tracing,
        credentials=credentials,
        encryption=encryption,
    )


class Client(
    CommandCalls,
    QueueCalls,
    EntryCalls,
    RedriveCalls,
    SettlingCalls,
    OutboxCalls,
    TaskCalls,
    ShardCalls,
    AccessCalls,
    JanitorCalls,
):
    """Publishes, consumes and administers. One event loop; any number of tasks."""

    def __init__(
        self,
        endpoint: str | Iterable[str],
        *,
        batches: BatchSettings | None = None,
        call_timeout: Duration = CALL_S,
        tracing: bool = False,
        credentials: Credentials | None = None,
        encryption: KeyRing | None = None,
    ) -> None:
        check_flag("tracing", tracing)
        if credentials is not None:
            check_kind("credentials", credentials, Credentials)
        if encryption is None and credentials is not None and credentials.encryption_keys:
            encryption = _key_ring(credentials.encryption_keys)
        elif encryption is not None and not hasattr(encryption, "seal"):
            raise wrong("encryption", "a KeyRing", encryption)
        batches = BatchSettings() if batches is None else batches
        check_kind("batches", batches, BatchSettings)
        addresses = addresses_of(endpoint)
        self._telemetry = _telemetry(addresses[0]) if tracing else None
        context = None if self._telemetry is None else self._telemetry.carried
        connecting = Connecting(credentials, context)
        peers = Peers(addresses, seconds(call_timeout, "call_timeout"), connecting)
        locations = QueueLocations(peers)
        self._finisher = Finisher(locations)
        super().__init__(locations, LeaseKeeper(self._finisher), encryption)
        self._publisher = Publisher(peers, batches, self._telemetry)
        self._consumers: set[Consumer | BatchConsumer] = set()

    def __reduce__(self) -> NoReturn:
        raise refuse_pickling(self)

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
        """Sends gathered messages, releases prefetched ones, closes the connections.

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
        check_text("queue_id", queue_id)
        return Origin(queue_id, self._finisher, keeper, self._telemetry, self._encryption)

    # --- Publishing ---------------------------------------------------------

    async def publish(
        self,
        payload: Payload,
        headers: Mapping[str, str] | None = None,
        *,
        created_at: Time | None = None,
        retention: Duration | None = None,
        delay: Duration | None = None,
        visible_at: Time | None = None,
        dedupe_key: str | None = None,
    ) -> Published:
        """Publishes one message; returns its ID when it is durable.

        Publishes that run at the same time share requests. Text is sent as UTF-8. `retention` is
        in whole seconds; 0 = forever, None = the instance's default. Delayed queues hold the
        message back for `delay` in place of their default; every queue does until `visible_at`.
        Of publishes with the same `dedupe_key` (1 to 255 bytes) the first one counts: later ones
        get its ID, marked `duplicate`. A failure that may pass is tried again, with the same
        request ID, for as long as `call_timeout`. Raises InvalidArgument, Unavailable,
        ResourceExhausted.
        """
        message = outgoing(
            payload,
            headers,
            created_at,
            retention,
            delay=delay,
            visible_at=visible_at,
            dedupe_key=dedupe_key,
        )
        return await self._publisher.publish(sealed(message, self._encryption))

    async def publish_many(
        self, messages: Iterable[OutgoingMessage | Payload], *, in_flight: int = 1
    ) -> list[Published]:
        """Publishes messages in order, in as few requests as possible; returns their IDs.

        With more than one request `in_flight` it is faster, and the order holds within a request
        only; messages with dedupe keys go to the shards of their keys, in requests of their own.
        Not all or none: `metadata["published_count"]` of an error has the number of first messages
        that are durable at least, and InvalidArgument names the refused one.
        """
        given = iterable("messages", "messages", messages)
        each = self._sealed_all(_outgoing_all(given))
        return await self._publisher.publish_many(each, in_flight)

    async def publish_batch(
        self,
        messages: Sequence[OutgoingMessage],
        *,
        request_id: str = "",
        shard: int | None = None,
    ) -> list[Published]:
        """Publishes 1 to 10,000 messages in one request, all or none; returns their IDs.

        A request ID of your own makes it safe to repeat the call yourself within 10 minutes, on
        the same ingest shard. Dedupe keys must all fall to one shard, else InvalidArgument
        (MIXED_SHARDS).
        """
        each: Iterable[OutgoingMessage] = iterable("messages", "messages", messages)
        if self._encryption is not None and request_id:
            check_text("request_id", request_id)
            each = list(each)
            for place, message in enumerate(each):
                check(message, f"messages[{place}].")
            sealer = sealer_of(self._encryption, request_id, (one.payload for one in each))
            each = [sealed(one, sealer) for one in each]
        else:
            each = self._sealed_all(each)
        return await self._publisher.publish_batch(each, request_id=request_id, shard=shard)

    def _sealed_all(self, messages: Iterable[OutgoingMessage]) -> Iterable[OutgoingMessage]:
        """The messages as they are sent: encrypted, where there are keys."""
        encryption = self._encryption
        if encryption is None:
            return messages
        return (_sealed_at(place, one, encryption) for place, one in enumerate(messages))

    # --- Consuming ----------------------------------------------------------

    def consume(
        self,
        queue_id: str,
        *,
        prefetch: int = consuming.PREFETCH,
        prefetch_bytes: int = consuming.PREFETCH_BYTES,
        lease: Duration | None = None,
        consumer_id: str = "",
        hold: Duration = consuming.HOLD_S,
        outage_timeout: Duration | None = None,
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
        connections are opened again, and while the queue is paused iterating waits. When the broker
        has not answered for some seconds, or an ingest that messages of the queue wait for, that
        is logged at WARNING, and its return; when nothing has come for `outage_timeout` meanwhile
        (None: never), iterating raises Unavailable (OUTAGE_TIMEOUT). Raises NotFound when there is
        no such queue.
        """
        options = ConsumeOptions(prefetch, prefetch_bytes, lease, consumer_id, hold, outage_timeout)
        origin = self._origin(queue_id, self._keeper)
        consumer = Consumer(self._locations, origin, self._keeper, options, self._consumers.discard)
        self._consumers.add(consumer)
        return consumer

    def consume_batches(
        self,
        queue_id: str,
        max_messages: int = 1000,
        *,
        max_bytes: int = consuming.PREFETCH_BYTES,
        lease: Duration | None = None,
        consumer_id: str = "",
        hold: Duration = consuming.HOLD_S,
        outage_timeout: Duration | None = None,
    ) -> BatchConsumer:
        """Messages of a queue by the batch: what is there, up to `max_messages`, never none.

        As in::

            async with client.consume_batches("orders", 500) as batches:
                async for batch in batches:
                    async with batch:
                        work([message.payload for message in batch])

        While one batch is worked on, the next is claimed. Leases are kept, and outages are logged
        and bounded, as in `consume`. What is there is not waited for to become more.
        """
        check_whole("max_messages", max_messages, 1, consuming.PREFETCH_MAX)
        check_whole("max_bytes", max_bytes, 1)
        options = ConsumeOptions(max_messages, max_bytes, lease, consumer_id, hold, outage_timeout)
        origin = self._origin(queue_id, self._keeper)
        consumer = BatchConsumer(
            self._locations, origin, self._keeper, options, self._consumers.discard
        )
        self._consumers.add(consumer)
        return consumer

    async def process(
        self,
        queue_id: str,
        handler: Callable[[Received], Awaitable[object]],
        *,
        concurrency: int = 8,
        prefetch: int | None = None,
        lease: Duration | None = None,
        consumer_id: str = "",
        hold: Duration = consuming.HOLD_S,
        outage_timeout: Duration | None = None,
    ) -> None:
        """Calls `handler` for every message, `concurrency` at a time, until cancelled.

        `prefetch` as in `consume`; None: twice `concurrency`.

        A message whose handler returns is acked; one whose handler raises is nacked, and logged
        with its traceback. When this is cancelled, what is in work is released. So it is at
        SIGTERM, where the program has no handler of its own for it and this runs on the main
        thread; then the program ends (SystemExit, 143). `outage_timeout` as in `consume`: then the
        handlers that run are waited for. Raises NotFound, InvalidArgument, Unavailable.
        """
        check_handler(handler)
        check_whole("concurrency", concurrency, 1, consuming.PREFETCH_MAX // 2)
        messages = self.consume(
            queue_id,
            prefetch=2 * concurrency if prefetch is None else prefetch,
            lease=lease,
            consumer_id=consumer_id,
            hold=hold,
            outage_timeout=outage_timeout,
        )
        async with ending_at_sigterm(), messages:
            await process_all(messages, handler, concurrency)

    async def claim(
        self,
        queue_id: str,
        max_messages: int = 1,
        *,
        wait: Duration = 0,
        lease: Duration | None = None,
        consumer_id: str = "",
        max_bytes: int = 0,
    ) -> list[Received]:
        """Claims messages once; nothing is extended in the background.

        Waits up to `wait` (60 s at most) for the first one; an empty list means that nothing came.
        Raises NotFound, FailedPrecondition (QUEUE_PAUSED), and, once the wait is over, Unavailable
        (INGEST_DOWN): there are messages, and the ingest that has their payloads is down; or
        ResourceExhausted (TOO_MANY_IN_FLIGHT): this principal holds as many as it may. Where the
        answer to a try was lost, and perhaps messages with it, and repeats bring none, raises why.
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
        claiming = claim_from_all(self._locations, request, origin, self._peers.call_s)
        if self._telemetry is None:
            return await claiming
        with self._telemetry.receiving(queue_id, BaseException) as received:
            received.extend(messages := await claiming)
        return messages

    async def ack(self, lease_tokens: Sequence[str]) -> list[SlateMQError | None]:
        """Acks by token; returns for each None, or why it was refused."""
        tokens = list(iterable("lease_tokens", "lease tokens", lease_tokens))
        self._keeper.drop_all(tokens)
        return await settle_all(self._telemetry, "ack", "", tokens, self._finisher.ack_many)

    async def nack(
        self,
        lease_tokens: Sequence[str],
        reason: str = "",
        delay: Duration | None = None,
        *,
        release: bool = False,
    ) -> list[SlateMQError | None]:
        """Nacks by token; returns for each None, or why it was refused.

        `delay` None: as the queue's backoff says, and for a release at once. `release`: the
        messages were not worked on, and their attempts are not counted.
        """
        check_flag("release", release)
        tokens = list(iterable("lease_tokens", "lease tokens", lease_tokens))
        items = [nack_of(token, reason, delay, release) for token in tokens]
        self._keeper.drop_all(tokens)
        name = "release" if release else "nack"
        return await settle_all(self._telemetry, name, "", items, self._finisher.nack_many)

    async def extend(
        self, lease_tokens: Sequence[str], lease: Duration | None = None
    ) -> list[int | SlateMQError]:
        """Sets the ends of leases to now + `lease` (None: as long as at their claims).

        Returns for each the new end in ms since the Unix epoch, or why it was refused.
        """
        tokens = list(iterable("lease_tokens", "lease tokens", lease_tokens))
        length = milliseconds(lease, "lease") if lease is not None else 0
        return await self._finisher.extend_many(tokens, length)


def _outgoing_all(given: Iterable[OutgoingMessage | Payload]) -> Iterator[OutgoingMessage]:
    for place, one in enumerate(given):
        try:
            yield one if isinstance(one, OutgoingMessage) else outgoing(one)
        except InvalidArgument as error:
            raise moved(error, f"messages[{place}].{error.field}") from None


def _sealed_at(place: int, message: OutgoingMessage, encryption: KeyRing) -> OutgoingMessage:
    check(message, f"messages[{place}].")
    return sealed(message, encryption)


def _key_ring(file: str | Path) -> KeyRing:
    # Imported only where there are keys: it needs the package cryptography.
    try:
        ring: KeyRing = import_module("slatemq.encryption").KeyRing.from_file(file)
    except ImportError as error:
        raise ImportError("encryption needs cryptography: install slatemq[cli]") from error
    return ring


def _telemetry(endpoint: str) -> Telemetry:
    # Imported only where tracing is on: it costs time, and needs packages.
    try:
        made: Telemetry = import_module("slatemq.otel").Telemetry(endpoint)
    except ImportError as error:
        raise ImportError("tracing needs OpenTelemetry: install slatemq[otel]") from error
    return made
