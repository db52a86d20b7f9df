"""What waits for messages of a queue: a claim, once, or a stream, again and again.

A waiter stands in line as long as it wants something. What is claimed for it, it takes in the same
turn; then it says what it still wants. A stream wants nothing while it has claimed messages that
are not sent: so no lease grows old before it is sent, and a stream holds one response at most. A
large claim takes its messages in several turns, between which others have theirs.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.broker.core.leases import Claimed
from services.broker.core.queue import Queue
from services.broker.delivery.message_cache import CachedMessage, Fetch
from services.broker.requests.limits import not_negative
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError
from slatemq.v1 import consumer_pb2

if TYPE_CHECKING:
    from libs.access.quotas import PrincipalQuota

OUTSTANDING_MAX = 100_000
"""Credit of a stream in messages at most."""

TURN = 2000
"""The most messages claimed in one turn: a few ms of work, in which others wait.

No claim begins in a turn that has claimed and passed over as many. It is a whole number of blocks
of tokens, so that a claim in several turns has runs as long as one.
"""

ANSWER_BYTES_MAX = 64 << 20
"""Messages in one answer, headers and all, unless one alone is larger: gRPC's limit is above it."""

LOOK_AHEAD = 10_000
"""Messages examined, and fetched, for the claims of one queue at a time: as many as one response of
an ingest has, and as one claim may ask for."""

UNLIMITED = 1 << 62
"""Bytes: more than a claim can have."""


def packed_shards(shards: Iterable[int]) -> array[int]:
    """Shards in ascending order, each once: 2 bytes of each, where a set has 50 or more."""
    return array("H", sorted(set(shards)))


NO_SHARDS = packed_shards(())


class ClaimBatch(NamedTuple):
    """The result of one claim: leases, their messages in the same order, and the bytes of these."""

    claimed: Claimed
    held: list[CachedMessage]
    size_bytes: int = 0


class Waiter(ABC):
    """A claim or stream. A `patient` one also waits for messages that are not there yet."""

    def __init__(self, consumer: str, lease_ms: int, *, patient: bool = True) -> None:
        self.consumer = consumer
        self.lease_ms = lease_ms
        self.patient = patient
        self.context = copy_context()  # What is read for it is in the trace of its call.

    @property
    @abstractmethod
    def wants(self) -> int:
        """How many messages to claim for it now; 0: it is taken out of the line."""

    @property
    @abstractmethod
    def bytes_left(self) -> int:
        """How many bytes of payloads fit; one message fits always, unless it `has_begun`."""

    principal = ""
    """Of its caller; empty where there is no policy."""

    quota: PrincipalQuota | None = None
    """What this principal takes."""

    since_s = 0.0
    """Since when it has waited for messages, by the monotonic clock."""

    has_begun = False
    """Whether it has some messages of its response, and takes more only without waiting."""

    answer_bytes_left = ANSWER_BYTES_MAX
    """How many bytes fit into its answer, headers and all."""

    awaited_shards: array[int] = NO_SHARDS
    """Ingest shards that messages of its queue wait for."""

    @abstractmethod
    def take(self, batch: ClaimBatch) -> None:
        """Takes what was claimed for it, at least one message."""

    @abstractmethod
    def failed(self, error: SlateMQError | None) -> None:
        """Has left the line: for an error, or (None) impatient and without messages."""

    def await_ingests(self, shards: array[int]) -> None:
        """Notes `awaited_shards`."""
        self.awaited_shards = shards


