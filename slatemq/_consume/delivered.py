"""Claimed messages: read from the answer, their leases kept, then acked or given back.

The broker could keep the leases of what a stream delivered (`keep_leases`). This client does not
ask for it: only a consumer that extends learns that a lease is lost and can let go of a message
that is held for too long, and messages outlive their stream here, when it breaks and when their
consumer is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from slatemq._cancelling import is_cancelled
from slatemq._consume.finishing import BATCH_MAX, LAST, Finisher, Nack, OnDone, nack_of
from slatemq._consume.handles import handle_of, places_by_shard
from slatemq._rpc.forks import refuse_pickling
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.models import Duration, bounded_delay_ms, cut_reason, milliseconds
from slatemq.v1.consumer_pb2 import ClaimedRun, ClaimResponse, ConsumeResponse

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing
    from slatemq.otel import Processing, Telemetry


def has_failed(error: BaseException) -> bool:
    """Whether work failed, rather than was cancelled or stopped with the program.

    A CancelledError without a cancellation of this task, say of one that it awaited, is a failure.
    """
    if isinstance(error, asyncio.CancelledError):
        return not is_cancelled()
    return isinstance(error, Exception)


def reason_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


I = TypeVar("I")  # noqa: E741 - an item


class Claimed(NamedTuple):
    """The messages of a response in the order of delivery, as columns."""

    runs: Sequence[ClaimedRun]
    """What each message shares with its neighbours."""
    places: Sequence[int]
    """The place of each message in its run."""
    lease_tokens: Sequence[str]
    payloads: Sequence[bytes]
    awaited_shards: Sequence[int]
    """Ingest shards that other messages of the queue wait for."""


def claimed_of(response: ClaimResponse | ConsumeResponse) -> Claimed:
    """The messages of a response. Raises Internal for a malformed run: takes no message then."""
    runs = response.runs
    contents = [run.payloads for run in runs]
    if set(map(len, contents)) == {1}:
        # By columns, since a loop over runs of one would take half as long again.
        ones = list(runs)
        if set(map(len, [run.message_ids for run in ones])) != {1}:
            for run in ones:
                _check(run, 1)
        tokens = [run.lease_token for run in ones]
        payloads = [content[0] for content in contents]
        return Claimed(ones, [0] * len(ones), tokens, payloads, response.awaited_ingest_shards)
    each, places, tokens, payloads = list[ClaimedRun](), list[int](), list[str](), list[bytes]()
    for run, content in zip(runs, contents, strict=True):
        tokens += _tokens_of(run)
        size = len(content)
        each += [_without_payloads(run)] * size
        places += range(size)
        payloads += content
    return Claimed(each, places, tokens, payloads, response.awaited_ingest_shards)


def _tokens_of(run: ClaimedRun) -> list[str]:
    """The token of each message, counted up. Raises Internal for a malformed run."""
    token, size = run.lease_token, len(run.payloads)
    try:
        first = int(token[-2:], 16)
    except ValueError:
        raise Internal(f"a broker answered with a bad token: {token!r:.80}") from None
    _check(run, min(size, len(LAST) - first))
    prefix = token[:-2]
    return [prefix + last for last in LAST[first : first + size]]


def _check(run: ClaimedRun, tokens_count: int) -> None:
    """Each message needs an ID, a payload and a token: or acks would reach other messages."""
    ids_count, payloads_count = len(run.message_ids), len(run.payloads)
    if not ids_count == payloads_count == tokens_count > 0:
        raise Internal(
            f"a broker answered with {ids_count} IDs, {payloads_count} payloads, "
            f"and tokens from {run.lease_token!r:.80} on"
        )


def _without_payloads(run: ClaimedRun) -> ClaimedRun:
    """A copy that keeps nothing of the response, which has all payloads once more."""
    return ClaimedRun(
        common=run.common,
        message_ids=run.message_ids,
        lease_deadline_ms=run.lease_deadline_ms,
        attempts_count=run.attempts_count,
        priority=run.priority,
        lease_ms=run.lease_ms,
    )


log = logging.getLogger(__name__)

LOOK_S_MAX = 0.3
"""A lease has 1 s at least, of which a third may be over when it is looked at."""

LOOK_S_MIN = 0.05

NO_ANSWER = (Unavailable, DeadlineExceeded, ResourceExhausted)
"""What a call raises that was repeated in vain."""


_OVER = asyncio.Event()
_OVER.set()


class Lease:
    """One lease that is kept.

    Attributes:
        token: Proves the claim.
        held_at_s: Since when, by the monotonic clock.
        buffered: The message was not taken yet: when it is held for too long, it is released.
        given_back: It is kept only until its release is answered.
        refused: The broker has said that it ended, or it was given up.
    """

    __slots__ = (
        "_extension",
        "_length_ms",
        "_next",
        "_until",
        "buffered",
        "given_back",
        "held_at_s",
        "refused",
        "token",
    )

    def __init__(self, token: str, length_ms: int, hold_s: float, now: float) -> None:
        self.token = token
        self._length_ms = length_ms
        self.held_at_s = now
        self._next = now + length_ms / 3000
        self._until = now + hold_s
        self._extension = _OVER  # the newest one; set once it is over
        self.buffered = True
        self.given_back = False
        self.refused = False

    @property
    def lost(self) -> bool:
        """Whether it may have ended: another consumer may have the message.

        Where no extension is answered, that is so once its time is over, whatever the broker says
        later: this process may have stood still, or be cut off.
        """
        return self.refused or time.monotonic() >= self.ends_at_s

    @property
    def ends_at_s(self) -> float:
        """Until when it runs at least, by the monotonic clock."""
        return self._next + self._length_ms / 1500

    def extended(self, ends_at_s: float) -> None:
        """Its owner has extended it until then: sooner the keeper would only shorten it."""
        self._next = ends_at_s - self._length_ms / 1500

    @asynccontextmanager
    async def extending(self) -> AsyncIterator[None]:
        """Around an extension by its owner: of two at once, the keeper's could come second."""
        while not self._extension.is_set():
            await self._extension.wait()
        self._extension = over = asyncio.Event()
        try:
            yield
        finally:
            over.set()


