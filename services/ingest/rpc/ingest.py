"""IngestService, with the streams of publishes; protobuf messages stop here and in `wire`.

::

    requests ──read──▶ accept ──plain──▶ handed to the commit that gathers ──durable──┐
                          │                                                           ▼
                          └──keys, blobs, repeats──▶ a task, as for Publish ─────▶ answers

A call of its own costs ingest some 230 µs for a message of 1 KiB, before anything is done with it;
a message on a stream 60 (docs/decisions/0018-publish-streams.md). So no stream makes a task per
message that is not needed: the answers of one commit share a callback and a response.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.metrics import Observation

from libs.access.current import (
    ALL_QUEUES,
    caller_name,
    current_caller,
    headers_size,
    hold_back,
    require,
)
from libs.serving import limits
from libs.serving import telemetry as conventions
from libs.serving.peers.topology import (
    CACHE_MS,
    RESOLVE_AGAIN_MS,
    Topology,
    TopologyDirectory,
)
from libs.serving.requests.budget import SMALL_BYTES, AnswerBudget
from libs.serving.requests.guard import encoded, status_of
from libs.serving.telemetry import Telemetry, extract
from libs.storage.layout.ids import message_id
from services.ingest import wire
from services.ingest.batches import Accepted
from services.ingest.config import IngestConfig
from services.ingest.read.entries import part_behind
from services.ingest.read.etags import headers_etag
from services.ingest.read.message_runs import MessageRun, ResponseBudget
from services.ingest.read.tailing import Update
from services.ingest.shard import Shard
from services.ingest.write.publishing import SHARD_DRAINING, Publisher
from services.ingest.write.request_ids import Answered
from services.ingest.write.waiting import Waiting
from slatemq._cancelling import is_cancelled
from slatemq.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc

log = logging.getLogger(__name__)

READ_BYTES: Final = 32 << 20
"""Payload bytes in one answer when the caller sets no bound."""

FRESH_IDS_MAX: Final = 64
FRESH_BYTES_MAX: Final = 64 << 10
"""The last messages of the log go with their entries: to read so few takes a broker as long as to
read a thousand, and consumers wait for it. More are cheaper to read."""

HASHES_INLINE_MAX: Final = 4096
"""Hashes of dedupe keys computed on the event loop: 4 ms."""

SPAN: Final = {
    conventions.MESSAGING_SYSTEM: "slatemq",
    conventions.MESSAGING_OPERATION_NAME: "publish",
    conventions.MESSAGING_OPERATION_TYPE: "send",
}
"""What the span of a publish and the count of its messages have."""

UNANSWERED_MAX: Final = 1000
"""Requests of one stream without an answer; what they hold is bounded like that of any publish."""

UNANSWERED_MESSAGES_MAX: Final = 100_000
"""Messages of these requests, of which each has an ID in an answer that may not be read. With the
request that reaches it, the answers take 3 MiB."""

RESPONSE_MESSAGES_MAX: Final = wire.MESSAGES_MAX
"""Messages of the answers that go in one response: as many as one answer may have."""

METHOD: Final = "/slatemq.v1.IngestService/PublishStream"

Requests = AsyncGenerator[ingest_pb2.PublishStreamRequest, bool]
"""See libs.serving.requests.reading: True releases what the last request holds."""


class _Stream:
    """One stream of publishes. `error` ends it, once everything that was read is answered."""

    def __init__(
        self,
        publisher: Publisher,
        accept: Callable[[ingest_pb2.PublishRequest], Awaitable[Accepted]],
        publish: Callable[[Accepted, int], Awaitable[ingest_pb2.PublishResponse]],
        count: Callable[[int], None],
        *,
        publishes_all: bool,
    ) -> None:
        """`accept` checks a request, and the publisher enqueues it if it is plain.

        `publish` stores one that was not enqueued, by its `timeout_ms`; with `publishes_all`, every
        one. `count` gets the number of messages that were enqueued and stored.
        """
        self.error: BaseException | None = None
        self._publisher = publisher
        self._accept = accept
        self._publish = publish
        self._count = count
        self._publishes_all = publishes_all
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._unanswered_messages = 0
        self._answers: deque[tuple[ingest_pb2.PublishStreamAnswer, int]] = deque()
        self._commit: asyncio.Future[None] | None = None
        self._of_commit: list[tuple[int, Waiting]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._is_read = False
        self._wanted: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    # --- Answers ------------------------------------------------------------

    async def next(self) -> list[ingest_pb2.PublishStreamAnswer]:
        """The next answers to send; empty at the end."""
        while not self._answers:
            if self._is_read and not self._unanswered:
                return []
            self._wanted = self._loop.create_future()
            await self._wanted
        answer, messages_count = self._answers.popleft()
        answers = [answer]
        while self._answers and messages_count + self._answers[0][1] <= RESPONSE_MESSAGES_MAX:
            answer, count = self._answers.popleft()
            answers.append(answer)
            messages_count += count
        self._unanswered -= len(answers)
        self._unanswered_messages -= messages_count
        _wake(self._room)
        return answers

    def _answer(self, answer: ingest_pb2.PublishStreamAnswer, messages_count: int) -> None:
        """Have this sent; the request that it answers has this number of messages."""
        self._answers.append((answer, messages_count))
        _wake(self._wanted)

    def _refuse(self, number: int, error: BaseException, messages_count: int) -> None:
        status = status_of(METHOD, error)
        refusal = ingest_pb2.PublishStreamAnswer(number=number, error=status)
        self._answer(refusal, messages_count)

    # --- Requests -----------------------------------------------------------

    def begin(self, requests: Requests) -> None:
        self._reading = asyncio.create_task(self._read(requests))

    def end(self, error: BaseException) -> None:
        """Stop reading, and end with this error."""
        self.error = self.error or error
        if self._reading is not None:
            self._reading.cancel()

    def close(self) -> None:
        """The call is over: give up requests without an answer."""
        if self._reading is not None:
            self._reading.cancel()
        for task in self._tasks:
            task.cancel()

    async def _read(self, requests: Requests) -> None:
        try:
            async for request in requests:
                self._unanswered += 1
                refusal = await self._take(request.number, request.publish, request.timeout_ms)
                del request
                if isinstance(refusal, SlateMQError) or self._is_full:
                    # A client that waits, or reads no answers, keeps no memory of other requests
                    # meanwhile. A second time would drop the next request.
                    await requests.asend(True)
                if isinstance(refusal, SlateMQError):
                    await hold_back(refusal, is_publish=True)
                while self._is_full:
                    self._room = self._loop.create_future()
                    await self._room
        except SlateMQError as error:
            self.error = self.error or error
        except Exception:
            log.exception("reading the requests of a stream failed")
            self.error = Internal("internal error; the service's log says more")
        finally:
            self._is_read = True
            _wake(self._wanted)

    @property
    def _is_full(self) -> bool:
        """Whether no more is read before answers are sent."""
        return (
            self._unanswered >= UNANSWERED_MAX
            or self._unanswered_messages >= UNANSWERED_MESSAGES_MAX
        )

    async def _take(
        self, number: int, request: ingest_pb2.PublishRequest, timeout_ms: int
    ) -> Exception | None:
        """Begin to store a request; returns the error of one that is refused."""
        waiting: Waiting | None = None
        try:
            accepted = await self._accept(request)
            if timeout_ms < 0:
                raise InvalidArgument("timeout_ms", "must not be negative")
            if accepted.is_plain and not self._publishes_all:
                plain = Waiting(accepted)
                waiting = plain if self._publisher.enqueue(plain) else None
        except asyncio.CancelledError:
            self._refuse(number, _draining(), 0)  # It was read: the stream waits for its answer.
            raise
        except Exception as error:  # noqa: BLE001 - all are answered, as the guard does it
            self._refuse(number, error, 0)
            return error.with_traceback(None)  # Its frames would keep the request.
        self._unanswered_messages += len(accepted.payloads)
        if waiting is None:
            task = asyncio.create_task(self._store(number, accepted, timeout_ms))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        commit = self._publisher.commits.newest()
        if commit is self._commit:
            self._of_commit.append((number, waiting))
            return None
        assert commit is not None, "something was handed over"
        self._commit, self._of_commit = commit, [(number, waiting)]
        given = self._of_commit
        commit.add_done_callback(lambda done: self._durable(done, given))
        return None

    def _durable(self, commit: asyncio.Future[None], given: list[tuple[int, Waiting]]) -> None:
        if commit is self._commit:
            self._commit = None
        error = commit.exception()
        messages_count = 0
        for number, waiting in given:
            count = len(waiting.accepted.payloads)
            problem = error or waiting.refusal
            if problem is not None:
                if error is not None:
                    self._publisher.give_up(waiting)
                self._refuse(number, problem, count)
                continue
            messages_count += count
            answer = published(waiting.answered)
            self._answer(ingest_pb2.PublishStreamAnswer(number=number, published=answer), count)
        self._count(messages_count)

    async def _store(self, number: int, accepted: Accepted, timeout_ms: int) -> None:
        count = len(accepted.payloads)
        try:
            answer = await self._publish(accepted, timeout_ms)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._refuse(number, Unavailable("the service is stopping", reason="STOPPING"), count)
        except Exception as error:  # noqa: BLE001 - all are answered, as the guard does it
            self._refuse(number, error, count)
        else:
            self._answer(ingest_pb2.PublishStreamAnswer(number=number, published=answer), count)


def published(answered: Answered) -> ingest_pb2.PublishResponse:
    return ingest_pb2.PublishResponse(
        message_ids=answered.message_ids,
        duplicates=[at for at, _ in answered.duplicates],
        received_at_ms=answered.received_at_ms,
    )


def _size_of(run: ingest_pb2.PublishRun) -> int:
    """About the bytes of a run, whose messages share their headers."""
    return headers_size(run.headers) + sum(map(len, run.payloads))


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)


def _draining() -> Unavailable:
    return Unavailable("the service is stopping", reason="DRAINING")


def rules_of(config: IngestConfig) -> wire.Rules:
    shared = config.instance
    return wire.Rules(shared.payload_bytes_max, shared.retention_s, shared.max_message_delay_ms)


class IngestServicer(ingest_pb2_grpc.IngestServiceServicer):
    """Serves an opened shard."""

    def __init__(
        self,
        config: IngestConfig,
        shard: Shard,
        directory: TopologyDirectory,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._shard = shard
        self._directory = directory
        self._rules = rules_of(config)
        self._answers = AnswerBudget(config.answers_bytes_max, "answers_bytes_max")
        self._telemetry = telemetry
        self._sent_count = 0
        telemetry.meter.create_observable_counter(
            conventions.SENT_MESSAGES,
            callbacks=[lambda _: [Observation(self._sent_count, SPAN)]],
            unit="{message}",
            description="Messages answered, repeats included",
        )
        # Each request has a span then.
        self._publishes_all = telemetry.traces
        self._streams: dict[_Stream, None] = {}
        self._is_draining = False

    def drain(self) -> None:
        """Stop reading streams of publishes; requests that were read are still answered."""
        self._is_draining = True
        for stream in self._streams:
            stream.end(_draining())

    @property
    def held_bytes(self) -> int:
        """Bytes not stored yet, and of responses; the cache has a bound of its own."""
        return self._shard.publisher.commits.uncommitted_bytes + self._answers.used_bytes

    async def Publish(
        self, request: ingest_pb2.PublishRequest, context: Any
    ) -> ingest_pb2.PublishResponse:
        return await self._publish(await self._accept(request))

    async def PublishStream(
        self, request_iterator: AsyncIterator[ingest_pb2.PublishStreamRequest], context: Any
    ) -> AsyncIterator[ingest_pb2.PublishStreamResponse]:
        if self._is_draining:
            raise _draining()
        stream = _Stream(
            self._shard.publisher,
            self._accept,
            self._publish_streamed,
            self._count_sent,
            publishes_all=self._publishes_all,
        )
        self._streams[stream] = None
        stream.begin(cast("Requests", request_iterator))
        try:
            while answers := await stream.next():
                yield ingest_pb2.PublishStreamResponse(answers=answers)
                del answers  # They are sent: the next may be hours away.
            if stream.error is not None:
                raise stream.error
        finally:
            self._streams.pop(stream, None)
            stream.close()

    async def _accept(self, request: ingest_pb2.PublishRequest) -> Accepted:
        caller = current_caller.get()
        if caller is not None:
            caller.quota.admit_publish()  # Before the work, where it would be for nothing.
        try:
            accepted = wire.accept(request, self._rules)
        except InvalidArgument:
            if caller is not None:
                caller.quota.charge(sum(map(_size_of, request.runs)))
            raise
        if caller is not None:
            await caller.publish(
                (place, run.headers, len(run.payloads), _size_of(run))
                for place, run in enumerate(request.runs)
            )
        return accepted

    async def _publish_streamed(
        self, accepted: Accepted, timeout_ms: int
    ) -> ingest_pb2.PublishResponse:
        """Publish what came on a stream; `timeout_ms` is that of its request."""
        return await self._publish(accepted)

    async def _publish(self, accepted: Accepted) -> ingest_pb2.PublishResponse:
        publisher = self._shard.publisher
        if accepted.dedupe_keys:
            try:
                await self._check_shards(accepted)
            except InvalidArgument:
                # A repeat of what was stored before the topology grew must not go elsewhere.
                first = await publisher.repeated(accepted)
                if first is None:
                    raise
                return published(first)
        count = len(accepted.payloads)
        complete = wire.carry_trace if self._telemetry.traces else None
        with self._publish_span(count, accepted):
            try:
                answered = await publisher.publish(accepted, complete)
            except FailedPrecondition as error:
                if error.reason == SHARD_DRAINING and accepted.dedupe_keys:
                    await self._check_shards(accepted)  # Says whose the keys are.
                raise
        self._count_sent(count)
        return published(answered)

    def _count_sent(self, count: int) -> None:
        self._sent_count += count

    def _publish_span(self, count: int, accepted: Accepted) -> AbstractContextManager[object]:
        """With traces on, a current span for a publish of `count` messages.

        It is below that of the call; in a stream, whose call has many publishes, below the one that
        made the first message.
        """
        if not self._telemetry.traces:
            return nullcontext()
        context = None
        if not trace.get_current_span().get_span_context().is_valid:
            context = extract(next(iter(accepted.columns.headers), {}))
        return self._telemetry.tracer.start_as_current_span(
            "publish",
            context,
            kind=trace.SpanKind.PRODUCER,
            attributes={**SPAN, conventions.MESSAGING_BATCH_MESSAGE_COUNT: count},
        )

    async def BatchGetMessages(
        self, request: ingest_pb2.BatchGetMessagesRequest, context: Any
    ) -> ingest_pb2.BatchGetMessagesResponse:
        # IDs count up: a caller that guesses them would see the messages of all queues.
        require("inspect", ALL_QUEUES)
        if request.max_bytes < 0:
            raise InvalidArgument("max_bytes", "must not be negative")
        wire.check_message_ids(request.message_ids, self._config.shard)
        principal, answers = caller_name(), self._answers
        wanted_bytes = request.max_bytes or READ_BYTES
        async with answers.fetching(wanted_bytes, principal=principal) as bytes_max:
            # Nothing of it but these bytes is kept until the caller has read them.
            data = await self._read(request, bytes_max)
        size_bytes = len(data)
        if size_bytes > bytes_max:  # a single message, or one with headers
            answers.hold(size_bytes, principal)
        else:
            answers.take_for(principal, size_bytes)
        context.add_done_callback(lambda _: answers.release_for(principal, size_bytes))
        return encoded(ingest_pb2.BatchGetMessagesResponse, data)

    async def _read(self, request: ingest_pb2.BatchGetMessagesRequest, bytes_max: int) -> bytes:
        shard = self._shard
        message_ids = list(request.message_ids)
        room = ResponseBudget(
            bytes_max, limits.message_bytes_max(self._config.instance.payload_bytes_max)
        )
        end = shard.log.end
        result = await shard.reader.read(message_ids, room, with_etags=request.with_etags)
        await shard.confirm_missing(result.missing_ids, end.last_message_id)
        return result.encode()

    async def TailLog(
        self, request: ingest_pb2.TailLogRequest, context: Any
    ) -> AsyncIterator[ingest_pb2.TailLogResponse]:
        shard = self._shard
        if request.after_sequence > shard.log.end.last_message_id:
            await shard.prove_ownership()
        async with aclosing(self._updates(request.after_sequence)) as updates:
            async for update in updates:
                messages = self._fresh_messages(update)
                size_bytes = sum(len(value) for _, value in update.entries)
                size_bytes += sum(len(one) for run in messages for one in run.payloads)
                # Even when others hold it all: the log must not stand still for them.
                self._answers.take(size_bytes)
                try:
                    yield _tailed(update, messages)
                finally:
                    self._answers.release(size_bytes)

    def _fresh_messages(self, update: Update) -> list[MessageRun]:
        """The messages of an update that a broker would ask for at once, if it is a short one."""
        if not update.entries or update.entries[0][0] <= update.durable_sequence - FRESH_IDS_MAX:
            return []
        ids = range(update.entries[0][0], update.durable_sequence + 1)
        return self._shard.reader.cached(list(ids), FRESH_BYTES_MAX)

    async def _updates(self, position: int) -> AsyncGenerator[Update, None]:
        """What a tail sends: shares, so that tails which are not read leave room for the others.

        Where the memory for answers is used up, an entry that is larger comes in parts. Each is
        read when it is wanted, so that nothing but the part is kept meanwhile.
        """
        answers, is_inside = self._answers, False
        while True:
            tail = self._shard.log.tail(position, lambda: answers.share_bytes)
            async with aclosing(tail) as updates:
                async for update in updates:
                    entries, end = update.entries, update.durable_sequence
                    # Not where the rest of the entry was purged meanwhile.
                    is_inside = is_inside and bool(entries) and entries[0][0] <= position
                    size_bytes = sum(len(value) for _, value in entries)
                    if is_inside or (size_bytes > SMALL_BYTES and answers.is_exceeded):
                        break
                    yield update
            position = max(position, entries[0][0] - 1)
            part = await part_behind(entries[0][1], position, answers.share_bytes)
            position, is_inside = part.last_message_id, not part.is_end
            del update, entries
            yield Update([(part.sequence, part.value)], end)

    async def Push(self, request: ingest_pb2.PushRequest, context: Any) -> ingest_pb2.PushResponse:
        pushed = wire.accept_push(request, self._rules)
        shard = self._shard
        try:
            last_number = await shard.publisher.push(*pushed)
        except FailedPrecondition:
            await shard.prove_ownership()
            raise
        return ingest_pb2.PushResponse(last_number=last_number)

    async def ReplaceMessage(
        self, request: ingest_pb2.ReplaceMessageRequest, context: Any
    ) -> ingest_pb2.ReplaceMessageResponse:
        replacement = wire.to_replacement(
            request, self._config.instance.payload_bytes_max, self._config.shard
        )
        shard = self._shard
        end = shard.log.end
        try:
            etag = await shard.replacer.replace(replacement)
        except NotFound:
            await shard.confirm_missing([request.message_id], end.last_message_id)
            raise
        except Aborted:
            await shard.prove_ownership()
            raise
        return ingest_pb2.ReplaceMessageResponse(etag=etag)

    async def GetMessageMetadata(
        self, request: ingest_pb2.GetMessageMetadataRequest, context: Any
    ) -> ingest_pb2.GetMessageMetadataResponse:
        message_id, shard = request.message_id, self._shard
        wire.check_message_id(message_id, self._config.shard)
        end = shard.log.end
        found = await shard.reader.metadata(message_id)
        if found is None:
            await shard.confirm_missing([message_id], end.last_message_id)
            raise NotFound("message", str(message_id))
        return ingest_pb2.GetMessageMetadataResponse(
            headers=found.headers,
            direct_queue_id=found.direct_queue_id,
            headers_etag=headers_etag(found.headers),
        )

    async def GetLogStatus(
        self, request: ingest_pb2.GetLogStatusRequest, context: Any
    ) -> ingest_pb2.GetLogStatusResponse:
        shard = self._shard
        first_sequence = shard.log.bounds.first_sequence
        return ingest_pb2.GetLogStatusResponse(
            shard=self._config.shard,
            durable_sequence=shard.log.end.last_message_id,
            first_sequence=max(first_sequence, message_id(self._config.shard, 1)),
            gaps=[
                ingest_pb2.LogGap(after_sequence=gap.after, next_sequence=gap.next)
                for gap in shard.gaps.gaps
            ],
        )

    async def FindLogPosition(
        self, request: ingest_pb2.FindLogPositionRequest, context: Any
    ) -> ingest_pb2.FindLogPositionResponse:
        if request.received_at_ms < 0:
            raise InvalidArgument("received_at_ms", "must not be negative")
        shard = self._shard
        position = await shard.log.position_before(request.received_at_ms)
        await shard.prove_ownership()
        return ingest_pb2.FindLogPositionResponse(after_sequence=position)

    async def RaisePurgeEpoch(
        self, request: ingest_pb2.RaisePurgeEpochRequest, context: Any
    ) -> ingest_pb2.RaisePurgeEpochResponse:
        raised = await self._shard.purge_epoch.raise_by_one()
        return ingest_pb2.RaisePurgeEpochResponse(purge_epoch=raised)

    async def _check_shards(self, accepted: Accepted) -> None:
        """Raise InvalidArgument for a dedupe key of another shard."""
        try:
            await self._check_shards_of(accepted, await self._topology())
        except InvalidArgument:
            # Others may know already that the keys are this shard's, since another one drains.
            await self._check_shards_of(accepted, await self._topology(RESOLVE_AGAIN_MS))

    async def _topology(self, max_age_ms: int = CACHE_MS) -> Topology:
        return await self._directory.read(max_age_ms)

    async def _check_shards_of(self, accepted: Accepted, topology: Topology) -> None:
        own, shards = self._config.shard, set(topology.open_ingests)
        if not self._shard.publisher.is_draining or not shards:
            shards.add(own)
        else:
            shards.discard(own)
        if shards == {own}:
            return
        if len(shards) * len(accepted.dedupe_keys) > HASHES_INLINE_MAX:
            await asyncio.to_thread(wire.check_dedupe_shards, accepted, shards, self._config.shard)
        else:
            wire.check_dedupe_shards(accepted, shards, self._config.shard)


def _tailed(update: Update, messages: Sequence[MessageRun]) -> ingest_pb2.TailLogResponse:
    return ingest_pb2.TailLogResponse(
        entries=[ingest_pb2.LogEntry(sequence=at, value=value) for at, value in update.entries],
        durable_sequence=update.durable_sequence,
        messages=[
            ingest_pb2.StoredRun(common=common, message_ids=ids, payloads=payloads)
            for common, ids, payloads, _ in messages
        ],
    )
