"""Publishing, of single messages and of many; every request may be repeated safely.

Each request carries a request ID of its own and sticks to one ingest shard: within ten minutes, a
repeat of a publish whose outcome is unknown stores nothing twice. Messages with dedupe keys go to
the shards of their keys, so that requests for different shards are gathered side by side.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from slatemq._cancelling import end_all
from slatemq._checks import check_whole, moved
from slatemq._publish.gathering import Gatherer
from slatemq._publish.published import Published
from slatemq._publish.sending import Request, Sender
from slatemq._publish.wire import Runs
from slatemq._requests import message_of
from slatemq._rpc.peers import Peers
from slatemq.errors import WRONG_SHARD, InvalidArgument, SlateMQError
from slatemq.models import BatchSettings, OutgoingMessage
from slatemq.v1 import ingest_pb2

if TYPE_CHECKING:
    from slatemq.otel import Telemetry


class Publisher:
    """Publishes single messages, many, and batches."""

    def __init__(
        self, peers: Peers, settings: BatchSettings, telemetry: Telemetry | None = None
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._sender = Sender(peers)
        self._singles = Gatherer(peers, settings, self._sender, telemetry)
        self.publish = self._singles.publish

    # --- Batches ------------------------------------------------------------

    async def publish_many(
        self, messages: Iterable[OutgoingMessage], in_flight: int = 1
    ) -> list[Published]:
        check_whole("in_flight", in_flight, 1)
        fields: dict[int, Published] = {}
        running: deque[tuple[list[int], asyncio.Task[list[Published]]]] = deque()

        async def oldest() -> None:
            places, task = running[0]
            fields.update(zip(places, await task, strict=True))
            running.popleft()

        try:
            async for request in self._requests(messages):
                while len(running) >= in_flight:
                    await oldest()
                task = asyncio.create_task(self._send_part(request))
                running.append((request.owners, task))
            while running:
                await oldest()
        except SlateMQError as error:
            first_missing = next(place for place in range(len(fields) + 1) if place not in fields)
            error.metadata["published_count"] = str(first_missing)
            raise
        finally:
            await end_all(task for _, task in running)
        return [fields[place] for place in range(len(fields))]

    async def _requests(self, messages: Iterable[OutgoingMessage]) -> AsyncIterator[Request[int]]:
        """The messages by shard; the owner of each is its place among all."""
        settings = self._settings
        requests: dict[int | None, Request[int]] = {}
        each, place = iter(messages), 0
        message = next(each, None)
        while message is not None:
            key = message.dedupe_key
            try:
                shard = await self._sender.shards.of_key(key) if key else None
            except InvalidArgument as error:
                raise moved(error, f"messages[{place}].dedupe_key") from None
            where, bytes_max = f"messages[{place}].", settings.payload_bytes_max
            request = requests.get(shard)
            if request is not None and (
                len(request.owners) >= settings.messages_max
                or not request.runs.add(message, where, bytes_max)
            ):
                del requests[shard]
                yield request
                request = None
            if request is None:
                request = requests[shard] = Request(shard, Runs(), [])
                request.runs.add(message, where)
            request.owners.append(place)
            place += 1
            if key or not request.runs.is_repeating:
                message = next(each, None)
                continue
            left_count = settings.messages_max - len(request.owners)
            count, message = request.runs.add_alike(each, left_count, bytes_max)
            request.owners += range(place, place + count)
            place += count
        for request in requests.values():
            yield request

    async def _send_part(self, request: Request[int]) -> list[Published]:
        try:
            return await self._send(request)
        except InvalidArgument as error:
            parts = await self._sender.split(request, error)
            if not parts:
                raise _placed(error, request) from None
        fields: dict[int, Published] = {}
        for part in parts:
            fields.update(zip(part.owners, await self._send_part(part), strict=True))
        return [fields[place] for place in request.owners]

    async def publish_batch(
        self, messages: Iterable[OutgoingMessage], *, request_id: str = "", shard: int | None = None
    ) -> list[Published]:
        message_of(ingest_pb2.PublishRequest, request_id=request_id)  # Whether it is text.
        if shard is not None:
            check_whole("shard", shard, 0)
        request = Request[int](shard, Runs(), [])
        request.request_id = request_id
        for place, message in enumerate(messages):
            request.runs.add(message, f"messages[{place}].")
            request.owners.append(place)
        if shard is None:
            request.shard = await self._sender.shards.of_all(request.runs)
        while True:
            try:
                return await self._send(request)
            except InvalidArgument as error:
                is_named = error.reason != WRONG_SHARD or shard is not None
                if is_named or not await self._sender.moved(request):
                    raise _placed(error, request) from None

    async def _send(self, request: Request[int]) -> list[Published]:
        if self._telemetry is None:
            return await self._sender.send(request)
        with self._telemetry.publishing(request.runs, is_batch=True):
            return await self._sender.send(request)

    async def close(self, close_s: float | None = None) -> None:
        """Sends what was gathered and waits for it; each publish gets its own outcome.

        What has none after `close_s` (None: `call_timeout`) gets Unavailable (CLIENT_CLOSED).
        """
        await self._singles.close(close_s)
        self._sender.shards.close()


def _placed(error: InvalidArgument, request: Request[int]) -> InvalidArgument:
    """The error about a message's place in the request, about its place among all."""
    named = request.runs.places_of(error.field)
    if named is None:
        return moved(error, "messages") if error.field == "runs" else error
    bad, part = named
    return moved(error, f"messages[{request.owners[bad.start]}].{part}")
