"""Watching the delayed messages of a queue: a stream that resumes where it broke."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from slatemq._admin.entry_models import Entry, entry_of, keys_of
from slatemq._cancelling import end_all, is_cancelled
from slatemq._rpc.outages import Outage, OutageWatch, broker_of
from slatemq._rpc.peers import BACKOFF_S, BACKOFF_S_MAX, errors_translated, pause_s
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from slatemq.v1 import entry_pb2
from slatemq.v1.entry_pb2_grpc import DelayedServiceStub

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing

log = logging.getLogger(__name__)

SILENCE_S = 40.0
"""A stream that is silent for this long is dead: the server sends something every 10 s."""

STREAM_SILENT = "STREAM_SILENT"
"""The reason of the error about a silent stream."""


class _PartitionWatch:
    """The delayed messages of one partition, for one task."""

    def __init__(
        self,
        locations: QueueLocations,
        queue_id: str,
        partition: int,
        position: str,
        view: entry_pb2.EntryView.ValueType,
        encryption: KeyRing | None,
    ) -> None:
        self.queue_id = queue_id
        self._partition = partition
        self._locations = locations
        self._peers = locations.peers
        self._view = view
        self._keys = keys_of(view, encryption)
        self._ready: deque[Entry] = deque()
        self._position = position
        self._position_after = position
        self._call: Any = None
        self._proof = self._peers.proof
        self._shard: int | None = None
        self._closed = False
        self._watch = OutageWatch(broker_of(queue_id))

    @property
    def outage(self) -> Outage | None:
        """Why and since when the broker cannot be reached; None while it can.

        Iterating waits for the broker without a limit: callers that want one look here.
        """
        return self._watch.outage

    @property
    def position(self) -> str:
        """Where a later watch continues: after the last response whose entries were all taken."""
        return self._position

    async def close(self) -> None:
        """Ends the watch; iterating ends, too."""
        self._closed = True
        self._watch.close()
        self._drop()

    def __aiter__(self) -> _PartitionWatch:
        return self

    async def __anext__(self) -> Entry:
        """The next entry. Raises NotFound, InvalidArgument (INVALID_POSITION)."""
        self._peers.check_home()
        pause = BACKOFF_S
        while not self._ready:
            self._check_open()
            try:
                await self._read()
            except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                self._check_open()
                if error.reason == "CLIENT_CLOSED":
                    raise
                log.debug("the watch of %s broke: %s", self.queue_id, error)
                is_silent = error.reason == STREAM_SILENT
                self._watch.begin(error, time.monotonic() - SILENCE_S if is_silent else None)
                if not isinstance(error, ResourceExhausted):
                    self._peers.forget()
                await asyncio.sleep(pause_s(error, pause))
                pause = min(pause * 2, BACKOFF_S_MAX)
            except NotFound as error:
                if not await self._locations.may_have_moved(
                    self.queue_id, self._shard, error, self._partition
                ):
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, BACKOFF_S_MAX)
        entry = self._ready.popleft()
        if not self._ready:
            self._position = self._position_after
        return entry

    def _check_open(self) -> None:
        if self._closed:
            raise StopAsyncIteration

    async def _read(self) -> None:
        """Reads one response. After any error the next one comes from a new stream."""
        try:
            with errors_translated():
                if self._call is None:
                    self._call = await self._open()
                async with asyncio.timeout(SILENCE_S):
                    answer = await self._peers.unless_closed(self._call.read())
        except TimeoutError:
            self._drop()
            raise Unavailable("the stream is silent", reason=STREAM_SILENT) from None
        except asyncio.CancelledError:
            self._drop()
            if self._closed and not is_cancelled():
                raise Unavailable("the watch is closed", reason="WATCH_CLOSED") from None
            raise
        except Unauthenticated as error:
            self._drop()
            raise self._peers.renewed(error, self._proof) from None
        except BaseException:
            self._drop()
            raise
        if answer is grpc.aio.EOF:
            self._drop()
            raise Unavailable("the stream ended", reason="STREAM_ENDED")
        self._watch.end()
        self._ready.extend(entry_of(each, self._keys) for each in answer.entries)
        self._position_after = answer.position
        if not self._ready:
            self._position = answer.position

    async def _open(self) -> Any:
        self._proof = self._peers.proof
        self._shard = await self._locations.shard_of(self.queue_id, self._partition)
        return DelayedServiceStub(await self._peers.broker(self._shard)).WatchDelayed(
            entry_pb2.WatchDelayedRequest(
                queue_id=self.queue_id, position=self._position, view=self._view
            ),
            metadata=self._locations.naming(self.queue_id, self._partition),
        )

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


BETWEEN: Final = "~"
"""Between the positions of partitions in that of their queue."""


class DelayedWatch:
    """Delayed messages as an asynchronous iterator, for one task; see Client.watch_delayed."""

    def __init__(
        self,
        locations: QueueLocations,
        queue_id: str,
        position: str,
        view: entry_pb2.EntryView.ValueType,
        encryption: KeyRing | None,
    ) -> None:
        self.queue_id = queue_id
        self._locations = locations
        self._view = view
        self._encryption = encryption
        self._positions = position.split(BETWEEN)
        self._parts: list[_PartitionWatch] = []
        self._coming: dict[asyncio.Task[Entry], int] = {}
        self._closed = False

    @property
    def outage(self) -> Outage | None:
        """Why and since when a broker cannot be reached; None while all can.

        Iterating waits for the broker without a limit: callers that want one look here.
        """
        return next((part.outage for part in self._parts if part.outage is not None), None)

    @property
    def position(self) -> str:
        """Where a later watch continues: after the last responses whose entries were all taken."""
        if len(self._parts) == 1:
            return self._parts[0].position
        return BETWEEN.join(self._positions)

    async def __aenter__(self) -> DelayedWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the watch; iterating ends, too."""
        self._closed = True
        for part in self._parts:
            await part.close()
        await end_all(self._coming)

    def __aiter__(self) -> DelayedWatch:
        return self

    async def __anext__(self) -> Entry:
        """The next entry of any partition. Raises NotFound, InvalidArgument (INVALID_POSITION)."""
        if self._closed:
            raise StopAsyncIteration
        if not self._parts:
            await self._begin()
        if len(self._parts) == 1:  # Without a task for each entry.
            return await anext(self._parts[0])
        waited = set(self._coming.values())
        for index, part in enumerate(self._parts):
            if index not in waited:
                # Before the next one is asked for: it may not be taken.
                self._positions[index] = part.position
                self._coming[asyncio.create_task(part.__anext__())] = index
        done, _ = await asyncio.wait(self._coming, return_when=asyncio.FIRST_COMPLETED)
        if self._closed:
            raise StopAsyncIteration
        first = min(done, key=self._coming.__getitem__)
        del self._coming[first]
        return first.result()

    async def _begin(self) -> None:
        """Finds the partitions, and what is left of each. Raises InvalidArgument."""
        partitions_count = len(await self._locations.located(self.queue_id))
        if self._positions == [""]:
            self._positions = [""] * partitions_count
        if len(self._positions) != partitions_count:
            raise InvalidArgument("position", "is not one of this queue", reason="INVALID_POSITION")
        self._parts = [
            _PartitionWatch(
                self._locations, self.queue_id, index, position, self._view, self._encryption
            )
            for index, position in enumerate(self._positions)
        ]
