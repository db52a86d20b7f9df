"""A real Prometheus scrapes a real stack: every panel and alert has data, and alerts fire."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

import slatemq
from slatemq.errors import Unavailable
from slatemq.v1 import queue_pb2
from slatemq.v1.queue_pb2_grpc import QueueServiceStub
from tests.acceptance.local_stack import LocalStack
from tests.dashboards import of_namespace, panels
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.observability.alert_rules import alerts
from tests.integration.observability.prometheus_server import (
    WINDOW,
    Prometheus,
    eventually,
    shortened,
)
from tests.integration.observability.scraped_stack import (
    IN_FLIGHT_MAX,
    PAUSE_S,
    WAIT_S,
    Traffic,
    ended,
    firing,
    push,
    scraped,
)
from tests.integration.stack.processes import Service

pytestmark = [pytest.mark.stack, pytest.mark.slow]

STEPS_PAUSE_S = 0.05
"""Between two large requests: 21 within ten seconds are enough for the alert."""

BOUND = re.compile(r"\s(>|<|==)\s[\d.e]+$")
"""What an alert compares with: behind its expression."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(RedisServer(tmp_path_factory.mktemp("redis"), "streams")) as server:
        yield server


def with_events(
    folder: Path, redis: RedisServer, consistency: str, path: str = ""
) -> tuple[str, ...]:
    """The arguments of a stack whose events go to Redis, to the database of this path."""
    queue = {
        "enabled": True,
        "backend": "redis",
        "consistency": consistency,
        "redis": {"url": redis.settings("t").url + path},
    }
    (folder / "slatemq.yaml").write_text(yaml.safe_dump({"queue": queue}))
    return "--data", str(folder / "data"), "--config", str(folder / "slatemq.yaml")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, redis: RedisServer
) -> Iterator[tuple[LocalStack, Prometheus]]:
    """With traffic, and with event queues on Redis."""
    folder = tmp_path_factory.mktemp("observed")
    with scraped(folder, *with_events(folder, redis, "write-through")) as (stack, server):
        traffic = Traffic(stack.endpoint)
        try:
            yield stack, server
        finally:
            traffic.stop()


def test_every_curve_of_every_panel_has_data(run: tuple[LocalStack, Prometheus]) -> None:
    stack, server = run
    curves = {
        f"{dashboard}, {panel['title']}, {legend}": of_namespace(expression)
        for dashboard, panel in panels()
        for legend, expression in panel["curves"].items()
    }
    # Without the zero that stands in where there is nothing.
    without = {
        curve: shortened(expression.partition(" or ")[0]) for curve, expression in curves.items()
    }
    asyncio.run(_back_up(stack.endpoint))

    def all_have_data() -> bool:
        with urllib.request.urlopen(stack.console, timeout=WAIT_S):  # Of which samples are taken.
            pass
        for curve, expression in list(without.items()):
            if server.query(expression):
                del without[curve]
        return not without

    eventually(all_have_data, WAIT_S, lambda: without)


