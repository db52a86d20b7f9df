"""Messages that a consumer holds: read them, then ack them or give them back."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, overload

from slatemq._consume.claimed import Claimed
from slatemq._consume.finishing import Finisher, Nack, nack_of
from slatemq._consume.handles import handle_of
from slatemq._consume.keeping import Lease, LeaseKeeper, seconds_from_claim
from slatemq._rpc.bounds import cut_reason
from slatemq._rpc.failures import has_failed, reason_of
from slatemq._rpc.forks import refuse_pickling
from slatemq.errors import FailedPrecondition, NotFound, SlateMQError
from slatemq.models import Duration, milliseconds
from slatemq.v1.consumer_pb2 import ClaimedRun

if TYPE_CHECKING:
    from slatemq.otel import Processing, Telemetry

log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """The queue of messages, and what acks and keeps them."""

    queue_id: str
    finisher: Finisher
    keeper: LeaseKeeper | None = None
    telemetry: Telemetry | None = None


class Received:
    """A claimed message.

    Ack it, nack it, or use it as a context manager that does::

        async with message:
            work(message.payload)

    Leaving acks; an exception nacks, with itself as the reason, and goes on. A block that is
    cancelled releases the message: its attempt did not fail. Messages of a consumer are acked in
    the background: at most 1,000 acks are without an answer, failures are logged, and closing the
    consumer waits for them. To know that an ack is durable, use `await message.ack()`.
    """

    __slots__ = (
        "_finished",
        "_headers",
        "_lease",
        "_origin",
        "_place",
        "_processing",
        "_run",
        "lease_token",
        "payload",
    )

    lease_token: str
    """Proves the claim; `Client.ack`, `nack` and `extend` take it too."""

    payload: bytes
    """The bytes as they were published."""

    _headers: Mapping[str, str]

    def __reduce__(self) -> NoReturn:
        raise refuse_pickling(self, "Pass its payload and headers, and finish it here")

    def __init__(
        self, run: ClaimedRun, place: int, lease_token: str, payload: bytes, origin: Origin
    ) -> None:
        # The client makes thousands of these: the rest is read when it is asked for.
        self._run = run
        self._place = place
        self.lease_token = lease_token
        self.payload = payload
        self._origin = origin
        self._lease: Lease | None = None
        self._finished = False
        self._processing: Processing | None = None

    @property
    def message_id(self) -> int:
        """Unique in the instance."""
        return self._run.message_ids[self._place]

    @property
    def queue_id(self) -> str:
        """The queue it was claimed from."""
        return self._origin.queue_id

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers as they were published; KeyError for one that is not there."""
        try:
            return self._headers
        except AttributeError:
            self._headers = dict(self._run.common.headers)
            return self._headers

    @property
    def created_at_ms(self) -> int:
        """When its producer made it, in ms since the Unix epoch."""
        return self._run.common.created_at_ms

    @property
    def received_at_ms(self) -> int:
        """When SlateMQ accepted it, in ms since the Unix epoch."""
        return self._run.common.received_at_ms

    @property
    def retention_s(self) -> int:
        """How long it lives from its receipt, in seconds; 0 = for ever."""
        return self._run.common.retention_s

    @property
    def lease_deadline_ms(self) -> int:
        """When the lease ended as of the claim; the background extends it."""
        return self._run.lease_deadline_ms

    @property
    def lease_ms(self) -> int:
        """How long the lease runs from the claim: what was asked for, or the queue's most."""
        return self._run.lease_ms

    @property
    def attempts_count(self) -> int:
        """How often it was claimed from this queue, this time included."""
        return self._run.attempts_count

    @property
    def priority(self) -> int:
        """Its priority in this queue, 0 the most urgent."""
        return self._run.priority

    @property
    def handle(self) -> str:
        """Names its entry, for `get_entry` and others."""
        return handle_of(self.queue_id, self.message_id, f"l{self.lease_token}")

    @property
    def lost(self) -> bool:
        """Whether its lease was lost: another consumer may have the message."""
        return self._lease is not None and self._lease.lost

    @property
    def finished(self) -> bool:
        """Whether it was acked or given back through this object."""
        return self._finished

    async def ack(self) -> None:
        """The message is processed; returns when that is durable.

        Raises FailedPrecondition (LEASE_ENDED: another consumer may have it; MESSAGE_FINISHED),
        NotFound (the queue is gone), Unavailable.
        """
        self._finish()
        telemetry = self._origin.telemetry
        if telemetry is None:
            await self._origin.finisher.ack(self.lease_token)
        else:
            with telemetry.settling("ack", self.queue_id, self.message_id):
                await self._origin.finisher.ack(self.lease_token)

    async def nack(self, reason: str = "", delay: Duration | None = None) -> None:
        """The message failed: it comes again, after `delay` (at most 12 h), or is a dead letter.

        `delay` None: as the queue's backoff says; 0: at once. Raises as `ack` does, and
        InvalidArgument.
        """
        await self._release("nack", nack_of(self.lease_token, reason, delay))

    async def release(self, delay: Duration = 0) -> None:
        """The message was not worked on: it goes back, and the attempt is not counted."""
        await self._release("release", nack_of(self.lease_token, "", delay, release=True))

    async def fail(self, reason: str = "") -> None:
        """The message cannot be processed: it becomes a dead letter, with attempts left or not.

        Raises as `ack` does, and InvalidArgument.
        """
        reason = cut_reason(reason)
        self._finish()
        telemetry = self._origin.telemetry
        if telemetry is None:
            await self._origin.finisher.fail(self.lease_token, reason)
        else:
            with telemetry.settling("fail", self.queue_id, self.message_id):
                await self._origin.finisher.fail(self.lease_token, reason)

    async def extend(self, lease: Duration | None = None) -> int:
        """Sets the lease's end to now + `lease` (None: as long as at the claim); gives it in ms."""
        length = milliseconds(lease, "lease") if lease is not None else 0
        (result,) = await self._origin.finisher.extend_many([self.lease_token], length)
        if isinstance(result, SlateMQError):
            raise result
        if self._lease is not None:
            length_s = seconds_from_claim(self._run, result)
            self._lease.extended(self._lease.held_at_s + length_s)
        return result

    async def _release(self, name: str, item: Nack) -> None:
        self._finish()
        telemetry = self._origin.telemetry
        if telemetry is None:
            await self._origin.finisher.nack(item)
        else:
            with telemetry.settling(name, self.queue_id, self.message_id):
                await self._origin.finisher.nack(item)

    def _finish(self) -> None:
        if self._finished:
            raise FailedPrecondition(
                "MESSAGE_FINISHED", "this message was acked or given back already"
            )
        self.settled()

    def settled(self) -> None:
        """Ends keeping its lease: it was finished here or by `Client.execute`."""
        self._finished = True
        if self._origin.keeper is not None:
            self._origin.keeper.drop(self.lease_token)

    def begin(self) -> None:
        """Begins the span of its processing, where there are any."""
        if self._origin.telemetry is not None:
            self._processing = self._origin.telemetry.processing(self)

    def end(self, error: BaseException | None) -> None:
        """Ends the span."""
        if self._processing is not None:
            self._processing.end(error)
            self._processing = None

    async def __aenter__(self) -> Received:
        self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.leave(error)
        finally:
            self.end(error)

    async def leave(self, error: BaseException | None) -> None:
        """Acks, nacks or releases, unless that was done."""
        if self._finished:
            return
        if error is None:
            await self._ack_on_leaving()
        elif has_failed(error):
            try:
                await self.nack(reason_of(error))
            except SlateMQError as problem:
                # The error in the caller's block matters more.
                log.warning("message %d could not be released: %s", self.message_id, problem)
        else:
            # Not awaited: a cancelled task wants to end. Closing the client waits for the release.
            self._finish()
            self._origin.finisher.release_soon([self.lease_token])

    async def _ack_on_leaving(self) -> None:
        if self._lease is not None:
            self._finish()
            await self._origin.finisher.ack_soon(self.lease_token)
            return
        try:
            await self.ack()
        except (FailedPrecondition, NotFound) as problem:
            # The work is done, and nothing in the block was wrong: it was only too slow.
            log.warning("message %d may come again: %s", self.message_id, problem)

    def __repr__(self) -> str:
        return (
            f"<Received {self.message_id} of {self.queue_id!r}, attempt {self.attempts_count}, "
            f"{len(self.payload)} bytes>"
        )


