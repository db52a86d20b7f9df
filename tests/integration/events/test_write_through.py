"""Write-through on real servers: whatever is killed when, each answered publish has its event."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import msgspec
import pytest
import yaml

import slatemq
from libs.events.slatemq.headers import EVENTS_HEADER
from slatemq.errors import SlateMQError
from slatemq.events.envelope import Event, decode_event
from slatemq.v1 import events_pb2, events_pb2_grpc
from tests.forms import proof
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.backends.slatemq_server import SlatemqServer
from tests.integration.events.conftest import Rig, eventually, served
from tests.integration.ingest.server import ROOT, Ingest, message, process, refused_start
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow  # Real servers, killed and restarted.

BACKENDS = ("redis", proof("rabbitmq"), proof("kafka"))
QUEUES = ("orders", "mails", "bills")
EVENTUALLY_S = WAIT_SECONDS
EMPTY = {"pending_tasks": 0, "dead_letter_count": 0}


@pytest.fixture(scope="module", params=BACKENDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


class Recorder:
    """Writes down all events, as they come."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.got: list[Event] = []

    async def __call__(self, event: Event) -> None:
        self.got.append(event)
        await self.backend.acknowledge(event.id)

    @property
    def message_ids(self) -> list[int]:
        return [int(event.data["message_id"]) for event in self.got]

    def check(self, answered: list[int]) -> None:
        """Every answered message has its event: always with one ID, at first in order by queue."""
        seen: dict[int, str] = {}
        by_queue: dict[str, list[int]] = {}
        for event in self.got:
            message_id = int(event.data["message_id"])
            if message_id not in seen:
                by_queue.setdefault(event.data["headers"]["queue"], []).append(message_id)
            assert seen.setdefault(message_id, event.id) == event.id
        assert not set(answered) - seen.keys()
        assert len(set(seen.values())) == len(seen)
        assert all(some == sorted(some) for some in by_queue.values())


class Publisher:
    """Publishes to an ingest until it is stopped, through its restarts."""

    def __init__(self) -> None:
        self.address = ""
        self.answered: list[int] = []
        self._stopping = False

    async def run(self, name: int) -> None:
        for n in range(1_000_000):
            if self._stopping:
                return
            messages = [message(b"%d" % part, queue=QUEUES[n % 3]) for part in range(2)]
            try:
                async with asyncio.timeout(5), Ingest.at(self.address) as ingest:
                    ids = await ingest.publish(*messages, request_id=f"{name}-{n}")
            except (SlateMQError, grpc.aio.AioRpcError, TimeoutError):
                await asyncio.sleep(0.05)
            else:
                self.answered += ids

    async def goes_on(self) -> None:
        """Wait until more is answered."""
        before = len(self.answered)
        await eventually(lambda: len(self.answered) > before)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        self.address, self._stopping = address, False
        tasks = [asyncio.create_task(self.run(name)) for name in range(4)]
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.gather(*tasks)


class Suite:
    """An ingest with events on, and one who records them."""

    def __init__(
        self, folder: Path, server: tuple[str, Server], root: str = "", **queue: Any
    ) -> None:
        """The store is in the folder, unless `root` says where."""
        self.folder = folder
        self.root = root or (folder / "data").as_uri()
        self.server = server[1]
        self._closing = AsyncExitStack()
        self._rig = Rig(*server, self._closing)
        self._queue = {"enabled": True, "backend": server[0], **queue}
        self._backend = server[0]

    async def __aenter__(self) -> Suite:
        backend = await self._rig.backend()
        self.recorder = Recorder(backend)
        await backend.subscribe([], self.recorder)
        settings = self.server.settings(self._rig._prefix)
        self._queue[self._backend] = msgspec.to_builtins(settings)
        self.config = self.folder / "slatemq.yaml"
        self.config.write_text(yaml.safe_dump({"queue": self._queue}))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    @asynccontextmanager
    async def ingest(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
        flags = ("--config", str(self.config), "--http-port", "0")
        async with process(self.root, self.folder / "ready", *flags) as started:
            yield started

    async def health(self) -> tuple[int, Any]:
        """The code of `GET /health`, and what it says of the queue."""
        address = json.loads((self.folder / "ready").read_text())["http_address"]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{address}/health") as answer,
        ):
            return answer.status, (await answer.json())["queue"]

    async def has_all(self, answered: list[int]) -> None:
        wanted = set(answered)
        await eventually(lambda: wanted <= set(self.recorder.message_ids), EVENTUALLY_S)


