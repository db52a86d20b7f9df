"""The examples with events as people run them, killed half-way, against a stack of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

import slatemq
from examples.events.queues import ensure_queue
from examples.events.signatures import ID, make_secret
from examples.events.webhook_receiver import Inbox, make_app
from libs.events.backends import open_backend
from libs.events.slatemq.headers import EVENTS_HEADER
from services.stack.stack import PARTS
from slatemq.errors import Unavailable
from slatemq.events import Event, decode_event
from tests.acceptance.local_stack import REPOSITORY, LocalStack, wait_until
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import created
from tests.integration.ingest.server import Ingest, process
from tests.ports import free_ports

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # A stack, and programs that are killed.

LEASE_S = 2
"""Of the queues: so soon others get what a killed program had."""

EVENTUALLY_S = 60.0


@pytest.fixture(scope="module")
def events_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack that publishes its events to itself."""
    folder = tmp_path_factory.mktemp("events")
    port = free_ports(len(PARTS))[0]
    config = folder / "slatemq.yaml"
    config.write_text(
        json.dumps(
            {
                "queue": {
                    "enabled": True,
                    "backend": "slatemq",
                    "slatemq": {"endpoint": f"127.0.0.1:{port}"},
                }
            }
        )
    )
    arguments = ("--data", str(folder / "data"), "--ports", str(port), "--config", str(config))
    with LocalStack(folder, *arguments, ready=True) as stack:
        yield stack


@pytest.fixture
async def client(events_stack: LocalStack) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(events_stack.endpoint) as connected:
        yield connected


async def eventually(come_about: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, come_about, EVENTUALLY_S)