async def _back_up(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        run = await client.run_job("backup")
        assert (await client.wait_job_run(run.run_id)).state == "done"


def test_every_alert_reads_metrics_that_are_there(run: tuple[LocalStack, Prometheus]) -> None:
    _, server = run
    without = {name: shortened(rule["expr"]) for name, rule in alerts().items()}
    # This stack has no standbys and no TLS; promtool tries the alerts.
    del without["SlateMQStandbyMissing"], without["SlateMQCertificateExpires"]
    assert all(BOUND.search(expression) for expression in without.values())

    def all_have_data() -> bool:
        for name, expression in list(without.items()):
            if server.query(BOUND.sub("", expression)):
                del without[name]
        return not without

    eventually(all_have_data, WAIT_S, lambda: without)


def test_alerts_fire_in_real_faults_and_end_with_them(run: tuple[LocalStack, Prometheus]) -> None:
    stack, server = run
    ended(server)  # Given a stack that is well

    # When a message uses up its attempts, and a lease ends, that is a ticket
    asyncio.run(_fail_one(stack.endpoint, server))
    firing(server, ("SlateMQDeadLetters", "poisoned"), ("SlateMQLeasesEnd", "slow"))

    # When the router and then an ingest stand still, that is a page, for as long as they do
    for service, alert in (
        ("router", ("SlateMQNoRouter", "")),
        ("ingest", ("SlateMQPushesWait", "broker")),
    ):
        stopped = stack.signal(service, signal.SIGSTOP)
        try:
            asyncio.run(push(stack.endpoints["broker"]))
            firing(server, ("SlateMQProcessDown", service), alert)
        finally:
            os.kill(stopped, signal.SIGCONT)
        ended(server)
        ended(server, alert)

    # And when a broker does, messages do not get there
    stopped = stack.signal("broker", signal.SIGSTOP)
    try:
        asyncio.run(_publish(stack.endpoint))
        firing(server, ("SlateMQProcessDown", "broker"), ("SlateMQRoutingLag", ""))
    finally:
        os.kill(stopped, signal.SIGCONT)
    ended(server)


async def _publish(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.publish("x", {"queue": "orders"})


def test_alerts_of_queues_fire_in_real_faults_and_end_with_them(
    run: tuple[LocalStack, Prometheus],
) -> None:
    stack, server = run
    asyncio.run(_neglect_queues(stack, server))


async def _neglect_queues(stack: LocalStack, server: Prometheus) -> None:
    async with (
        slatemq.connect(stack.endpoint) as client,
        grpc.aio.insecure_channel(stack.endpoints["broker"]) as channel,
    ):
        # A message that nobody claims
        await client.create_queue("old")
        await client.publish("x", {"queue": "old"})
        alert = ("SlateMQQueueOld", "old")
        await asyncio.to_thread(firing, server, alert)
        (message,) = await client.claim("old", wait=WAIT_S)
        await client.ack([message.lease_token])
        await asyncio.to_thread(ended, server, alert)

        # A queue of which one partition was created, and the other one was not
        stub: Any = QueueServiceStub(channel)
        wire = queue_pb2.Queue(queue_id="begun", partition=queue_pb2.Partition(index=0, count=2))
        await stub.CreateQueue(queue_pb2.CreateQueueRequest(queue=wire, broker_shards=[0, 1]))
        alert = ("SlateMQQueueQuarantined", "begun")
        await asyncio.to_thread(firing, server, alert)
        await stub.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="begun"))
        await asyncio.to_thread(ended, server, alert)

        # Consumers that hold as many messages as may be in flight
        await client.create_queue("held")
        messages = [slatemq.OutgoingMessage(b"x", {"queue": "held"})] * (2 * IN_FLIGHT_MAX)
        await client.publish_many(messages)
        async with asyncio.timeout(WAIT_S):
            while (await client.get_queue("held")).counts.available_count < len(messages):
                await asyncio.sleep(PAUSE_S)
        held: list[str] = []
        holding = asyncio.create_task(_hold(client, "held", held))
        alert = ("SlateMQInFlightFull", "broker")
        await asyncio.to_thread(firing, server, alert)
        count = len(held)
        await client.ack(held)
        async with asyncio.timeout(WAIT_S):
            while len(held) == count:
                await asyncio.sleep(PAUSE_S)
        holding.cancel()
        await asyncio.wait([holding])
        await client.purge_queue("held", ["available", "in_flight"])
        await asyncio.to_thread(ended, server, alert)


async def _hold(client: slatemq.Client, queue_id: str, held: list[str]) -> None:
    """Claim whatever may be claimed, with leases that last longer than the test."""
    while True:
        with suppress(Unavailable):
            claimed = await client.claim(queue_id, IN_FLIGHT_MAX, wait=WAIT_S, lease=600)
            held += [one.lease_token for one in claimed]


def test_alerts_of_processes_fire_in_real_faults_and_end_with_them(
    run: tuple[LocalStack, Prometheus],
) -> None:
    stack, server = run
    ended(server)

    # Steps of a loop that take long: of each large request here, by the bound of this stack
    asyncio.run(_publish_until(stack.endpoint, server, "SlateMQSlowSteps"))

    # A janitor that is killed while it runs a job, as its successor finds
    asyncio.run(_run_job(stack))
    firing(server, ("SlateMQJanitorFailed", "janitor"))

    # A pod that is gone is no target any more
    targets = list(stack.http_endpoints.items())
    server.scrape([one for one in targets if one[0] != "broker"])
    firing(server, ("SlateMQServiceAbsent", "broker"))
    server.scrape(targets)
    ended(server)


MISSING = ("SlateMQShardsMissing", "broker")
FIRED = 'ALERTS{alertname="SlateMQShardsMissing",alertstate="firing"}'


def test_an_alert_fires_while_a_shard_is_missing_until_it_is_removed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with scraped(tmp_path, "--data", str(data)) as (stack, server):
        asyncio.run(_lose_a_shard(tmp_path, stack, server))


