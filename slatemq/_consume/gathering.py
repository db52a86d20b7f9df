"""Claiming once from all partitions of a queue: first what is there, then what comes first.

::

    partitions in turn, without waiting ──something──► it, and what the next ones have, until
                                           │           there is enough, or one does not answer
                                        ──nothing────► a stream from each, until one brings some:
                                           │           all stop, and what is too much goes back
                                        ──silence────► partitions in turn again

A call that is cancelled may lose its response, and its messages an attempt. A stream that is
stopped delivers what is on its way before it ends; so nothing is lost that comes twice. And the
call to a broker that is not waited for any longer goes on: what it still brings goes back,
uncounted.
"""

from __future__ import annotations

import asyncio
import random
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from slatemq._consume.claims import claim_once
from slatemq._consume.delivered import Claimed, Origin, Received, claimed_of, received
from slatemq._rpc.peers import ATTEMPT_S, BACKOFF_S_MAX, closed, errors_translated
from slatemq._rpc.queue_locations import (
    REFUSED_S,
    QueueLocations,
    is_absent,
    without_partitions,
)
from slatemq.errors import (
    INGEST_DOWN,
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

CREDIT_BYTES: Final = 32 << 20
"""Payload bytes of a waiting claim that sets no limit, as the server has it."""


async def claim_from_all(
    locations: QueueLocations, request: consumer_pb2.ClaimRequest, origin: Origin, call_s: float
) -> list[Received]:
    """Up to `max_messages` of a queue, whichever partitions have them.

    What does not answer is waited for as long as `call_s`, beyond the wait, unless others have
    some. Raises as a claim does; where brokers do not answer and the others have nothing,
    Unavailable (INCOMPLETE). Of a queue without partition 0, FailedPrecondition
    (PARTITIONS_MISSING) without a wait: its deletion is under way or broke off.
    """
    shards = await locations.located(request.queue_id, call_s=call_s)
    if len(shards) == 1:
        claimed = await claim_once(locations, origin.finisher, request, call_s)
        return received(claimed, origin)
    gathering = _Gathering(locations, request, origin, shards, call_s)
    until_s = time.monotonic() + request.wait_ms / 1000
    try:
        await gathering.take_present()
        if not gathering.is_settled and time.monotonic() < until_s:
            await gathering.wait(until_s)
        if not gathering.is_settled:
            await gathering.take_late(until_s + call_s)
    except BaseException:
        gathering.give_up()
        raise
    return gathering.result()


@dataclass(eq=False)
class _Gathering:
    _locations: QueueLocations
    _request: consumer_pb2.ClaimRequest
    _origin: Origin
    _shards: tuple[int, ...]
    _call_s: float
    """How long a call to a partition goes on, beyond its wait."""
    messages: list[Received] = field(default_factory=list, init=False)
    _bytes: int = field(default=0, init=False)
    _problems: dict[int, SlateMQError] = field(default_factory=dict, init=False)
    """Why a partition does not answer, by its index."""
    _lost: dict[int, SlateMQError] = field(default_factory=dict, init=False)
    """Why a claim from a partition has no answer, which may have claimed some."""
    _claims: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _asked: dict[int, int] = field(default_factory=dict, init=False)
    _found: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_over: bool = field(default=False, init=False)
    _is_deleted: bool = field(default=False, init=False)
    """Whether partition 0 does not exist, which is created first and deleted first."""

    @property
    def is_settled(self) -> bool:
        """Whether no wait is needed: there are messages, or the queue is deleted."""
        return bool(self.messages) or self._is_deleted

    @property
    def _silence_s(self) -> float:
        """How long it waits for a silent partition: twice, where another is silent, too."""
        return min(REFUSED_S, self._call_s / 2)

    @property
    def _try_s(self) -> float:
        """How long a call goes on, also when its caller has left: it brings what goes back."""
        return max(self._call_s, ATTEMPT_S)

    @property
    def _count(self) -> int:
        return self._request.max_messages or 1

    async def take_present(self) -> None:
        """Claims what the partitions have, from a random one on, until there is enough.

        Where one does not answer, what others had before is enough; if they had nothing, all that
        are left are asked at once. So silence costs the same with many silent partitions.
        """
        first = random.randrange(len(self._shards))
        turns = [(first + step) % len(self._shards) for step in range(len(self._shards))]
        while turns and not self._is_enough():
            if not await self._take(turns.pop(0)):
                if not self.messages:
                    await asyncio.gather(*map(self._take, turns))
                return

    async def take_late(self, until_s: float) -> None:
        """Where there is nothing, asks again until those that are silent have answered."""
        until_s -= 2 * self._silence_s  # How long it takes at most.
        while self._is_only_silent() and time.monotonic() < until_s:
            await _set_within(self._found, self._silence_s / 4)
            if not self.messages:
                await self.take_present()

    def _is_only_silent(self) -> bool:
        problems = self._problems.values()
        is_silent = any(isinstance(one, Unavailable | DeadlineExceeded) for one in problems)
        return is_silent and not self.messages and all(map(_is_down, problems))

    def _is_enough(self) -> bool:
        limit_bytes = self._request.max_bytes
        return len(self.messages) >= self._count or 0 < limit_bytes <= self._bytes

    async def _take(self, index: int) -> bool:
        """Claims what a partition has; False where it does not answer in time."""
        request = consumer_pb2.ClaimRequest()
        request.CopyFrom(self._request)
        request.wait_ms = 0
        request.max_messages = self._count - len(self.messages)
        if self._request.max_bytes:
            request.max_bytes = max(self._request.max_bytes - self._bytes, 1)
        claiming = self._claims.get(index)
        if claiming is None or claiming.done():
            claiming = self._claims[index] = self._begin(self._claim(request, index), index)
        try:
            await asyncio.wait([claiming], timeout=self._silence_s)
        finally:
            self._origin.finisher.keep(claiming)
        if not claiming.done():
            self._problems[index] = DeadlineExceeded("no answer came in time")
            return False
        if not claiming.cancelled():
            claiming.result()
        return True

    def _begin(self, work: Coroutine[Any, Any, None], index: int) -> asyncio.Task[None]:
        """A call to a partition. Nothing but the end of the client cancels it, which is noted."""

        def note(ended: asyncio.Task[None]) -> None:
            if ended.cancelled():
                self._problems[index] = closed()

        task = asyncio.create_task(work)
        task.add_done_callback(note)
        return task

    async def _claim(self, request: consumer_pb2.ClaimRequest, index: int) -> None:
        until_s = time.monotonic() + REFUSED_S

        def check(error: SlateMQError) -> None:
            if time.monotonic() > until_s:
                raise error

        def lost(error: SlateMQError) -> None:
            self._lost[index] = error

        try:
            finisher = self._origin.finisher
            claimed = await claim_once(
                self._locations, finisher, request, self._try_s, check, index, lost
            )
        except SlateMQError as error:
            self._problems[index] = error
            self._note_absence(index, error)
        else:
            self._problems.pop(index, None)
            self._add(claimed)

    def _note_absence(self, index: int, error: SlateMQError) -> None:
        """Notes that a queue is being deleted: its other partitions get no more messages."""
        if not index and is_absent(error, self._request.queue_id):
            self._is_deleted = True
            self._found.set()  # Their streams end.

    def _add(self, claimed: Claimed) -> None:
        if self._is_over:
            self._release(received(claimed, self._origin))
            return
        self.messages += received(claimed, self._origin)
        self._bytes += sum(map(len, claimed.payloads))
        if self.messages:
            self._found.set()

    async def wait(self, until_s: float) -> None:
        """Waits for the first messages of any partition."""
        streams = {
            self._begin(self._stream(index, until_s), index) for index in range(len(self._shards))
        }
        finding = asyncio.create_task(self._found.wait())
        try:
            while streams and not finding.done():
                ended, going = await asyncio.wait({*streams, finding}, return_when=FIRST_COMPLETED)
                for stream in streams & ended:
                    if not stream.cancelled():
                        stream.result()
                streams &= going
            # The leases of what some have brought must not end while another broker is silent.
            if streams:
                await asyncio.wait(streams, timeout=REFUSED_S)
        finally:
            finding.cancel()
            for stream in streams:
                self._origin.finisher.keep(stream)

    def give_up(self) -> None:
        """All that was claimed goes back, uncounted, and all that still comes."""
        self._is_over = True
        self._found.set()
        self._release(self.messages)

    def _release(self, messages: Sequence[Received]) -> None:
        self._origin.finisher.release_soon(message.lease_token for message in messages)

    async def _stream(self, index: int, until_s: float) -> None:
        """A stream of one partition until some has messages; opened again where it breaks."""
        while not self._found.is_set() and (left_s := until_s - time.monotonic()) > 0:
            peers = self._locations.peers
            proof = peers.proof
            try:
                await self._read(index, left_s)
            except SlateMQError as refused:
                error = self._problems[index] = peers.renewed(refused, proof)
                if isinstance(error, Unavailable | DeadlineExceeded | ResourceExhausted):
                    if error.reason == "CLIENT_CLOSED":
                        return
                    peers.forget()
                elif not await self._locations.may_have_moved(
                    self._request.queue_id, self._asked.get(index), error, index
                ):
                    self._note_absence(index, error)
                    return
            else:
                self._problems.pop(index, None)
                return
            await _set_within(self._found, min(BACKOFF_S_MAX, until_s - time.monotonic()))

    async def _read(self, index: int, left_s: float) -> None:
        """Reads a stream that is stopped once any partition has messages, or the wait is over."""
        shard = await self._locations.shard_of(self._request.queue_id, index)
        self._asked[index] = shard
        stub: Any = consumer_pb2_grpc.ConsumerServiceStub(await self._locations.peers.broker(shard))
        call = stub.Consume(
            timeout=left_s + self._try_s,
            metadata=self._locations.naming(self._request.queue_id, index),
        )
        stopping: asyncio.Task[None] | None = None
        try:
            with errors_translated(self._locations.peers.process("broker", shard)):
                await call.write(consumer_pb2.ConsumeRequest(start=self._start()))
                stopping = asyncio.create_task(self._stop(call, left_s))
                awaited: Sequence[int] = ()
                while (answer := await call.read()) is not grpc.aio.EOF:
                    claimed = claimed_of(answer)
                    self._add(claimed)
                    awaited = claimed.awaited_shards
            if awaited:
                raise Unavailable(f"messages wait for ingest {awaited[0]}", reason=INGEST_DOWN)
        finally:
            if stopping is not None:
                stopping.cancel()
            call.cancel()

    def _start(self) -> consumer_pb2.ConsumeStart:
        start = consumer_pb2.ConsumeStart(
            queue_id=self._request.queue_id,
            lease_ms=self._request.lease_ms,
            consumer_id=self._request.consumer_id,
        )
        start.credit.messages_count = self._count
        start.credit.payload_bytes = self._request.max_bytes or CREDIT_BYTES
        return start

    async def _stop(self, call: Any, left_s: float) -> None:
        await _set_within(self._found, left_s)
        await call.write(consumer_pb2.ConsumeRequest(stop=consumer_pb2.ConsumeStop()))

    def result(self) -> list[Received]:
        """What was claimed; the rest goes back, uncounted. Raises where nothing was, and why.

        The leases of what is returned must not end while the broker of the rest is silent.
        """
        self._is_over = True
        self._found.set()
        wanted, surplus = self.messages[: self._count], self.messages[self._count :]
        self._release(surplus)
        problems = {**self._lost, **self._problems}
        if not wanted and problems:
            raise self._problem(problems)
        return wanted

    def _problem(self, problems: Mapping[int, SlateMQError]) -> SlateMQError:
        for error in problems.values():
            if not _is_down(error):
                return error
        if len(problems) == len(self._shards):
            return next(iter(problems.values()))
        return without_partitions(self._request.queue_id, self._shards, problems)


def _is_down(error: SlateMQError) -> bool:
    """Whether a broker does not answer, or does not have its partition."""
    is_down = isinstance(error, Unavailable | DeadlineExceeded | NotFound)
    return is_down and error.reason not in (INGEST_DOWN, "CLIENT_CLOSED")


async def _set_within(event: asyncio.Event, wait_s: float) -> None:
    """Waits for an event, or until the time is over."""
    try:
        async with asyncio.timeout(max(wait_s, 0)):
            await event.wait()
    except TimeoutError:
        return