def seconds_from_claim(claimed: ClaimedMessage, deadline_ms: int) -> float:
    """How long a lease that ends then runs: all by the broker's clock, which is another one."""
    return (deadline_ms - claimed.lease_deadline_ms + claimed.lease_ms) / 1000


class LeaseKeeper:
    """Extends leases at a third of their length, until they are dropped or held for too long."""

    def __init__(self, finisher: Finisher) -> None:
        self.finisher = finisher
        self._held: dict[str, Lease] = {}
        self._task: asyncio.Task[None] | None = None
        self._extensions: set[asyncio.Task[None]] = set()
        self._extended = asyncio.Event()
        self._closed = False

    def hold(self, token: str, length_ms: int, hold_s: float, now: float | None = None) -> Lease:
        """Keeps a lease of this length alive, for at most `hold_s` seconds; `now` is monotonic."""
        lease = Lease(token, length_ms, hold_s, time.monotonic() if now is None else now)
        self.hold_again(lease)
        return lease

    def hold_again(self, lease: Lease) -> None:
        """Goes on with a lease that was dropped for a call that had no answer."""
        self._held[lease.token] = lease
        if self._task is None and not self._closed:
            # Not in the trace of the message that happens to come first.
            self._task = asyncio.create_task(self._keep(), context=Context())

    def take(self, lease: Lease) -> bool:
        """Whether a buffered message may be worked on; where its lease is lost, it is given back.

        The broker may not know the end yet that this process has seen, as after its own restart.
        """
        lease.buffered = False
        if lease.lost and not lease.refused:
            self._give_back(lease)
        return not lease.refused

    def drop(self, token: str) -> None:
        """The message is finished, or given up."""
        self._held.pop(token, None)

    def drop_all(self, tokens: Iterable[object]) -> None:
        """They are finished, or given up."""
        if self._held:
            # Values that are not tokens are refused by name later.
            for token in (one for one in tokens if isinstance(one, str)):
                self._held.pop(token, None)

    async def close(self) -> None:
        self._closed = True
        self._held.clear()
        ending = {*self._extensions, *([self._task] if self._task is not None else [])}
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def _keep(self) -> None:
        try:
            while self._held:
                self._extended.clear()
                self._extend_due(time.monotonic())
                idle = [one._next for one in self._held.values() if one._extension.is_set()]
                pause_s = min(idle, default=inf) - time.monotonic()
                # What falls due meanwhile goes together, and what was refused is not asked at once.
                await asyncio.sleep(LOOK_S_MIN)
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(pause_s, LOOK_S_MAX) - LOOK_S_MIN):
                        await self._extended.wait()
        finally:
            self._task = None

    def _extend_due(self, now: float) -> None:
        """Begins to extend what is due.

        One call has leases of one broker shard and of one length: a shard that does not answer, for
        a third of that, holds up none of another, and long leases no short ones.
        """
        due = [one for one in self._held.values() if one._next <= now and one._extension.is_set()]
        by_length: dict[int, list[Lease]] = {}
        for lease in due:
            if now < lease._until or lease.given_back:
                by_length.setdefault(lease._length_ms, []).append(lease)
            else:
                self._give_up(lease)
        for length_ms, leases in by_length.items():
            by_shard, _ = places_by_shard([lease.token for lease in leases])
            for places in by_shard.values():
                for start in range(0, len(places), BATCH_MAX):
                    some = [leases[place] for place in places[start : start + BATCH_MAX]]
                    self._begin_extension(some, length_ms)

    def _begin_extension(self, leases: list[Lease], length_ms: int) -> None:
        over = asyncio.Event()
        for lease in leases:
            lease._extension = over
        task = asyncio.create_task(self._extend(leases, length_ms))
        self._extensions.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._extensions.discard(task)
            over.set()
            self._extended.set()

        task.add_done_callback(end)

    def _give_up(self, lease: Lease) -> None:
        """Stops keeping a lease that was held for too long."""
        if lease.buffered:
            # It was not taken yet: it must not lose an attempt in a buffer.
            self._give_back(lease)
        else:
            self.drop(lease.token)
            log.warning("a message is held for longer than `hold`: its lease is left to end")

    def _give_back(self, lease: Lease) -> None:
        """Releases it, and keeps it until that is answered: a lease that ends costs an attempt."""
        lease.given_back = lease.refused = True
        self._release(lease)

    def _release(self, lease: Lease) -> None:
        def note(results: Sequence[BaseException | None]) -> None:
            if not any(isinstance(problem, NO_ANSWER) for problem in results):
                self.drop(lease.token)

        self.finisher.release_soon([lease.token], note)

    async def _extend(self, leases: list[Lease], length_ms: int) -> None:
        began_s = time.monotonic()  # A lease ends by when it was extended, not by the answer.
        try:
            results = await self.finisher.extend_many(
                [lease.token for lease in leases], length_ms, call_s=length_ms / 3000
            )
        except SlateMQError as error:
            # The broker is down: again at the next look; after its restart leases have grace.
            log.debug("%d leases could not be extended now: %s", len(leases), error)
            return
        for lease, result in zip(leases, results, strict=True):
            if not isinstance(result, SlateMQError):
                lease._next = max(lease._next, began_s + length_ms / 3000)
                if lease.given_back and lease.token in self._held:
                    self._release(lease)  # The broker answers again.
            elif isinstance(result, FailedPrecondition | NotFound) and lease.token in self._held:
                self.drop(lease.token)
                lease.refused = True


