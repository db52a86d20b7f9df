"""Publishing, of single messages and of many; every request may be repeated safely.

Each request carries a request ID of its own and sticks to one ingest shard: within ten minutes, a
repeat of a publish whose outcome is unknown stores nothing twice. Messages with dedupe keys go to
the shards of their keys, so that requests for different shards are gathered side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from slatemq.checks import check_whole, message_of
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.gathering import Gatherer
from slatemq.models import BatchSettings, OutgoingMessage
from slatemq.peers import Peers
from slatemq.publish_requests import WRONG_SHARD, PublishRequests
from slatemq.publish_wire import PLACE, Encoder, add, moved
from slatemq.published import Published
from slatemq.v1 import ingest_pb2

if TYPE_CHECKING:
    from slatemq.otel import Telemetry

log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A request of `publish_many`: its messages as bytes, and their places among all."""

    shard: int | None
    messages: list[bytes]
    places: list[int]


class Publisher:
    """Publishes single messages, many, and batches."""

    def __init__(
        self, peers: Peers, settings: BatchSettings, telemetry: Telemetry | None = None
    ) -> None:
        """Publish through these peers."""
        self._peers = peers
        self.settings = settings
        self._requests = PublishRequests(peers, telemetry)
        self._singles = Gatherer(peers, settings, self._requests, telemetry)

    async def publish(self, message: OutgoingMessage) -> Published:
        """Publishes one message; returns its ID when it is durable."""
        return await self._singles.publish(message)

    # --- Batches ------------------------------------------------------------

    async def publish_many(
        self, messages: Iterable[OutgoingMessage], in_flight: int = 1
    ) -> list[Published]:
        """See Client.publish_many."""
        check_whole("in_flight", in_flight, 1)
        told: dict[int, Published] = {}
        running: deque[tuple[list[int], asyncio.Task[list[Published]]]] = deque()

        async def oldest() -> None:
            places, task = running[0]
            told.update(zip(places, await task, strict=True))
            running.popleft()

        try:
            async for part in self._parts(messages):
                while len(running) >= in_flight:
                    await oldest()
                running.append((part.places, asyncio.create_task(self._send_part(part))))
            while running:
                await oldest()
        except SlateMQError as error:
            first_missing = next(place for place in range(len(told) + 1) if place not in told)
            error.metadata["published_count"] = str(first_missing)
            raise
        finally:
            tasks = [task for _, task in running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [told[place] for place in range(len(told))]

    async def _parts(self, messages: Iterable[OutgoingMessage]) -> AsyncIterator[_Part]:
        settings = self.settings
        parts: dict[int | None, _Part] = {}
        sizes: dict[int | None, int] = {}
        encoder = Encoder()
        for place, message in enumerate(messages):
            try:
                encoded = encoder.encode(message, f"messages[{place}].")
            except InvalidArgument as error:
                raise _placed(error, [place]) from error
            length = len(encoded)
            key = message.dedupe_key
            shard = await self._requests.shard_of(key) if key else None
            part = parts.get(shard)
            if part is not None and (
                len(part.places) >= settings.messages_max
                or sizes[shard] + length > settings.payload_bytes_max
            ):
                del parts[shard]
                yield part
                part = None
            if part is None:
                part = parts[shard] = _Part(shard, [], [])
                sizes[shard] = 0
            part.messages.append(encoded)
            part.places.append(place)
            sizes[shard] += length
        for part in parts.values():
            yield part

    async def _send_part(self, part: _Part) -> list[Published]:
        request = ingest_pb2.PublishRequest.FromString(b"".join(part.messages))
        try:
            return await self._requests.send_traced(request, part.shard)
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD:
                raise _placed(error, part.places) from error
            by_shard = await self._requests.places(request.messages)
            if list(by_shard) == [part.shard]:
                raise _placed(error, part.places) from error
        told: dict[int, Published] = {}
        for shard, indexes in by_shard.items():
            moved_part = _Part(
                shard,
                [part.messages[index] for index in indexes],
                [part.places[index] for index in indexes],
            )
            told.update(zip(moved_part.places, await self._send_part(moved_part), strict=True))
        return [told[place] for place in part.places]

    async def publish_batch(
        self, messages: Sequence[OutgoingMessage], *, request_id: str = "", shard: int | None = None
    ) -> list[Published]:
        """Publishes messages in one request, all or none; returns their IDs when durable."""
        request = message_of(ingest_pb2.PublishRequest, request_id=request_id)
        for message in messages:
            add(request, message)
        if shard is not None:
            return await self._requests.send_traced(request, shard)
        chosen = await self._requests.one_shard(request.messages)
        try:
            return await self._requests.send_traced(request, chosen)
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD:
                raise
            await self._peers.fresh_topology()
        return await self._requests.send_traced(
            request, await self._requests.one_shard(request.messages)
        )

    async def close(self, close_s: float | None = None) -> None:
        """Sends what was gathered and waits for it; each publish gets its own outcome.

        What has none after `close_s` (None: `call_timeout`) gets Unavailable (CLIENT_CLOSED).
        """
        await self._singles.close(close_s)


def _placed(error: InvalidArgument, places: list[int]) -> InvalidArgument:
    """The same error about the message's place among all that were to be published."""
    bad = PLACE.match(error.field)
    if bad is None or int(bad[1]) >= len(places):
        return error
    return moved(error, f"messages[{places[int(bad[1])]}].{bad[2]}")
