"""An ingest and a broker that are stopped: connections to them stay open, and nothing answers."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

import slatemq
from slatemq._publish import shards as liveness
from slatemq._rpc import outages, peers
from slatemq.errors import Unavailable
from tests.integration.client.outage_lines import Lines, lines
from tests.integration.stack.processes import Service

__all__ = ["lines"]

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

BUSY_S = 60.0
"""What a live server needs on a busy machine; no test waits for so long unless it fails."""

PING_OPTIONS = {
    "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout_ms",
    "grpc.http2.ping_timeout_ms",
}


class Frozen:
    """Two ingests, a broker and a router, each of which may be stopped for a while."""

    def __init__(self, root: Path) -> None:
        (root / "data").mkdir()
        self.ingests = [Service(root, "ingest", "--shard", str(n)) for n in range(2)]
        self.broker = Service(root, "broker")
        self.router = Service(root, "router")
        self.all = [*self.ingests, self.broker, self.router]

    async def received(self, count: int) -> Counter[bytes]:
        """The payloads of the next messages of the queue."""
        got: Counter[bytes] = Counter()
        async with slatemq.connect(self.broker.address) as client:
            async with asyncio.timeout(BUSY_S), client.consume("q") as messages:
                while got.total() < count:
                    async with await anext(messages) as message:
                        got[message.payload] += 1
            assert not await client.claim("q")
        return got


@contextmanager
def frozen(service: Service) -> Iterator[None]:
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Frozen]:
    made = Frozen(tmp_path_factory.mktemp("frozen"))
    try:
        await asyncio.gather(*(service.start() for service in made.all))
        async with slatemq.connect(made.broker.address) as client:
            await client.create_queue("q")
            await client.create_queue("idle")
        yield made
    finally:
        await asyncio.gather(*(service.close() for service in made.all))


@pytest.mark.parametrize("form", ["publish", "publish_batch"])
async def test_a_publish_leaves_an_ingest_that_is_frozen_within_its_own_deadline(
    stack: Frozen, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    # Given a client that is connected to both ingests, and has not heard of either just now
    monkeypatch.setattr(liveness, "FRESH_S", 0.0)
    payloads = [f"{form} {number}".encode() for number in range(8)]
    async with slatemq.connect(stack.broker.address, call_timeout=BUSY_S) as client:

        async def publish(payload: bytes) -> None:
            if form == "publish":
                await client.publish(payload, {"queue": "q"})
            else:
                message = slatemq.OutgoingMessage(payload, {"queue": "q"})
                await client.publish_batch([message])

        for payload in payloads[:4]:
            await publish(payload)
        # When one of them is frozen
        with frozen(stack.ingests[1]):
            for payload in payloads[4:]:
                await publish(payload)
    # Then each message is stored once, also after the frozen one has gone on
    assert await stack.received(8) == Counter(payloads)


@pytest.mark.parametrize("kind", ["consume", "consume_batches"])
async def test_the_outage_of_a_frozen_broker_counts_from_its_last_sign_of_life(
    stack: Frozen, monkeypatch: pytest.MonkeyPatch, lines: Lines, kind: str
) -> None:
    # Given a client that pings after a quarter of the usual time, and waits a quarter of it
    quicker = {name: value // 4 for name, value in peers._OPTIONS if name in PING_OPTIONS}
    options = [(name, quicker.get(name, value)) for name, value in peers._OPTIONS]
    monkeypatch.setattr(peers, "_OPTIONS", options)
    monkeypatch.setattr(outages, "SILENCE_S", peers.SILENCE_S / 4)
    # And a consumer that had a message, and waits for the next one
    async with (
        slatemq.connect(stack.broker.address) as client,
        getattr(client, kind)("idle", outage_timeout=peers.SILENCE_S / 2) as consumer,
        asyncio.timeout(BUSY_S),
    ):
        await client.publish(b"first", {"queue": "idle"})
        first = await anext(consumer)
        await (first.ack_all() if kind == "consume_batches" else first.ack())
        monkeypatch.setattr(outages, "WARN_S", 0.0)
        # When the broker is frozen
        with frozen(stack.broker):
            with pytest.raises(Unavailable) as raised:
                await anext(consumer)
            assert raised.value.reason == "OUTAGE_TIMEOUT"
    # Then the first warning counts at least the time for which a ping had no answer
    line = await lines.first("answers no ping")
    lasted = re.match(r"the broker of queue 'idle' has not answered for (\d+) s", line)
    assert lasted is not None, line
    assert int(lasted[1]) >= 1