class OneClaim(Waiter):
    """A unary claim: takes what comes first, in as many turns as that needs."""

    def __init__(
        self,
        consumer: str,
        lease_ms: int,
        count: int,
        payload_bytes: int,
        *,
        patient: bool,
        known_awaited: array[int] | None = None,
    ) -> None:
        """`known_awaited`: another `awaited_shards` ends its waiting; None: none does."""
        super().__init__(consumer, lease_ms, patient=patient)
        self.awaited_shards = known_awaited or NO_SHARDS
        self._ends_early = known_awaited is not None
        self.done = asyncio.Event()
        self.batches: list[ClaimBatch] = []
        self.error: SlateMQError | None = None
        self._count = count
        self._bytes = payload_bytes

    @property
    def wants(self) -> int:
        return 0 if self.done.is_set() else self._count

    @property
    def bytes_left(self) -> int:
        return self._bytes

    def take(self, batch: ClaimBatch) -> None:
        self.batches.append(batch)
        self.has_begun = True
        self._count -= len(batch.held)
        self._bytes -= sum(len(payload) for payload, _ in batch.held)
        self.answer_bytes_left -= batch.size_bytes
        # A turn that was not full was cut by something else: there is no more, or not for it.
        if len(batch.held) < TURN or self._count <= 0 or self._bytes <= 0:
            self.done.set()

    def await_ingests(self, shards: array[int]) -> None:
        """Ends the claim on a change, if its consumer wants that."""
        super().await_ingests(shards)
        if self._ends_early and self.patient:
            self.done.set()

    def failed(self, error: SlateMQError | None) -> None:
        """A claim that has messages ends without the error."""
        if not self.batches:
            self.error = error
        self.done.set()


class Stream(Waiter):
    """A Consume stream: its credit, and what was claimed and is not sent."""

    def __init__(self, consumer: str, lease_ms: int, *, keep_leases: bool = False) -> None:
        super().__init__(consumer, lease_ms)
        self.error: SlateMQError | None = None
        self.keep_leases = keep_leases
        self.is_closed = False
        self.is_stopped = False
        self._heard_ms = 0
        self._count_left = 0
        self._bytes_left: int | None = None  # None: never limited
        self._last_credit = False
        self._ended = False
        self._sending: list[ClaimBatch] = []
        self._unsent: list[ClaimBatch] = []
        self._sent_shards = NO_SHARDS
        self._wake = asyncio.Event()

    @property
    def _has_credit(self) -> bool:
        return self._count_left > 0 and (self._bytes_left is None or self._bytes_left > 0)

    @property
    def wants(self) -> int:
        busy = bool(self._unsent or self._sending)
        if self._ended or busy or not self._has_credit:
            return 0
        return min(self._count_left, TURN)

    @property
    def bytes_left(self) -> int:
        return UNLIMITED if self._bytes_left is None else self._bytes_left

    def grant(self, credit: consumer_pb2.ConsumeCredit, field: str) -> None:
        """Adds credit; InvalidArgument when it is none or too much."""
        count, size = credit.messages_count, credit.payload_bytes
        for name, value in (("messages_count", count), ("payload_bytes", size)):
            not_negative(f"{field}.{name}", value)
        if not count and not size:
            raise InvalidArgument(f"{field}.messages_count", "grants nothing")
        if self._count_left + count > OUTSTANDING_MAX:
            raise InvalidArgument(
                f"{field}.messages_count",
                f"more than {OUTSTANDING_MAX} would be outstanding",
                reason="OUT_OF_RANGE",
            )
        self._count_left += count
        if size:
            self._bytes_left = (self._bytes_left or 0) + size

    def heard(self, now_ms: int) -> None:
        self._heard_ms = now_ms

    def is_alive(self, now_ms: int) -> bool:
        """Whether the stream is open and its consumer was heard of lately: see `keep_leases`."""
        return not self.is_closed and now_ms - self._heard_ms <= self.lease_ms // 2

    def stop(self) -> None:
        """Ends the stream when the claimed messages are sent: the consumer wants no more."""
        self.is_stopped = True
        self.failed(None)

    def no_more_credit(self) -> None:
        """The consumer closed its side: the stream ends with its credit."""
        self._last_credit = True
        self._wake.set()

    def take(self, batch: ClaimBatch) -> None:
        self._unsent.append(batch)
        self._spend((batch,), -1)
        self._wake.set()

    def take_back(self) -> Sequence[ClaimBatch]:
        """Takes back the claimed messages, with their credit; the caller releases their leases."""
        batches, self._unsent = self._unsent, []
        self._spend(batches, 1)
        return batches

    def _spend(self, batches: Sequence[ClaimBatch], sign: int) -> None:
        held = [one for part in batches for one in part.held]
        self._count_left += sign * len(held)
        if self._bytes_left is not None:
            self._bytes_left += sign * sum(len(payload) for payload, _ in held)

    def failed(self, error: SlateMQError | None) -> None:
        """The stream ends when the claimed messages are sent."""
        self._ended = True
        self.error = self.error or error
        self._wake.set()

    def await_ingests(self, shards: array[int]) -> None:
        """A change is sent without waiting for messages."""
        super().await_ingests(shards)
        self._wake.set()

    async def next(self) -> Sequence[ClaimBatch] | None:
        """The claimed messages; none when only `awaited_shards` are to be sent.

        None when the stream has ended (see `error`).
        """
        while not self._unsent:
            if self._ended or (self._last_credit and not self._has_credit):
                return None
            if self.awaited_shards != self._sent_shards:
                return ()
            self._wake.clear()
            await self._wake.wait()
        return self._unsent

    def sending(self) -> None:
        """The claimed messages are being sent: from here on their leases stay."""
        self._sending, self._unsent = self._unsent, []

    def sending_shards(self) -> Sequence[int]:
        """Returns `awaited_shards`, which go out now."""
        self._sent_shards = self.awaited_shards
        return sorted(self._sent_shards)

    def sent(self) -> Sequence[ClaimBatch]:
        """They were sent, and there is room for the next; returns them."""
        sent, self._sending = self._sending, []
        return sent