@contextmanager
def program(name: str, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """An example, as it is run; killed at the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", f"examples.events.{name}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
        assert started.poll() is None, f"{name} has ended"
    finally:
        started.kill()
        started.communicate()


@asynccontextmanager
async def site_of(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def ids_of(events: list[Event]) -> list[int]:
    """The messages that were published; there may be events of other types between them."""
    return [event.data["message_id"] for event in events if event.type == "message.published"]


async def test_webhooks_are_repeated_until_they_are_taken_and_taken_once(
    events_stack: LocalStack, client: slatemq.Client, tmp_path: Path
) -> None:
    # Given a receiver that fails at first
    secret = make_secret()
    inbox = Inbox(tmp_path / "inbox.sqlite")
    taken: list[Event] = []
    requests: list[tuple[str, int]] = []

    def take(event_id: str, body: bytes) -> None:
        if len(requests) < 3:
            raise web.HTTPServiceUnavailable
        if inbox.take(event_id, body):
            taken.append(decode_event(body))

    @web.middleware
    async def note(request: web.Request, handler: object) -> web.StreamResponse:
        assert callable(handler)
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            requests.append((request.headers[ID], error.status))
            raise
        requests.append((request.headers[ID], answer.status))
        return answer

    app = make_app([secret], take)
    app.middlewares.append(note)
    await ensure_queue(client, "webhooks", "slatemq", [], lease=LEASE_S)
    flags = ("--endpoint", events_stack.endpoint)
    async with site_of(app) as url:
        # When the program is killed while it delivers, and started again
        with program("webhooks", *flags, url, WEBHOOK_SECRET=secret):
            ids = [int(await client.publish(f"{n}", {"n": str(n)})) for n in range(20)]
            await eventually(lambda: len(taken) >= 5)
        ids += [int(await client.publish(f"{n}", {"n": str(n)})) for n in range(20, 40)]
        with program("webhooks", *flags, url, WEBHOOK_SECRET=secret):
            await eventually(lambda: set(ids) <= set(ids_of(taken)))

    # Then each event was taken once, those that were refused came again, and all were signed
    assert len({event.id for event in taken}) == len(taken)
    assert len(set(ids_of(taken))) == len(ids_of(taken))
    refused = [event_id for event_id, status in requests if status == 503]
    assert len(refused) == 3
    assert set(refused) <= {event.id for event in taken}
    assert {status for _, status in requests} == {204, 503}


class Logged:
    """What is in the files of an audit log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def events(self) -> list[Event]:
        """Of whole lines; what is behind the last one may be on its way."""
        whole = (text.rpartition(b"\n")[0] for text in self.texts)
        return [decode_event(line) for text in whole for line in text.splitlines()]

    @property
    def texts(self) -> list[bytes]:
        return [file.read_bytes() for file in sorted(self._folder.glob("*.jsonl"))]

    @property
    def lines_count(self) -> int:
        return sum(text.count(b"\n") for text in self.texts)

    def leave_half_a_line(self) -> None:
        with max(self._folder.glob("*.jsonl")).open("ab") as file:
            file.write(b'{"id": "evt_01KJ2')


async def test_an_audit_log_has_each_event_once(
    events_stack: LocalStack, client: slatemq.Client, tmp_path: Path
) -> None:
    await ensure_queue(client, "audit-log", "slatemq", [], lease=LEASE_S)
    flags = ("--endpoint", events_stack.endpoint, str(tmp_path))
    logged = Logged(tmp_path)

    # When the program is killed while it writes, leaves half a line, and is started again
    with program("audit_log", *flags):
        ids = list(map(int, await client.publish_many([b"%d" % n for n in range(200)])))
        await eventually(lambda: logged.lines_count)
    logged.leave_half_a_line()
    ids += list(map(int, await client.publish_many([b"%d" % n for n in range(200)])))
    with program("audit_log", *flags):
        await eventually(lambda: set(ids) <= set(ids_of(logged.events)))

    # Then each event is there once
    events = logged.events
    assert all(text.endswith(b"\n") for text in logged.texts)
    assert len({event.id for event in events}) == len(events)
    assert len(set(ids_of(events))) == len(ids_of(events))


async def test_an_audit_log_from_redis_has_each_event_once(tmp_path: Path) -> None:
    logged = Logged(tmp_path / "audit")
    (tmp_path / "server").mkdir()
    with running(RedisServer(tmp_path / "server", "streams")) as server:
        settings = server.settings("slatemq")
        flags = ("--url", settings.url, str(tmp_path / "audit"))
        backend = open_backend("redis")
        await backend.connect(settings)
        events = [created(f"{n}") for n in range(3_000)]
        try:
            # When the program is killed while it writes, and then Redis is
            with program("audit_log_redis", *flags):
                await backend.publish_batch(events[:2_000])
                await eventually(lambda: logged.lines_count)
            with program("audit_log_redis", *flags):
                await eventually(lambda: logged.lines_count >= 2_000)
                server.kill()
                server.start()
                with suppress(Unavailable):  # the connections of before
                    await backend.publish_batch(events[2_000:])
                # And events come again, as after a crash of the ingest
                await backend.publish_batch(events[1_500:])
                await eventually(lambda: logged.lines_count >= 3_000)
        finally:
            await backend.close()

    # Then each event is there once
    assert sorted(event.id for event in logged.events) == sorted(event.id for event in events)


async def test_an_audit_log_from_redis_goes_on_after_its_stream_was_removed(tmp_path: Path) -> None:
    logged = Logged(tmp_path / "audit")
    (tmp_path / "server").mkdir()
    with running(RedisServer(tmp_path / "server", "streams")) as server:
        settings = server.settings("slatemq")
        backend = open_backend("redis")
        await backend.connect(settings)
        try:
            with program("audit_log_redis", "--url", settings.url, str(tmp_path / "audit")):
                sent = []
                for number in range(3):
                    sent.append(created(f"{number}"))
                    await backend.publish(sent[-1])
                    await eventually(lambda: logged.lines_count == len(sent))
                    server.control("FLUSHALL")
        finally:
            await backend.close()


async def test_a_cache_forgets_what_an_event_names(
    events_stack: LocalStack, client: slatemq.Client, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_bytes(b"first")
    flags = ("--endpoint", events_stack.endpoint, "--port", "0", "--ttl", "3600", str(tmp_path))

    async def get(name: str) -> tuple[bytes, str]:
        async with http.get(f"{url}/{name}") as answer:
            return await answer.read(), answer.headers.get("x-cache", str(answer.status))

    async def acked() -> bool:
        counts = (await client.get_queue("cache-1")).counts
        return not counts.available_count + counts.delayed_count + counts.in_flight_count

    async with aiohttp.ClientSession() as http:
        by_publisher = {"changed": "a.json"}
        by_store = {"type": "object.created", "bucket": "b", "key": "a.json"}
        for value, later, headers in (
            (b"first", b"second", by_publisher),
            (b"second", b"third", by_store),
        ):
            # Given a cache, the second time one that was killed and started again
            with program("cached_files", *flags, "--queue", "cache-1") as cache:
                assert cache.stdout is not None
                line = await asyncio.to_thread(cache.stdout.readline)
                url = line.split(" at ")[1].strip()
                # An event whose ack the broker had not stored when it was killed comes again.
                async with asyncio.timeout(EVENTUALLY_S):
                    while not await acked():
                        await asyncio.sleep(0.02)
                assert await get("a.json") == (value, "miss")

                # When the file changes, then the cache gives the old one until an event says so
                (tmp_path / "a.json").write_bytes(later)
                assert await get("a.json") == (value, "hit")
                await client.publish(b"", headers)
                async with asyncio.timeout(EVENTUALLY_S):
                    while (answer := await get("a.json"))[0] != later:
                        await asyncio.sleep(0.02)
                assert answer == (later, "miss")
                assert await get("a.json") == (later, "hit")
                assert (await get("b.json"))[1] == "404"

                # And without a broker it gives nothing from memory
                pid = events_stack.signal("broker", signal.SIGKILL)
                async with asyncio.timeout(EVENTUALLY_S):
                    while await get("a.json") != (later, "miss"):
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(events_stack.wait_restarted, "broker", pid)


async def test_a_replica_has_each_message_once_also_when_events_come_again(
    events_stack: LocalStack, client: slatemq.Client, tmp_path: Path
) -> None:
    await ensure_queue(client, "replicate", "slatemq", ["message.published"], lease=LEASE_S)
    await ensure_queue(client, "replicate-watch", "slatemq", ["message.published"])
    root, ready = (tmp_path / "data").as_uri(), tmp_path / "ready"
    mine = [b"%d" % n + b"x" * (n % 3 * 50_000) for n in range(90)]
    async with process(root, ready) as (_, address), Ingest.at(address) as target:

        async def copies() -> list[int]:
            return [one.message_id for one in await target.log()]

        async def until_copied(count: int) -> None:
            async with asyncio.timeout(EVENTUALLY_S):
                while len(await copies()) < count:
                    await asyncio.sleep(0.05)

        # When the program is killed while it copies, and started again
        flags = ("--endpoint", events_stack.endpoint, "--name", "one", address)
        with program("replicate", *flags):
            for payload in mine[:45]:
                await client.publish(payload, {"n": "1"}, retention=3600)
            await until_copied(1)
        with program("replicate", *flags):
            for payload in mine[45:]:
                await client.publish(payload, {"n": "1"}, retention=3600)
            # And a message that came from elsewhere, and one that is no copy of anything
            await client.publish(b"from elsewhere", {"replicated-from": "two"})
            await until_copied(len(mine))

            # And when every event comes again, as after a crash of the ingest
            await _repeat_events(client, len(mine))
            last = await client.publish(b"last", {"n": "1"})
            assert last
            await until_copied(len(mine) + 1)

        # Then each message is there once, as it was
        read = await target.read(*await copies(), max_bytes=1 << 30)
        assert sorted(one.payload for one in read.messages) == sorted([*mine, b"last"])
        first = read.messages[0]
        assert dict(first.headers) == {"n": "1", "replicated-from": "one"}
        assert 3_500 < first.retention_s <= 3_600


async def _repeat_events(client: slatemq.Client, count: int) -> None:
    """Publish each event of the queue once more."""
    async with client.consume("replicate-watch") as messages:
        repeated = 0
        async for message in messages:
            async with message:
                await client.publish(
                    message.payload, {EVENTS_HEADER: "slatemq", "type": "message.published"}
                )
            repeated += 1
            if repeated == count:
                break