class Origin(NamedTuple):
    """The queue of messages, what acks and keeps them, and the keys of their payloads."""

    queue_id: str
    finisher: Finisher
    keeper: LeaseKeeper | None = None
    telemetry: Telemetry | None = None
    encryption: KeyRing | None = None


class ClaimedMessage:
    """What is known of a claimed message; made by the client."""

    __slots__ = ("_headers", "_origin", "_payload", "_place", "_plain", "_run", "lease_token")

    lease_token: str
    """Proves the claim; `Client.ack`, `nack` and `extend` take it too."""

    _payload: bytes
    _plain: bytes
    _run: ClaimedRun
    _place: int
    _origin: Origin
    _headers: Mapping[str, str]

    @property
    def payload(self) -> bytes:
        """The bytes as they were published; with `encryption`, as they were before.

        An encrypted one raises FailedPrecondition (KEY_UNKNOWN) and DataLoss (NOT_DECRYPTED).
        """
        encryption = self._origin.encryption
        if encryption is None:
            return self._payload
        try:
            return self._plain
        except AttributeError:
            subject = f"message {self.message_id}"
            self._plain = encryption.open(self._payload, self.headers, subject)
            return self._plain

    @property
    def stored_payload(self) -> bytes:
        """The payload as it was published, encrypted or not."""
        return self._payload

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
        """How long it lives from its receipt, in seconds; 0 = forever."""
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

    def __repr__(self) -> str:
        return (
            f"<Received {self.message_id} of {self.queue_id!r}, attempt {self.attempts_count}, "
            f"{len(self._payload)} bytes>"
        )


