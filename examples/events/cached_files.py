"""Serves the files of a folder over HTTP from memory, and forgets those that an event names.

A program that changes a file publishes a message with the header `changed` afterwards:

    slatemq publish --allow-unrouted --header changed=prices.json ''

Its event `message.published` makes every cache forget the file; so does that of a notification of
an S3 store, which SlateMQ publishes with the headers `type` and `key`. Each process has a queue of
its own, since each has to hear of every change. What is in memory is never older than `--ttl`, and
while SlateMQ does not answer nothing is taken from there.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

import slatemq
from examples.events.queues import ATTEMPTS_MAX, ensure_queue, parser
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.events import Event, decode_event

CHANGED_HEADER = "changed"


class Cache:
    """Values that are loaded once, until they are dropped or too old."""

    def __init__(self, load: Callable[[str], Awaitable[bytes]], ttl_seconds: float) -> None:
        """Nothing is cached yet."""
        self._load = load
        self._ttl_seconds = ttl_seconds
        self._values: dict[str, tuple[bytes, float]] = {}
        self._loads: dict[str, object] = {}

    async def get(self, key: str) -> tuple[bytes, bool]:
        """The value, and whether it was cached. Raises what loading raises."""
        value, loaded_at = self._values.get(key, (b"", float("-inf")))
        now = time.monotonic()
        if now - loaded_at < self._ttl_seconds:
            return value, True
        # What was changed while it was being loaded may be the old one: it is not kept.
        load = self._loads[key] = object()
        try:
            value = await self._load(key)
            if self._loads.get(key) is load:
                self._values[key] = value, now
        finally:
            if self._loads.get(key) is load:
                del self._loads[key]
        return value, False

    def drop(self, key: str | None) -> None:
        """Forget a value, and one that is being loaded; None: all of them."""
        if key is None:
            self.clear()
            return
        self._loads.pop(key, None)
        self._values.pop(key, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._loads.clear()
        self._values.clear()


def changed_key(event: Event) -> str | None:
    """What an event says has changed; empty: nothing that is cached; None: it may be anything."""
    if event.data.get("headers_omitted"):
        return None  # They were too large for an event.
    headers = event.data["headers"]
    if headers.get("type", "").startswith("object."):
        return str(headers["key"])
    return str(headers.get(CHANGED_HEADER, ""))


async def drop_changed(messages: slatemq.Consumer, cache: Cache) -> None:
    """Drop what events name, until cancelled."""
    async for message in messages:
        try:
            cache.drop(changed_key(decode_event(message.payload)))
        except (InvalidArgument, KeyError) as error:
            cache.clear()  # Its file is unknown, so everything goes.
            await message.fail(f"not an event: {error}")
        else:
            await message.ack()


def make_app(messages: slatemq.Consumer, cache: Cache) -> web.Application:
    """GET /NAME."""

    async def serve(request: web.Request) -> web.Response:
        if messages.outage is not None:
            cache.clear()
        try:
            body, was_cached = await cache.get(request.match_info["name"])
        except FileNotFoundError:
            raise web.HTTPNotFound from None
        return web.Response(body=body, headers={"x-cache": "hit" if was_cached else "miss"})

    app = web.Application()
    app.router.add_get(r"/{name:[\w-][\w.-]*}", serve)
    return app


async def run(
    endpoint: str, queue_id: str, prefix: str, folder: Path, port: int, ttl_seconds: float
) -> None:
    """Serve until ended."""

    async def load(name: str) -> bytes:
        return await asyncio.to_thread((folder / name).read_bytes)

    cache = Cache(load, ttl_seconds)
    async with slatemq.connect(endpoint) as client:
        await ensure_queue(
            client, queue_id, prefix, ["message.published"], max_attempts=ATTEMPTS_MAX
        )
        # Nothing is cached yet: what waits since an earlier life is about nothing.
        await client.purge_queue(queue_id)
        async with client.consume(queue_id) as messages:
            runner = web.AppRunner(make_app(messages, cache))
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            print(f"serving {folder} at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
            try:
                await drop_changed(messages, cache)
            finally:
                await runner.cleanup()


def main() -> None:
    """The command."""
    flags = parser("cached_files", __doc__, f"cache-{socket.gethostname()}")
    flags.add_argument("--port", type=int, default=8081, help="0: a free one (%(default)s)")
    flags.add_argument("--ttl", type=float, default=60.0, help="in seconds (%(default)s)")
    flags.add_argument("folder", type=Path)
    given = flags.parse_args()
    try:
        asyncio.run(
            run(given.endpoint, given.queue, given.prefix, given.folder, given.port, given.ttl)
        )
    except SlateMQError as error:
        sys.exit(f"cached_files: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
