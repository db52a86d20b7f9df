"""Outages that consumers wait for: in the log, bounded, and over when the server is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import slatemq
from slatemq._rpc import outages
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.client.outage_lines import Lines, lines
from tests.integration.client.peers import Instance
from tests.integration.waiting import eventually

__all__ = ["lines"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No warning, however slow the machine is, unless a test wants one."""
    monkeypatch.setattr(outages, "WARN_S", 600.0)
    return monkeypatch


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(instance.endpoint) as connected:
        yield connected


async def stop_broker(instance: Instance) -> None:
    """The broker is down, its address still known."""
    await instance.servers[-1].stop(None)


async def taken(consumer: slatemq.Consumer | slatemq.BatchConsumer) -> bytes:
    """The payload of the next message, alone or in a batch."""
    if isinstance(consumer, slatemq.BatchConsumer):
        (message,) = await anext(consumer)
    else:
        message = await anext(consumer)
    await message.ack()
    return message.payload


@pytest.mark.parametrize("kind", ["consume", "consume_batches"])
async def test_an_outage_is_logged_when_it_lasts_and_when_it_is_over(
    instance: Instance,
    client: slatemq.Client,
    lines: Lines,
    kind: str,
    patience: pytest.MonkeyPatch,
) -> None:
    async with getattr(client, kind)("q") as consumer:
        instance.broker.available.append((b"before", 0))
        assert await taken(consumer) == b"before"
        patience.setattr(outages, "WARN_S", 0.2)
        waiting = asyncio.create_task(taken(consumer))
        # When the broker goes
        await stop_broker(instance)
        line = await lines.first("not answered")
        assert line.startswith("the broker of queue 'q' has not answered")
        # And comes back, elsewhere
        instance.broker.available.append((b"after", 0))
        await instance.serve(broker=instance.broker)
        assert await waiting == b"after"
        await lines.first("answers again")
    assert len(lines.lines) == 2


async def test_a_stream_that_a_limit_keeps_out_is_logged_as_refused(
    instance: Instance, client: slatemq.Client, lines: Lines
) -> None:
    instance.broker.full = True
    async with client.consume("q") as consumer:
        waiting = asyncio.create_task(taken(consumer))
        await eventually(lambda: consumer._parts and consumer._parts[0].watch.outage)
        consumer._parts[0].watch._warn()
        line = await lines.first("refuses calls")
        assert line.startswith("the broker of queue 'q' refuses calls for ")
        assert line.endswith(": no place for a stream")

        instance.broker.full = False
        instance.broker.available.append((b"after", 0))
        assert await waiting == b"after"
        await lines.first("the broker of queue 'q' accepts calls again")
    assert not [one for one in lines.lines if "answer" in one]


async def test_a_broker_that_is_down_from_the_start_is_logged(
    instance: Instance, client: slatemq.Client, lines: Lines, patience: pytest.MonkeyPatch
) -> None:
    patience.setattr(outages, "WARN_S", 0.2)
    await stop_broker(instance)
    async with client.consume("q") as messages:
        waiting = asyncio.create_task(anext(messages))
        await lines.first("not answered")
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_short_outage_is_not_logged(
    instance: Instance, client: slatemq.Client, lines: Lines
) -> None:
    async with client.consume("q") as messages:
        instance.broker.available.append((b"before", 0))
        assert await taken(messages) == b"before"
        await stop_broker(instance)
        instance.broker.available.append((b"after", 0))
        await instance.serve(broker=instance.broker)
        assert await taken(messages) == b"after"
    assert lines.lines == []


@pytest.mark.parametrize("kind", ["consume", "consume_batches"])
async def test_iterating_ends_when_the_outage_lasts_for_its_timeout(
    instance: Instance, client: slatemq.Client, kind: str
) -> None:
    await stop_broker(instance)
    async with getattr(client, kind)("q", outage_timeout=0.4) as consumer, asyncio.timeout(60):
        for _ in range(2):  # And at every later try
            with pytest.raises(Unavailable, match="queue 'q'") as raised:
                await anext(consumer)
            assert raised.value.reason == "OUTAGE_TIMEOUT"


async def test_a_queue_without_messages_is_not_an_outage(
    instance: Instance, client: slatemq.Client, lines: Lines
) -> None:
    async with client.consume("q", outage_timeout=30) as messages:
        waiting = asyncio.create_task(taken(messages))
        async with asyncio.timeout(60):
            while not messages._parts or not (
                messages._parts[0].watch._timers or instance.broker.streams
            ):
                await asyncio.sleep(0.01)
            while messages._parts[0].watch._timers:  # Timed until the broker has answered.
                await asyncio.sleep(0.01)
        assert not waiting.done()
        instance.broker.available.append((b"x", 0))
        await instance.broker.report()
        assert await waiting == b"x"
    assert lines.lines == []


async def test_process_waits_for_its_handlers_before_it_reports_the_outage(
    instance: Instance, client: slatemq.Client
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    ended: list[bytes] = []

    async def handle(message: slatemq.Received) -> None:
        begun.set()
        await go_on.wait()
        ended.append(message.payload)

    instance.broker.available.append((b"x", 0))
    work = asyncio.create_task(client.process("q", handle, concurrency=2, outage_timeout=600))
    await begun.wait()
    await stop_broker(instance)
    (consumer,) = client._consumers
    watch = consumer._parts[0].watch
    await eventually(lambda: watch.outage)
    watch._timeout_s = 0
    watch._give_up()
    done, _ = await asyncio.wait([work], timeout=0.5)
    assert not done
    await instance.serve(broker=instance.broker)
    go_on.set()
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable) as raised:
            await work
    assert raised.value.reason == "OUTAGE_TIMEOUT"
    assert ended == [b"x"]
    assert instance.broker.acked == [b"x"]


@pytest.mark.parametrize("wrong", [-1, "soon"])
def test_a_timeout_that_cannot_be_is_refused(wrong: object) -> None:
    client = slatemq.connect("127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="outage_timeout"):
        client.consume("q", outage_timeout=wrong)  # type: ignore[arg-type]


async def test_an_ingest_that_publishes_wait_for_is_logged(
    instance: Instance, lines: Lines, patience: pytest.MonkeyPatch
) -> None:
    server = instance.servers[1]
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"before")
        patience.setattr(outages, "WARN_S", 0.2)
        await server.stop(None)
        publishing = asyncio.create_task(client.publish(b"x", dedupe_key="k"))
        assert (await lines.first("not answered")).startswith("ingest shard 0 has not answered")
        await instance.serve(ingest=instance.ingest)
        await publishing
        await lines.first("ingest shard 0 answers again")
    assert len(lines.lines) == 2


async def test_a_watch_of_delayed_messages_logs_its_outages(
    instance: Instance, client: slatemq.Client, lines: Lines, patience: pytest.MonkeyPatch
) -> None:
    patience.setattr(outages, "WARN_S", 0.2)
    await stop_broker(instance)
    async with client.watch_delayed("q") as watch:
        waiting = asyncio.create_task(anext(watch))
        await lines.first("the broker of queue 'q' has not answered")
        assert watch.outage is not None
        waiting.cancel()
        await asyncio.wait([waiting])
