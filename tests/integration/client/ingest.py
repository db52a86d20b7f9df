"""An ingest of a few lines that misbehaves on demand, for tests of the client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY, grpc_code, to_status
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import InvalidArgument, SlateMQError, Unavailable
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc

RECEIVED_AT_MS = 1_700_000_000_000


async def refuse(context: Any, error: SlateMQError) -> None:
    status = to_status(error)
    details = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(grpc_code(status), error.message, details)


@dataclass
class Ingest(ingest_pb2_grpc.IngestServiceServicer):
    """Stores batches, once for each request ID.

    Attributes:
        before: Refuses a request instead of storing it.
        after: Refuses a request although it is stored: its answer is lost.
        gate: Publishes wait for it.
        keys: The IDs of the messages that came with dedupe keys.
        shards: The shards that it knows of; it refuses the keys of others.
        streamed: How many requests came on streams.
        breaks: How many requests on streams are stored, and answered by a break of the stream.
    """

    shard: int = 0
    before: deque[SlateMQError] = field(default_factory=deque)
    after: deque[SlateMQError] = field(default_factory=deque)
    stored: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    seen: dict[str, tuple[bytes, list[tuple[int, bool]]]] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    shards: list[int] = field(default_factory=lambda: [0])
    calls: list[tuple[float, str, int]] = field(default_factory=list)
    streamed: int = 0
    breaks: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def BatchGetMessages(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetLogStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def TailLog(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def FindLogPosition(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Push(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def RaisePurgeEpoch(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetMessageMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ReplaceMessage(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def PublishStream(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        async for request in requests:
            self.streamed += 1
            publish_stream_answer = ingest_pb2.PublishStreamAnswer(number=request.number)
            if self.breaks:
                self.breaks -= 1
                await self._publish(request.publish)
                await refuse(context, Unavailable("the stream broke", retry_after_ms=1))
            try:
                publish_stream_answer.published.CopyFrom(await self._publish(request.publish))
            except SlateMQError as error:
                publish_stream_answer.error.CopyFrom(to_status(error))
            yield ingest_pb2.PublishStreamResponse(answers=[publish_stream_answer])

    async def Publish(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            return await self._publish(request)
        except SlateMQError as error:
            await refuse(context, error)

    async def _publish(self, request: Any) -> Any:
        now = asyncio.get_running_loop().time()
        messages = dict(self._messages(request))
        self.calls.append((now, request.request_id, len(messages)))
        self.asked.set()
        await self.gate.wait()
        if self.before:
            raise self.before.popleft()
        if not messages:
            raise InvalidArgument("runs", "1 to 10000 messages, not 0")
        for named, message in messages.items():
            (payload,), (key,) = message.payloads, message.dedupe_keys
            if payload == b"bad":
                raise InvalidArgument(named, "is too large")
            if key and dedupe_shard(key, self.shards) != self.shard:
                named = named.replace("payloads", "dedupe_keys")
                raise InvalidArgument(named, "no", reason="WRONG_SHARD")
        content = b"".join(m.SerializeToString(deterministic=True) for m in messages.values())
        known = self.seen.get(request.request_id)
        if known is not None and known[0] != content:
            raise InvalidArgument("request_id", "used before")
        if known is None:
            known = content, [self._store(message) for message in messages.values()]
            self.seen[request.request_id] = known
        if self.after:
            raise self.after.popleft()
        answer = ingest_pb2.PublishResponse(received_at_ms=RECEIVED_AT_MS)
        for place, (message_id, duplicate) in enumerate(known[1]):
            answer.message_ids.append(message_id)
            if duplicate:
                answer.duplicates.append(place)
        return answer

    def _messages(self, request: Any) -> Iterator[tuple[str, Any]]:
        """The messages by what an error about their payloads names."""
        for index, run in enumerate(request.runs):
            keys = run.dedupe_keys or [""] * len(run.payloads)
            for place, (payload, key) in enumerate(zip(run.payloads, keys, strict=True)):
                message = ingest_pb2.PublishRun()
                message.CopyFrom(run)
                del message.payloads[:], message.dedupe_keys[:]
                message.payloads.append(payload)
                message.dedupe_keys.append(key)
                yield f"runs[{index}].payloads[{place}]", message

    def _store(self, message: Any) -> tuple[int, bool]:
        (payload,), (key,) = message.payloads, message.dedupe_keys
        if key in self.keys:
            return self.keys[key], True
        self.stored.append(payload)
        self.headers.append(dict(message.headers))
        message_id = (self.shard << 48) + len(self.stored)
        if key:
            self.keys[key] = message_id
        return message_id, False
