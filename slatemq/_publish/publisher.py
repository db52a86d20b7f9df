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

from slatemq._checks import check_whole, message_of
from slatemq._publish.gathering import Gatherer
from slatemq._publish.published import Published
from slatemq._publish.requests import WRONG_SHARD, PublishRequests
from slatemq._publish.wire import Runs, moved
from slatemq._rpc.peers import Peers
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import BatchSettings, OutgoingMessage
from slatemq.v1 import ingest_pb2

if TYPE_CHECKING:
    from slatemq.otel import Telemetry

log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A request of `publish_many`, and the places of its messages among all."""

    shard: int | None
    runs: Runs
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
        fields: dict[int, Published] = {}
        running: deque[tuple[list[int], asyncio.Task[list[Published]]]] = deque()

        async def oldest() -> None:
            places, task = running[0]
            fields.update(zip(places, await task, strict=True))
            running.popleft()

        try:
            async for part in self._parts(messages):
                while len(running) >= in_flight:
                    await oldest()
                running.append((part.places, asyncio.create_task(self._send_part(part))))
            while running:
                await oldest()
        except SlateMQError as error:
            first_missing = next(place for place in range(len(fields) + 1) if place not in fields)
            error.metadata["published_count"] = str(first_missing)
            raise
        finally:
            tasks = [task for _, task in running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [fields[place] for place in range(len(fields))]

    async def _parts(self, messages: Iterable[OutgoingMessage]) -> AsyncIterator[_Part]:
        settings = self.settings
        parts: dict[int | None, _Part] = {}
        for place, message in enumerate(messages):
            key = message.dedupe_key
            try:
                shard = await self._requests.shard_of(key) if key else None
            except InvalidArgument as error:
                raise moved(error, f"messages[{place}].dedupe_key") from None
            where, bytes_max = f"messages[{place}].", settings.payload_bytes_max
            part = parts.get(shard)
            if part is not None and (
                len(part.places) >= settings.messages_max
                or not part.runs.add(message, where, bytes_max)
            ):
                del parts[shard]
                yield part
                part = None
            if part is None:
                part = parts[shard] = _Part(shard, Runs(), [])
                part.runs.add(message, where)
            part.places.append(place)
        for part in parts.values():
            yield part

    async def _send_part(self, part: _Part) -> list[Published]:
        try:
            return await self._requests.send_batch(part.runs, part.shard)
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD:
                raise _placed(error, part.runs, part.places) from None
            by_shard = await self._requests.places(part.runs)
            if list(by_shard) == [part.shard]:
                raise _placed(error, part.runs, part.places) from None
        fields: dict[int, Published] = {}
        for shard, indexes in by_shard.items():
            moved_part = _Part(shard, part.runs.only(indexes), [part.places[at] for at in indexes])
            fields.update(zip(moved_part.places, await self._send_part(moved_part), strict=True))
        return [fields[place] for place in part.places]

    async def publish_batch(
        self, messages: Sequence[OutgoingMessage], *, request_id: str = "", shard: int | None = None
    ) -> list[Published]:
        """Publishes messages in one request, all or none; returns their IDs when durable."""
        message_of(ingest_pb2.PublishRequest, request_id=request_id)  # Whether it is text.
        runs = Runs()
        for place, message in enumerate(messages):
            runs.add(message, f"messages[{place}].")
        try:
            return await self._send_batch(runs, request_id, shard)
        except InvalidArgument as error:
            raise _placed(error, runs, range(len(runs))) from None

    async def _send_batch(self, runs: Runs, request_id: str, shard: int | None) -> list[Published]:
        requests = self._requests
        chosen = await requests.one_shard(runs) if shard is None else shard
        try:
            return await requests.send_batch(runs, chosen, request_id)
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD or shard is not None:
                raise
        await self._peers.fresh_topology()
        return await requests.send_batch(runs, await requests.one_shard(runs), request_id)

    async def close(self, close_s: float | None = None) -> None:
        """Sends what was gathered and waits for it; each publish gets its own outcome.

        What has none after `close_s` (None: `call_timeout`) gets Unavailable (CLIENT_CLOSED).
        """
        await self._singles.close(close_s)
        self._requests.close()


def _placed(error: InvalidArgument, runs: Runs, places: Sequence[int]) -> InvalidArgument:
    """The same error about the message's place among all that were to be published."""
    named = runs.places_of(error.field)
    if named is None:
        return moved(error, "messages") if error.field == "runs" else error
    bad, part = named
    return moved(error, f"messages[{places[bad.start]}].{part}")