class Received(ClaimedMessage):
    """A claimed message.

    Ack it, nack it, or use it as a context manager that does::

        async with message:
            work(message.payload)

    Leaving acks; an exception nacks, with itself as the reason, and goes on. A block that is
    cancelled releases the message: its attempt did not fail. Messages of a consumer are acked in
    the background: at most 1,000 acks are without an answer, failures are logged, and closing the
    consumer waits for them. To know that an ack is durable, use `await message.ack()`. Where that
    has no answer in the block, leaving acks again; after any other call without one the lease is
    left to end.
    """

    __slots__ = ("_finished", "_lease", "_processing", "_unanswered")

    def __reduce__(self) -> NoReturn:
        raise refuse_pickling(self, "Pass its payload and headers, and finish it here")

    def __init__(
        self, run: ClaimedRun, place: int, lease_token: str, payload: bytes, origin: Origin
    ) -> None:
        # The client makes thousands of these: the rest is read when it is asked for.
        self._run = run
        self._place = place
        self.lease_token = lease_token
        self._payload = payload
        self._origin = origin
        self._lease: Lease | None = None
        self._finished = False
        self._unanswered = ""  # what was to finish it, and had no answer
        self._processing: Processing | None = None

    @property
    def lost(self) -> bool:
        """Whether its lease was lost: another consumer may have the message."""
        lease = self._lease
        return lease is not None and (lease.refused or (lease.lost and not self._finished))

    @property
    def finished(self) -> bool:
        """Whether it was acked or given back through this object."""
        return self._finished

    async def ack(self) -> None:
        """The message is processed; returns when that is durable.

        Raises FailedPrecondition (LEASE_ENDED: another consumer may have it; MESSAGE_FINISHED),
        NotFound (the queue is gone). After any other error, such as Unavailable, the message is not
        finished, and this may be repeated.
        """
        await self._settle("ack", lambda: self._origin.finisher.ack(self.lease_token))

    async def nack(self, reason: str = "", delay: Duration | None = None) -> None:
        """The message failed: it comes again, after `delay` (at most 12 h), or is a dead letter.

        `delay` None: as the queue's backoff says; 0: at once. Raises as `ack` does, and
        InvalidArgument.
        """
        item = nack_of(self.lease_token, reason, delay)
        await self._settle("nack", lambda: self._origin.finisher.nack(item))

    async def release(self, delay: Duration = 0) -> None:
        """The message was not worked on: it goes back, and the attempt is not counted."""
        item = Nack(self.lease_token, "", bounded_delay_ms(delay), release=True)
        await self._settle("release", lambda: self._origin.finisher.nack(item))

    def release_soon(self) -> None:
        """Releases it in the background; closing the client waits for that."""
        self._finish()
        finisher, telemetry = self._origin.finisher, self._origin.telemetry
        if telemetry is None:
            finisher.release_soon([self.lease_token])
            return
        with telemetry.settling_soon("release", self.queue_id, message_id=self.message_id) as note:
            finisher.release_soon([self.lease_token], note)

    async def fail(self, reason: str = "") -> None:
        """The message cannot be processed: it becomes a dead letter, with attempts left or not.

        Raises as `ack` does, and InvalidArgument.
        """
        reason = cut_reason(reason)
        await self._settle("fail", lambda: self._origin.finisher.fail(self.lease_token, reason))

    async def extend(self, lease: Duration | None = None) -> int:
        """Ends the lease at now + `lease` (None: as long as at the claim); returns that in ms."""
        length = milliseconds(lease, "lease") if lease is not None else 0
        async with nullcontext() if self._lease is None else self._lease.extending():
            (result,) = await self._origin.finisher.extend_many([self.lease_token], length)
            if isinstance(result, SlateMQError):
                raise result
            if self._lease is not None:
                length_s = seconds_from_claim(self, result)
                self._lease.extended(self._lease.held_at_s + length_s)
        return result

    async def _settle(self, name: str, send: Callable[[], Awaitable[None]]) -> None:
        self._finish()
        telemetry = self._origin.telemetry
        try:
            if telemetry is None:
                await send()
                return
            with telemetry.settling(name, self.queue_id, message_id=self.message_id):
                await send()
        except (FailedPrecondition, NotFound):
            raise
        except SlateMQError:
            self.unsettled(name)
            raise

    def _finish(self) -> None:
        if self._finished:
            raise FailedPrecondition(
                "MESSAGE_FINISHED", "this message was acked or given back already"
            )
        self.settled()

    def settled(self) -> None:
        """Ends keeping its lease: it was finished here or by `Client.execute`."""
        self._finished = True
        self.drop_lease()

    def drop_lease(self) -> None:
        """Leaves its lease to end."""
        if self._origin.keeper is not None:
            self._origin.keeper.drop(self.lease_token)

    def unsettled(self, name: str) -> None:
        """Goes on keeping its lease: what was to finish it may not have taken effect."""
        self._finished = False
        self._unanswered = name
        if self._origin.keeper is not None and self._lease is not None:
            self._origin.keeper.hold_again(self._lease)

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

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            await self.leave(error)
        finally:
            self.end(error)

    async def leave(self, error: BaseException | None) -> None:
        """Acks, nacks or releases, unless that was done."""
        if self._finished:
            return
        if self._unanswered not in ("", "ack"):
            self.settled()  # It may have taken effect: the lease is left to end.
        elif error is None:
            await self._ack_on_leaving()
        elif self._unanswered:
            await self._ack_soon()  # The work is done.
        elif has_failed(error):
            try:
                await self.nack(reason_of(error))
            except SlateMQError as problem:
                self.settled()  # No caller repeats it: the lease is left to end.
                # The error in the caller's block matters more.
                log.warning("message %d could not be released: %s", self.message_id, problem)
        else:
            # Not awaited: a cancelled task wants to end.
            self.release_soon()

    async def _ack_soon(self) -> None:
        self._finish()
        finisher, telemetry = self._origin.finisher, self._origin.telemetry
        if telemetry is None:
            await finisher.ack_soon(self.lease_token)
            return
        with telemetry.settling_soon("ack", self.queue_id, message_id=self.message_id) as note:
            await finisher.ack_soon(self.lease_token, note)

    async def _ack_on_leaving(self) -> None:
        if self._lease is not None:
            await self._ack_soon()
            return
        try:
            await self.ack()
        except (FailedPrecondition, NotFound) as problem:
            # The work is done, and nothing in the block was wrong: it was only too slow.
            log.warning("message %d may come again: %s", self.message_id, problem)


def release_soon(origin: Origin, messages: Sequence[Received]) -> None:
    """Releases messages in the background, together."""
    _settle_soon(origin, "release", messages, origin.finisher.release_soon)


def acks_soon(origin: Origin, messages: Sequence[Received]) -> None:
    """Acks messages in the background, together."""
    _settle_soon(origin, "ack", messages, origin.finisher.acks_soon)


def _settle_soon(
    origin: Origin,
    name: str,
    messages: Sequence[Received],
    send: Callable[[list[str], OnDone | None], object],
) -> None:
    tokens = [message.lease_token for message in messages]
    if origin.telemetry is None or not messages:
        send(tokens, None)
        return
    with origin.telemetry.settling_soon(name, origin.queue_id, count=len(tokens)) as note:
        send(tokens, note)


async def settle_all(
    telemetry: Telemetry | None,
    name: str,
    queue_id: str,
    items: list[I],
    send: Callable[[list[I]], Awaitable[list[SlateMQError | None]]],
) -> list[SlateMQError | None]:
    """Settles messages together, as one operation; the queue is empty where it is not known."""
    if telemetry is None or not items:
        return await send(items)
    with telemetry.settling(name, queue_id, count=len(items)) as note:
        results = await send(items)
        note(results)
    return results


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