@dataclass(slots=True, eq=False)
class WaiterLine:
    queue: Queue
    line: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)
    impatient: dict[Waiter, None] = field(default_factory=dict)
    late: dict[int, Fetch] = field(default_factory=dict)
    """By ingest shard: fetches that it did not wait for."""
    passed: set[int] = field(default_factory=set)
    """Ingest shards whose messages the last look passed over."""
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    again: bool = False
    cut: bool = False  # a claim was cut at the end of a turn: it wants more now
    short: bool = False  # there were messages, but too many of all queues are in flight
    beyond_share: dict[str, PrincipalQuota | None] = field(default_factory=dict)
    """Principals whose waiters the last look passed over: they hold as many leases as they may."""
    shares: set[str] = field(default_factory=set)
    """Principals for whose leases it waits, or has a turn since some have ended."""
    all_beyond: bool = False  # for that reason it passed over all
    unread: bool = False  # some were passed over for what their principals leave unread
    stuck: bool = False  # there were messages at the last look, and none could be claimed
    reading_since_s: float = 0.0  # when the last look began to read behind what it passed over
    behind: bool = False  # and it has not read all of that
    unavailable: SlateMQError | None = None
    has_awaiting: bool = False  # a waiter has a note of ingests that messages wait for

    @property
    def is_open(self) -> bool:
        """Whether messages may find a taker: there may be thousands in line that may take none."""
        return bool(self.line) and not self.all_beyond

    def enter(self, waiter: Waiter) -> None:
        waiter.since_s = time.monotonic()
        self.line[waiter] = None
        self.has_awaiting |= bool(waiter.awaited_shards)
        if not waiter.patient:
            self.impatient[waiter] = None

    def await_ingests(self, shards: Set[int]) -> None:
        """Notes with those in line for which ingests messages of the queue wait."""
        if not shards and not self.has_awaiting:
            return
        self.has_awaiting = bool(shards)
        awaited = packed_shards(shards)
        for waiter in self.line:
            if waiter.awaited_shards != awaited:
                waiter.await_ingests(awaited)

    def look_again(self) -> None:
        """Forgets whom the last look passed over."""
        self.unread = False
        if self.beyond_share:
            self.beyond_share = {}

    def is_late(self, shard: int) -> bool:
        """Whether an ingest has not answered a fetch of this line yet."""
        fetch = self.late.get(shard)
        return fetch is not None and not fetch.is_done

    def leave(self, waiter: Waiter) -> None:
        del self.line[waiter]
        self.impatient.pop(waiter, None)

    def wanted(self, is_held_up: Callable[[Waiter], bool]) -> int:
        """How many messages to examine for the waiters in line that are not held up."""
        # No more than there are: most waiters wait on a queue without messages.
        most = min(self.queue.waiting.ready_count + self.queue.waiting.timed_count, LOOK_AHEAD)
        wanted = 0
        for waiter in self.line:
            if wanted >= most:
                return most
            if not is_held_up(waiter):
                wanted += waiter.wants
        return min(wanted, most)


def paused(queue: Queue) -> FailedPrecondition:
    """The error for claims on a paused queue."""
    return FailedPrecondition(
        "QUEUE_PAUSED", f"queue {queue.queue_id!r} is paused", subject=queue.queue_id
    )
