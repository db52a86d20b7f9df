"""The messages that are about to be delivered: fetched from the ingests, kept until claimed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from typing import Any, Final, NamedTuple, TypeAlias

import grpc

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.storage.layout.ids import shard_of
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq._rpc.stored_runs import messages_of
from slatemq.errors import (
    Aborted,
    DataLoss,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from slatemq.v1.ingest_pb2 import (
    BatchGetMessagesRequest,
    BatchGetMessagesResponse,
    GetLogStatusRequest,
    GetMessageMetadataRequest,
    GetMessageMetadataResponse,
    RaisePurgeEpochRequest,
    ReplaceMessageRequest,
    StoredRun,
)
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub
from slatemq.v1.message_pb2 import Message

log = logging.getLogger(__name__)

FETCH_BYTES = 32 << 20
"""Payload bytes asked for at once: a full answer takes some 30 ms to send and decode."""

FETCH_DEADLINE_S = 10.0
"""An ingest that has not answered by then counts as down."""


OVERHEAD_BYTES = 500
"""About what a message costs beside its bytes: its objects, and its place in the cache."""

GONE = "payload gone"
"""The reason of a dead letter whose payload is not stored any more."""

DAMAGED = "payload damaged"
"""The reason of one whose stored bytes cannot be read."""

PREFETCH_MAX = 1000
"""Messages fetched at a time at most where fewer are asked for: of a long backlog a fetch costs
half a millisecond, however few messages it is for."""

PREFETCH_BYTES = 1 << 20
"""The most bytes to fetch ahead, judged by the size of earlier messages."""

FIRST_BYTES = 4 << 20
"""Asked for at most where nothing is known of the messages of a queue."""

FETCH_BYTES_MIN = 64 << 10
"""Asked for at least: messages may be larger than those before."""

PAUSE = 32
"""Fetches without more than is asked for, once it was seen that more is forgotten again."""

WINDOWS_MAX = 256
"""Queues that prefetch in turns; of more than these, each would only push the others out."""

REPLACE_DEADLINE_S = 30.0
"""For a message that is replaced: its payload may have to be uploaded."""


class ReadResult(NamedTuple):
    """Messages, their etags in the same order where these were asked for, and the IDs gone."""

    messages: Sequence[Message]
    etags: Sequence[str]
    missing_ids: Sequence[int]


CachedMessage: TypeAlias = tuple[bytes, bytes]
"""A message in memory: its payload, and what else it has but its ID.