async def status(address: str) -> events_pb2.GetEventsStatusResponse:
    async with Ingest.at(address) as ingest:
        stub: Any = events_pb2_grpc.EventsServiceStub(ingest.channel)
        request = events_pb2.GetEventsStatusRequest()
        answer: events_pb2.GetEventsStatusResponse = await stub.GetEventsStatus(request, timeout=30)
        return answer


FEW_VICTIMS = ("both", "backend from the start on")
VICTIMS = ("ingest", "backend", "both", "backend from the start on", "ingest")


@pytest.mark.parametrize(
    "victims",
    [FEW_VICTIMS, proof(VICTIMS * 3)],
    ids=["few kills", "many kills"],
)
async def test_no_answered_publish_lacks_its_event_when_ingest_and_backend_are_killed(
    tmp_path: Path, server: tuple[str, Server], victims: tuple[str, ...]
) -> None:
    publisher = Publisher()
    async with Suite(tmp_path, server) as suite:
        await asyncio.sleep(suite.server.settle_s)
        for victim in victims:
            if victim == "backend from the start on":
                await asyncio.to_thread(suite.server.kill)
            async with suite.ingest() as (started, address), publisher.running(address):
                await asyncio.sleep(random.uniform(0.3, 1.5))
                if victim == "backend from the start on":
                    await publisher.goes_on()
                    await asyncio.to_thread(suite.server.start)
                if victim in ("backend", "both"):
                    await asyncio.to_thread(suite.server.kill)
                    await publisher.goes_on()
                if victim in ("ingest", "both"):
                    started.kill()
                    await started.wait()
                if victim in ("backend", "both"):
                    await asyncio.to_thread(suite.server.start)
        async with suite.ingest() as (_, address):
            await suite.has_all(publisher.answered)
            async with asyncio.timeout(EVENTUALLY_S):
                while (await status(address)).lag_count:
                    await asyncio.sleep(0.1)
        suite.recorder.check(publisher.answered)


async def test_events_published_before_a_kill_that_the_cursor_missed_come_again_with_their_ids(
    tmp_path: Path, server: tuple[str, Server]
) -> None:
    answered: list[int] = []
    async with Suite(tmp_path, server) as suite:
        for _ in range(10):
            async with suite.ingest() as (started, address), Ingest.at(address) as ingest:
                answered += await ingest.send(b"a", b"b", queue="orders")
                await suite.has_all(answered)
                started.kill()  # The cursor is written within a second.
                await started.wait()
            repeated = len(suite.recorder.got) > len(set(suite.recorder.message_ids))
            if repeated:
                break
        assert repeated
        suite.recorder.check(answered)


async def test_the_status_shows_the_lag_behind_a_backend_that_is_down(
    tmp_path: Path, server: tuple[str, Server]
) -> None:
    async with Suite(tmp_path, server) as suite:
        async with suite.ingest() as (_, address), Ingest.at(address) as ingest:
            # Given a backend that has what was published
            answered = await ingest.send(b"a", queue="orders")
            await suite.has_all(answered)
            # which may have them before ingest hears that it has
            async with asyncio.timeout(EVENTUALLY_S):
                while (result := await status(address)).lag_count or not result.answering:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(suite.server.settle_s)
            assert (result.enabled, result.lag_count) == (True, 0)
            assert result.cursor == result.durable_sequence == answered[-1]
            assert result.published_count == 1
            healthy = (200, {"backend": result.backend, "connected": True, **EMPTY})
            async with asyncio.timeout(EVENTUALLY_S):
                while await suite.health() != healthy:
                    await asyncio.sleep(0.1)

            # When it is killed
            await asyncio.to_thread(suite.server.kill)
            answered += await ingest.send(b"b", b"c", queue="orders")
            async with asyncio.timeout(EVENTUALLY_S):
                while not (result := await status(address)).failed_count:
                    await asyncio.sleep(0.1)

            # Then the status says so, for programs and for people
            assert (result.answering, result.lag_count) == (False, 2)
            assert result.lag_ms > 0
            assert result.last_error
            assert result.cursor == answered[0]
            async with asyncio.timeout(EVENTUALLY_S):
                while (await suite.health())[0] != 503:
                    await asyncio.sleep(0.1)
            for_programs = await command(address, "--json", "--check")
            assert for_programs[0] == 3
            (line,) = for_programs[1].splitlines()
            assert json.loads(line)["lag_count"] == 2
            for_people = (await command(address))[1]
            assert "backend down" in for_people
            assert result.backend in for_people

            # And once it is back nothing is behind
            await asyncio.to_thread(suite.server.start)
            await suite.has_all(answered)
            async with asyncio.timeout(EVENTUALLY_S):
                while (await status(address)).lag_count:
                    await asyncio.sleep(0.1)
            assert (await command(address, "--check"))[0] == 0
        suite.recorder.check(answered)