def received(claimed: Claimed, origin: Origin, hold_s: float = 0.0) -> list[Received]:
    """Messages of their origin. Where it has a keeper, that holds them for at most `hold_s`."""
    runs, places, lease_tokens, payloads, _ = claimed
    messages = list(map(Received, runs, places, lease_tokens, payloads, repeat(origin)))
    if origin.keeper is not None:
        now_s = time.monotonic()
        for message in messages:
            message._lease = origin.keeper.hold(
                message.lease_token, message.lease_ms, hold_s, now_s
            )
    return messages


class Batch(Sequence[Received]):
    """Messages that were claimed together; as a context manager acked or given back together.

    Messages that were finished one by one are left out of that.
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
        return await self._finish(self._origin.finisher.ack_many)

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
            lambda tokens: nack_many([item._replace(lease_token=token) for token in tokens])
        )

    async def _finish(
        self, send: Callable[[list[str]], Awaitable[list[SlateMQError | None]]]
    ) -> list[SlateMQError | None]:
        messages = self._take()
        try:
            return await send([message.lease_token for message in messages])
        except SlateMQError:
            for message in messages:  # Their outcome is unknown.
                message._finished = False
            raise

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            refused = [one for one in await self.ack_all() if one is not None]
            if refused:
                log.warning("%d messages may come again: %s", len(refused), refused[0])
        elif has_failed(error):
            try:
                await self.nack_all(reason_of(error))
            except SlateMQError as problem:
                log.warning("%d messages could not be released: %s", len(self), problem)
        else:
            self._origin.finisher.release_soon(message.lease_token for message in self._take())

    def _take(self) -> list[Received]:
        """What is not finished, which now is."""
        messages = [message for message in self._messages if not message._finished]
        for message in messages:
            message.settled()
        return messages

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} of {self._origin.queue_id!r}>"