async def _lose_a_shard(folder: Path, stack: LocalStack, server: Prometheus) -> None:
    targets = list(stack.http_endpoints.items())
    second = Service(folder, "broker", "--shard", "1", "--http-port", "0")
    await second.start()
    try:
        server.scrape([*targets, ("broker", second.http_address)])
        both = 'slatemq:shards:count{service="broker"} == 2 and slatemq:owners:count == 2'
        await asyncio.to_thread(eventually, lambda: server.query(both), WAIT_S)
        await asyncio.to_thread(ended, server)

        # A shard that is gone from the targets is missed, not for a time only
        server.scrape(targets)
        lasts = f"count_over_time({FIRED}[1m]) > 2 * {WINDOW.removesuffix('s')}"
        await asyncio.to_thread(eventually, lambda: server.query(lasts), WAIT_S)

        # Until it is back
        server.scrape([*targets, ("broker", second.http_address)])
        await asyncio.to_thread(ended, server, MISSING)

        # And is missed no more once it was removed as it should be
        async with slatemq.connect(stack.endpoint) as client:
            await client.drain_shard("broker", 1)
            draining = 'slatemq_shard_draining{service="broker"} == 1'
            await asyncio.to_thread(eventually, lambda: server.query(draining), WAIT_S)
            server.scrape(targets)
            await asyncio.to_thread(firing, server, MISSING)
            await client.remove_shard("broker", 1)
        assert await second.process.wait() == 0
        await asyncio.to_thread(ended, server)
    finally:
        await second.close()


async def _publish_until(endpoint: str, server: Prometheus, alert: str) -> None:
    messages = [slatemq.OutgoingMessage(bytes(1024), {"queue": "absent"})] * 1000
    async with slatemq.connect(endpoint) as client, asyncio.timeout(WAIT_S):
        while alert not in {name for name, _ in await asyncio.to_thread(server.firing)}:
            await client.publish_batch(messages)
            await asyncio.sleep(STEPS_PAUSE_S)


async def _run_job(stack: LocalStack) -> None:
    """Have the janitor run one, and kill it before that ends."""
    async with slatemq.connect(stack.endpoint) as client:
        await client.run_job("report")
    pid = stack.signal("janitor", signal.SIGKILL)
    await asyncio.to_thread(stack.wait_restarted, "janitor", pid)


def test_alerts_of_events_fire_while_their_backend_is_down(
    run: tuple[LocalStack, Prometheus], redis: RedisServer
) -> None:
    _, server = run
    alert = ("SlateMQEventsLate", "ingest")
    redis.kill()
    try:
        firing(server, alert)
    finally:
        redis.start()
    ended(server, alert)


@pytest.mark.proof
def test_an_alert_fires_while_the_backend_of_events_refuses_a_setting(tmp_path: Path) -> None:
    backend = RedisServer(tmp_path, "streams")
    # Given a backend that is down at the start, and has no such database
    with scraped(tmp_path, *with_events(tmp_path, backend, "write-through", "/99")) as run:
        stack, server = run
        traffic = Traffic(stack.endpoint)
        with running(backend):
            refused = {("SlateMQEventsRefused", one) for one in ("ingest", "broker")}
            firing(server, *refused)

            # When its settings name another one
            with_events(tmp_path, backend, "write-through")
            for service in ("ingest", "broker"):
                pid = stack.signal(service, signal.SIGKILL)
                stack.wait_restarted(service, pid)
            ended(server, *refused)
            traffic.stop()


@pytest.mark.proof
def test_an_alert_fires_when_events_are_lost(tmp_path: Path, redis: RedisServer) -> None:
    arguments = with_events(tmp_path, redis, "fire-and-forget")
    with scraped(tmp_path, *arguments) as (stack, server):
        traffic = Traffic(stack.endpoint)
        eventually(lambda: server.query("slatemq_queue_lost_total"), WAIT_S)
        assert "SlateMQEventsLost" not in {name for name, _ in server.firing()}

        redis.kill()
        try:
            firing(server, ("SlateMQEventsLost", "ingest"))
        finally:
            redis.start()
        ended(server, ("SlateMQEventsLost", "ingest"))
        traffic.stop()


@pytest.mark.proof
def test_an_alert_fires_while_a_standby_is_missing(tmp_path: Path) -> None:
    with scraped(tmp_path, "--data", str(tmp_path / "data"), "--standbys") as (stack, server):
        eventually(lambda: server.query('slatemq_standby_waiting{service="broker"} == 1'), WAIT_S)
        stopped = stack.signal("broker-standby", signal.SIGSTOP)
        try:
            firing(server, ("SlateMQStandbyMissing", "broker"))
        finally:
            os.kill(stopped, signal.SIGCONT)
        ended(server, ("SlateMQStandbyMissing", "broker"))


CLAIMED = 'slatemq_queue_claimed_messages_total{messaging_destination_name="slow"}'


async def _fail_one(endpoint: str, server: Prometheus) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.create_queue("slow", max_attempts=9)
        # Prometheus is to have seen this queue before: rates compare.
        await asyncio.to_thread(eventually, lambda: server.query(CLAIMED), WAIT_S)
        await client.create_queue("poisoned", max_attempts=1)
        await client.publish("x", {"queue": "poisoned"})
        await client.publish("x", {"queue": "slow"})
        (message,) = await client.claim("poisoned", wait=30)
        await client.nack([message.lease_token], "no")
        assert await client.claim("slow", wait=30, lease=1)