That is a Message in protobuf's wire format, one object for all that share it, and perhaps larger
than the payload. A plain pair, which `zip` makes: each message has one.
"""


class IngestMessages(NamedTuple):
    """Messages that an ingest returned, and why others are unavailable (GONE, DAMAGED)."""

    held: dict[int, CachedMessage]
    size_bytes: int
    """Of the messages, what they share counted for each."""
    gone: dict[int, str]
    slow: Sequence[int] = ()
    """IDs of those that the ingest is still reading."""


def _decode_runs(runs: Iterable[StoredRun]) -> tuple[dict[int, CachedMessage], int]:
    """The messages of some runs, and their size as of IngestMessages."""
    held: dict[int, CachedMessage] = {}
    size_bytes = 0
    for run in runs:
        alike, common = run.message_ids, run.common
        if len(alike) == 1:
            payload = run.payloads[0]
            held[alike[0]] = (payload, common)
            size_bytes += len(payload) + len(common)
        else:
            payloads = run.payloads[:]
            held.update(zip(alike, zip(payloads, repeat(common), strict=False), strict=True))
            size_bytes += sum(map(len, payloads)) + len(payloads) * len(common)
    return held, size_bytes


def size_of(held: dict[int, CachedMessage]) -> int:
    return sum(map(len, chain.from_iterable(held.values())))


@dataclass(slots=True)
class FetchResult:
    """The outcome of a fetch, beside what is now in the cache."""

    gone: dict[int, str] = field(default_factory=dict)
    """Messages that are gone, with the reason."""
    slow: set[int] = field(default_factory=set)
    """Messages that their ingests are still reading."""
    down: set[int] = field(default_factory=set)
    """Ingest shards that did not answer."""
    count: int = 0
    """Messages fetched."""
    size_bytes: int = 0
    """See IngestMessages."""

    def add(self, other: FetchResult) -> None:
        self.gone |= other.gone
        self.slow |= other.slow
        self.down |= other.down
        self.count += other.count
        self.size_bytes += other.size_bytes


@dataclass(eq=False, slots=True)
class Fetch:
    """What one ingest is asked for, from `Payloads.begin` to `Payloads.end`."""

    shard: int
    max_bytes: int
    """How much of it there may be, unless one message alone is larger."""
    held: dict[int, CachedMessage] = field(default_factory=dict)
    """The messages that it has brought."""
    result: FetchResult = field(default_factory=FetchResult)
    forgotten: set[int] = field(default_factory=set)
    """What has changed since it began."""
    task: asyncio.Task[None] = field(init=False)

    @property
    def is_done(self) -> bool:
        return self.task.done()

    def forget(self, message_id: int) -> None:
        self.forgotten.add(message_id)
        self.held.pop(message_id, None)
        self.result.gone.pop(message_id, None)


_REFUSALS: Final = (Aborted, DataLoss, InvalidArgument, NotFound, ResourceExhausted)
"""What an ingest answers of a message; after other errors it counts as down."""


class Ingests:
    """Reads and changes messages in the ingests, over gRPC.

    A shard is removed once it has no messages: those that it had are gone.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._removed: set[int] = set()

    async def _is_removed(self, shard: int) -> bool:
        if shard not in self._removed:
            with self._unavailable(shard):
                if not await self._channels.is_removed("ingest", shard):
                    return False
            self._removed.add(shard)
        return True

    async def check(self, shard: int) -> None:
        """Return if an ingest answers, or was removed. Raises Unavailable."""
        if await self._is_removed(shard):
            return
        with self._unavailable(shard):
            stub = IngestServiceStub(await self._channels.to("ingest", shard))
            await stub.GetLogStatus(GetLogStatusRequest(), timeout=FETCH_DEADLINE_S)

    async def find_again(self) -> None:
        """Ask the present owners of all shards from now on. Raises StoreUnavailable."""
        await self._channels.find_again()

    async def raise_purge_epoch(self, shard: int) -> None:
        """Let an ingest refuse purges that were decided before. Raises Unavailable."""
        if await self._is_removed(shard):
            return
        with self._unavailable(shard):
            stub = IngestServiceStub(await self._channels.to("ingest", shard))
            await stub.RaisePurgeEpoch(RaisePurgeEpochRequest(), timeout=FETCH_DEADLINE_S)

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        """Messages of one shard as bytes, the first that fit. Raises Unavailable."""
        request = BatchGetMessagesRequest(message_ids=ids, max_bytes=max_bytes)
        answer = await self._read(shard, request)
        gone = dict.fromkeys(answer.missing_ids, GONE) | dict.fromkeys(answer.damaged_ids, DAMAGED)
        return IngestMessages(*_decode_runs(answer.runs), gone, answer.slow_ids)

    async def read(
        self, shard: int, ids: Sequence[int], max_bytes: int = FETCH_BYTES, *, etags: bool = False
    ) -> ReadResult:
        """Messages of one shard as objects, the first that fit. Raises Unavailable."""
        request = BatchGetMessagesRequest(message_ids=ids, max_bytes=max_bytes, with_etags=etags)
        answer = await self._read(shard, request)
        if answer.slow_ids and not answer.runs and not answer.missing_ids:
            raise Unavailable(
                f"ingest {shard} is still reading the payload of message {answer.slow_ids[0]}",
                reason="PAYLOAD_SLOW",
                retry_after_ms=1_000,
            )
        tags = [etag for run in answer.runs for etag in run.etags]
        return ReadResult(messages_of(answer.runs), tags, answer.missing_ids)

    async def _read(self, shard: int, request: BatchGetMessagesRequest) -> BatchGetMessagesResponse:
        if await self._is_removed(shard):
            return BatchGetMessagesResponse(missing_ids=request.message_ids)
        with self._unavailable(shard):
            stub = IngestServiceStub(await self._channels.to("ingest", shard))
            answer: BatchGetMessagesResponse = await stub.BatchGetMessages(
                request, timeout=FETCH_DEADLINE_S
            )
        return answer

    @contextmanager
    def _unavailable(self, shard: int) -> Iterator[None]:
        """Turn the failure of a call into Unavailable; the next call looks up the address again."""
        try:
            with peer_failures():
                yield
        except PeerFailed as failed:
            self._channels.doubt("ingest", shard)
            raise Unavailable(f"ingest {shard} is down: {failed}", reason="INGEST_DOWN") from failed

    async def replace(self, request: ReplaceMessageRequest) -> str:
        """Replace a message; returns its new etag. Raises the ingest's refusal, and Unavailable."""
        async with self._of_message(request.message_id) as stub:
            answer = await stub.ReplaceMessage(request, timeout=REPLACE_DEADLINE_S)
        return str(answer.etag)

    async def metadata(self, message_id: int) -> GetMessageMetadataResponse:
        """What decides who may edit a message. Raises NotFound, DataLoss, and Unavailable."""
        request = GetMessageMetadataRequest(message_id=message_id)
        async with self._of_message(message_id) as stub:
            answer: GetMessageMetadataResponse = await stub.GetMessageMetadata(
                request, timeout=FETCH_DEADLINE_S
            )
        return answer

    @asynccontextmanager
    async def _of_message(self, message_id: int) -> AsyncIterator[Any]:
        """The stub of the ingest that has a message; raises what it refuses, and Unavailable."""
        shard = shard_of(message_id)
        if await self._is_removed(shard):
            raise NotFound("message", str(message_id))
        try:
            with peer_failures():
                yield IngestServiceStub(await self._channels.to("ingest", shard))
        except PeerFailed as failed:
            cause = failed.__cause__
            problem = from_rpc_error(cause) if isinstance(cause, grpc.RpcError) else None
            if isinstance(problem, _REFUSALS):
                raise problem from None
            self._channels.doubt("ingest", shard)
            raise Unavailable(f"ingest {shard} is down: {failed}", reason="INGEST_DOWN") from failed


