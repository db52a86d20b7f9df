"""Each change that a caller can make, as an event on Redis: of the whole stack, and after kills."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
import yaml

import slatemq
from slatemq.events.catalogue import CATALOGUE
from slatemq.events.envelope import Event, decode_event
from tests.acceptance.local_stack import LocalStack
from tests.integration.events.conftest import EVENTUALLY_S
from tests.integration.events.redis_server import RedisServer
from tests.integration.events.servers import running

pytestmark = pytest.mark.slow  # A whole stack, and Redis.

OURS = {name for name in CATALOGUE if name.startswith(("queue.", "message.", "janitor."))}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with running(RedisServer(folder, "streams")) as started:
        yield started


@pytest.fixture
def stack(tmp_path: Path, server: RedisServer) -> Iterator[LocalStack]:
    config = tmp_path / "slatemq.yaml"
    section = msgspec.to_builtins(server.settings("all"))
    queue = {"enabled": True, "backend": "redis", "redis": section}
    config.write_text(yaml.safe_dump({"queue": queue}))
    folder = tmp_path / "stack"
    arguments = ("--data", str(folder / "data"), "--config", str(config))
    with LocalStack(folder, *arguments) as started:
        yield started


async def events_on(server: RedisServer) -> list[Event]:
    """What is in the stream, each event once."""
    async with redis.asyncio.Redis(port=server.port) as client:
        entries = await client.xrange("all:events")
    events = [decode_event(fields[b"data"]) for _, fields in entries]
    return list({event.id: event for event in reversed(events)}.values())[::-1]


async def seen(server: RedisServer, wanted: set[tuple[str, str]]) -> list[Event]:
    """The events, once these are among them: types, and what they are about."""
    async with asyncio.timeout(EVENTUALLY_S):
        while True:
            events = await events_on(server)
            missing = wanted - {(event.type, about(event)) for event in events}
            if not missing:
                return events
            await asyncio.sleep(0.1)


def about(event: Event) -> str:
    data = event.data
    return str(data.get("queue") or data.get("job") or data["headers"].get("queue"))


async def change_all(client: slatemq.Client) -> None:
    """Each change that has an event, on the queue `orders`."""
    await client.create_queue("orders", max_attempts=1)
    await client.update_queue("orders", lease=20)
    await client.pause_queue("orders")
    await client.resume_queue("orders")
    late = datetime.now(UTC) + timedelta(minutes=10)
    await client.publish_many(
        [
            slatemq.OutgoingMessage(
                b"x", {"queue": "orders"}, visible_at_ms=int(late.timestamp() * 1000)
            )
            for _ in range(2)
        ]
    )
    await client.publish(b"bad", {"queue": "orders"})
    [claimed] = await client.claim("orders", wait=EVENTUALLY_S)
    await client.nack([claimed.lease_token], reason="broken")
    redrive = await client.start_redrive("orders")
    await client.wait_redrive(redrive, every=0.05)
    waiting: list[slatemq.Entry] = []
    async with asyncio.timeout(EVENTUALLY_S):
        while len(waiting) < 2:
            found = client.list_entries("orders", slatemq.EntryState.DELAYED)
            waiting = [entry async for entry in found]
    first, second = waiting
    await client.edit_message(first.handle, payload=b"edited")
    await client.reschedule_entry(first.handle, late + timedelta(minutes=1))
    await client.cancel_entry(second.handle)
    await client.purge_queue("orders", [slatemq.EntryState.AVAILABLE])
    run = await client.run_job("report", days=1)
    async with asyncio.timeout(EVENTUALLY_S):
        async for one in client.watch_job_run(run):
            if one.state is not slatemq.JobRunState.WAITING:
                break
    await client.cancel_job_run(run)
    await client.wait_job_run(run)
    await client.delete_queue("orders")


async def test_every_change_is_an_event_and_those_made_while_redis_is_away_outlive_kills(
    server: RedisServer, stack: LocalStack
) -> None:
    async with slatemq.connect(stack.endpoint) as client:
        await change_all(client)
        about_queue = {(name, "orders") for name in OURS if not name.startswith("janitor.")}
        about_runs = {(name, "report") for name in OURS if name.startswith("janitor.")}
        events = await seen(server, about_queue | about_runs)
        sources = {event.type.partition(".")[0]: event.source for event in events}
        assert sources.keys() == {"queue", "message", "janitor"}
        assert {event.source for event in events} == {"ingest-0", "broker-0", "janitor-0"}
        stood = {one.service: one for one in await client.events_status()}
        assert {name for name, one in stood.items() if one.answering} == set(stood)
        assert stood.keys() == {"ingest", "broker", "janitor"}

        await asyncio.to_thread(server.kill)
        for name in ("a", "b"):
            await client.create_queue(name)
        await client.pause_queue("a")
        killed = stack.signal("broker", signal.SIGKILL)
        await asyncio.to_thread(stack.wait_restarted, "broker", killed)
        await client.resume_queue("a")
        lags = {one.service: one.lag_count for one in await client.events_status()}
        assert lags["broker"] >= 4
        await asyncio.to_thread(server.start)
        wanted = [("created", "a"), ("created", "b"), ("paused", "a"), ("resumed", "a")]
        after = await seen(server, {(f"queue.{what}", name) for what, name in wanted})

    order = [(event.type, about(event)) for event in after if about(event) in ("a", "b")]
    assert order == [(f"queue.{what}", name) for what, name in wanted]