async def test_fire_and_forget_drops_what_cannot_be_published_and_goes_on_behind_it(
    tmp_path: Path, server: tuple[str, Server]
) -> None:
    async with (
        Suite(tmp_path, server, consistency="fire-and-forget") as suite,
        suite.ingest() as (_, address),
        Ingest.at(address) as ingest,
    ):
        first = await ingest.send(b"a", queue="orders")
        await suite.has_all(first)
        await asyncio.sleep(suite.server.settle_s)
        await asyncio.to_thread(suite.server.kill)
        dropped = await ingest.send(b"b", b"c", queue="orders")
        async with asyncio.timeout(EVENTUALLY_S):
            while (await status(address)).dropped_count < 2:
                await asyncio.sleep(0.1)
        assert (await status(address)).lag_count == 0

        await asyncio.to_thread(suite.server.start)
        later: list[int] = []
        async with asyncio.timeout(EVENTUALLY_S):
            while not set(later) & set(suite.recorder.message_ids):
                later += await ingest.send(b"d", queue="orders")
                await asyncio.sleep(0.2)
        assert not set(dropped) & set(suite.recorder.message_ids)
        suite.recorder.check(first)


async def test_slatemq_as_its_own_backend_makes_one_event_of_each_message(tmp_path: Path) -> None:
    config = tmp_path / "slatemq.yaml"
    server = SlatemqServer(tmp_path, "--config", str(config))
    endpoint = f"127.0.0.1:{server.port}"
    config.write_text(
        yaml.safe_dump({"queue": {"enabled": True, "slatemq": {"endpoint": endpoint}}})
    )
    with running(server):
        async with slatemq.connect(endpoint) as client:
            await client.create_queue("audit", filter=f'"{EVENTS_HEADER}" in headers')
            published = [(await client.publish(b"x", {"queue": "orders"})).message_id]
            claimed = await client.claim("audit", wait=60)
            published.append((await client.publish(b"y", {"queue": "orders"})).message_id)
            claimed += await client.claim("audit", wait=60)
            async with asyncio.timeout(EVENTUALLY_S):
                while (value := (await client.events_status())[0]).lag_count:
                    await asyncio.sleep(0.1)
            counts = (await client.get_queue("audit")).counts

    events = [decode_event(message.payload) for message in claimed]
    assert [event.data["message_id"] for event in events] == published
    assert value.published_count == len(published)
    assert counts.available_count == 0


async def test_a_wrong_setting_ends_the_process_with_its_key(tmp_path: Path) -> None:
    config = tmp_path / "slatemq.yaml"
    config.write_text("queue:\n  enabled: true\n  backend: redis\n  redis:\n    url: nonsense\n")
    assert "queue.redis.url" in await refused_start(tmp_path / "data", config)


async def command(address: str, *options: str) -> tuple[int, str]:
    """`slatemq events status`: its exit code and what it printed."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "slatemq.cli", "events", "status", "--endpoint", address, *options),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await started.communicate()
    assert started.returncode is not None
    return started.returncode, printed.decode()