class Payloads:
    """A cache of messages, bounded in bytes, that fetches what it lacks.

    It has two halves: fetched messages enter the young one, and once that is full the old one is
    dropped whole. So evicting a message costs nothing of its own.
    """

    def __init__(self, ingests: Ingests, bytes_max: int) -> None:
        """Keep the newest messages: at most `bytes_max`, at least half of it."""
        self.hits_count = self.misses_count = 0  # of `look`, since the start
        self._ingests = ingests
        self._half_bytes = bytes_max // 2
        self._young_bytes = 0
        self._old_bytes = 0
        self._young: dict[int, CachedMessage] = {}
        self._old: dict[int, CachedMessage] = {}
        self._fetches: set[Fetch] = set()
        self._pinned: dict[object, dict[int, CachedMessage]] = {}
        self._edited: dict[int, int] = {}  # by ingest: no copy up to here is taken

    @property
    def size_bytes(self) -> int:
        """About what the cached messages take."""
        return self._young_bytes + self._old_bytes

    def get(self, message_id: int) -> CachedMessage | None:
        return self._young.get(message_id) or self._old.get(message_id)

    def look(self, ids: Sequence[int]) -> tuple[dict[int, CachedMessage], Sequence[int]]:
        """The messages that are cached, and the IDs of the others."""
        if self._young.keys().isdisjoint(ids) and self._old.keys().isdisjoint(ids):
            self.misses_count += len(ids)
            return {}, ids
        here: dict[int, CachedMessage] = {}
        missing = []
        for message_id in ids:
            held = self.get(message_id)
            if held is None:
                missing.append(message_id)
            else:
                here[message_id] = held
        self.hits_count += len(here)
        self.misses_count += len(missing)
        return here, missing

    @contextmanager
    def pin(self) -> Iterator[dict[int, CachedMessage]]:
        """For messages that are about to be handed out: the cache may lose them to others before.

        What is forgotten meanwhile leaves it.
        """
        key = object()
        pinned = self._pinned[key] = dict[int, CachedMessage]()
        try:
            yield pinned
        finally:
            del self._pinned[key]

    async def reaches(self, shard: int) -> bool:
        try:
            await self._ingests.check(shard)
        except Unavailable:
            return False
        return True

    async def fetch(
        self,
        ids: Sequence[int],
        pinned: dict[int, CachedMessage] | None = None,
        max_bytes: int = FETCH_BYTES,
    ) -> FetchResult:
        """Read messages into the cache and the pinned ones: the first that fit."""
        fetched = FetchResult()
        fetches = self.begin(ids, max_bytes, copy_context())
        try:
            await asyncio.gather(*(fetch.task for fetch in fetches))
            for fetch in fetches:
                fetched.add(fetch.result)
                if pinned is not None:
                    pinned.update(fetch.held)
        finally:
            for fetch in fetches:
                self.end(fetch)
        return fetched

    def begin(self, ids: Sequence[int], max_bytes: int, context: Context) -> list[Fetch]:
        """Begin to read messages into the cache, the first that fit: a fetch from each ingest."""
        if not ids:
            return []
        by_shard: dict[int, Sequence[int]] = {shard_of(ids[0]): ids}
        if shard_of(min(ids)) != shard_of(max(ids)):  # the shard is in the highest bits
            ordered = sorted(ids, key=shard_of)
            by_shard = {shard: list(part) for shard, part in groupby(ordered, shard_of)}
        share = max(max_bytes // len(by_shard), 1)
        fetches = []
        for shard, part in by_shard.items():
            fetch = Fetch(shard, share)
            fetch.task = asyncio.create_task(self._fetch(fetch, part), context=context)
            self._fetches.add(fetch)
            fetches.append(fetch)
        return fetches

    def end(self, fetch: Fetch) -> None:
        """What it has brought is needed no more; if it goes on, it is cancelled."""
        self._fetches.discard(fetch)
        fetch.task.cancel()

    async def _fetch(self, fetch: Fetch, ids: Sequence[int]) -> None:
        try:
            answer = await self._ingests.fetch(fetch.shard, ids, fetch.max_bytes)
        except Unavailable as error:
            log.debug("%s", error.message)
            fetch.result.down.add(fetch.shard)
            return
        messages, size_bytes, gone, slow = answer
        fetch.result = FetchResult(gone, set(slow), set(), len(messages), size_bytes)
        for message_id in fetch.forgotten:
            messages.pop(message_id, None)
        fetch.held = messages
        self._keep(messages, size_bytes)

    def forget(self, message_id: int) -> None:
        """The message has changed: drop it from the cache, from pins and from fetches in flight."""
        self._young.pop(message_id, None)
        self._old.pop(message_id, None)
        for fetch in self._fetches:
            fetch.forget(message_id)
        for pinned in self._pinned.values():
            pinned.pop(message_id, None)

    def take_no_copy_until(self, message_id: int) -> None:
        """Take no messages of this log, up to this one, that come with their assignments."""
        log = shard_of(message_id)
        self._edited[log] = max(message_id, self._edited.get(log, 0))

    def add_fresh(self, runs: Iterable[StoredRun], cursors: Mapping[int, int]) -> None:
        """Take messages that came with their assignment, unless it is applied already.

        Those may have been edited since; see `MessageEditor.forget`.
        """
        held, size_bytes = _decode_runs(runs)
        edited = self._edited
        known = {
            one
            for one in held
            if one <= cursors.get(log := shard_of(one), 0) or one <= edited.get(log, 0)
        }
        if known:
            held = {one: message for one, message in held.items() if one not in known}
            size_bytes = size_of(held)
        self._keep(held, size_bytes)

    def _keep(self, messages: dict[int, CachedMessage], size_bytes: int) -> None:
        # With what messages share counted for each: they may outlive one another here.
        size_bytes += len(messages) * OVERHEAD_BYTES
        if size_bytes > self._half_bytes:
            pairs = list(messages.items())
            middle = len(pairs) // 2
            if middle:
                for half in (dict(pairs[:middle]), dict(pairs[middle:])):
                    self._keep(half, size_of(half))
            return
        if self._young_bytes + size_bytes > self._half_bytes:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young.update(messages)
        self._young_bytes += size_bytes


class PrefetchWindow:
    """How many messages of a queue to fetch when some are missing."""

    __slots__ = ("_count", "_more", "_pause", "_size")

    def __init__(self) -> None:
        self._count = self._size = 0  # nothing is known of their sizes
        self._more: set[int] = set()
        self._pause = 0

    def count(self, first_id: int) -> int:
        """How many, where this is the first that is missing; 0: no more than are asked for."""
        if first_id in self._more:
            # It was fetched, and forgotten before it was its turn: memory is short.
            self._pause = PAUSE
        return 0 if self._pause else self._count

    def expected_bytes(self, count: int, most: int) -> int:
        """Bytes to ask for, for `count` messages: a quarter more than they had lately."""
        if not self._size:
            return min(FIRST_BYTES, most)
        return min(max(count * self._size * 5 // 4, FETCH_BYTES_MIN), FETCH_BYTES, most)

    def fetched(self, ids: Sequence[int], asked: int, fetched: FetchResult) -> None:
        """Notes what was fetched: `ids`, of which the first `asked` were needed."""
        self._pause = max(0, self._pause - 1)
        self._more = set(ids[asked:])
        if fetched.count:
            self._size = fetched.size_bytes // fetched.count + OVERHEAD_BYTES
            self._count = min(PREFETCH_MAX, PREFETCH_BYTES // self._size)


class PrefetchWindows:
    """The windows of the queues that fetched last: one may take 64 KB, and queues may be many."""

    def __init__(self) -> None:
        self._by_queue: OrderedDict[str, PrefetchWindow] = OrderedDict()

    def of(self, queue_id: str) -> PrefetchWindow:
        window = self._by_queue.setdefault(queue_id, PrefetchWindow())
        self._by_queue.move_to_end(queue_id)
        if len(self._by_queue) > WINDOWS_MAX:
            self._by_queue.popitem(last=False)
        return window
