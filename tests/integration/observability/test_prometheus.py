"""A real Prometheus scrapes a real stack: every panel and alert has data, and alerts fire."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

import slatemq
from slatemq import Push
from slatemq.errors import NotFound
from slatemq.v1 import queue_pb2
from slatemq.v1.queue_pb2_grpc import QueueServiceStub
from tests.acceptance.local_stack import LocalStack
from tests.dashboards import panels
from tests.faults.faulty_store import Fault, Outcome, faulty_store
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.observability.alert_rules import alerts
from tests.integration.observability.prometheus_server import (
    Prometheus,
    eventually,
    prometheus,
    shortened,
)
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = [pytest.mark.stack, pytest.mark.slow]

WAIT_S = 60.0
PAUSE_S = 0.3
"""Between two rounds of the traffic: several in each second, in which there is one scrape."""

STEPS_PAUSE_S = 0.05
"""Between two large requests: 21 within ten seconds are enough for the alert."""

SMALL_DISK_MIB = 256
IN_FLIGHT_MAX = 1_000
BOUND = re.compile(r"\s(>|<|==)\s[\d.e]+$")
"""What an alert compares with: behind its expression."""


class Traffic(threading.Thread):
    """Messages that are published, claimed and acked all the time, from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._work())

    def stop(self) -> None:
        self._ended.set()
        self.join()

    async def _work(self) -> None:
        async with slatemq.connect(self._endpoint) as client:
            await client.create_queue("orders")
            await client.create_queue("flaky", max_attempts=100, backoff=slatemq.Backoff.none())
            # Its priority cannot be computed; it begins with what is stored already.
            await client.publish("x", {"queue": "orders"})
            await client.create_queue(
                "replayed",
                filter='headers.queue == "orders"',
                priority="int(headers.rank)",
                start_from="beginning",
            )
            while not self._ended.is_set():
                with suppress(NotFound):
                    await client.get_queue("absent")
                await client.publish("x", {"queue": "orders"})
                await client.publish("x", {"queue": "flaky"})
                for message in await client.claim("orders", 10, wait=1):
                    await client.execute([slatemq.Complete(message)])
                    await client.execute([Push("flaky", "y")])
                claimed = await client.claim("flaky", 10)
                tokens = [message.lease_token for message in claimed]
                await client.nack(tokens[:1])
                await client.ack(tokens[1:])
                await asyncio.sleep(PAUSE_S)


@contextmanager
def scraped(folder: Path, *arguments: str) -> Iterator[tuple[LocalStack, Prometheus]]:
    """A stack, and the Prometheus that scrapes it."""
    with pytest.MonkeyPatch.context() as environ:
        # So that there are some, on a fast machine too.
        environ.setenv("SLATEMQ_SLOW_STEP_MS", "1")
        environ.setenv("SLATEMQ_IN_FLIGHT_MAX", str(IN_FLIGHT_MAX))
        environ.setenv("SLATEMQ_BACKUP_ROOT", (folder / "backups").as_uri())
        stack = LocalStack(folder / "stack", *arguments, "--http-ports", "0", ready=True)
    with stack, prometheus(folder / "prometheus", stack.http_endpoints) as server:
        yield stack, server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(RedisServer(tmp_path_factory.mktemp("redis"), "streams")) as server:
        yield server


def with_events(folder: Path, redis: RedisServer, consistency: str) -> tuple[str, ...]:
    """The arguments of a stack whose events go to Redis."""
    queue = {
        "enabled": True,
        "backend": "redis",
        "consistency": consistency,
        "redis": {"url": redis.settings("t").url},
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
        f"{dashboard}, {panel['title']}, {legend}": expression
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
    del without["SlateMQStandbyMissing"]  # This stack has no standbys; promtool tries the alert.
    assert all(BOUND.search(expression) for expression in without.values())

    def all_have_data() -> bool:
        for name, expression in list(without.items()):
            if server.query(BOUND.sub("", expression)):
                del without[name]
        return not without

    eventually(all_have_data, WAIT_S, lambda: without)


def firing(server: Prometheus, *wanted: tuple[str, str]) -> None:
    """Wait until these have fired, each with its queue or service."""
    left = set(wanted)  # Each for as long as its window lasts, perhaps not together.

    def all_have_fired() -> bool:
        left.difference_update(server.firing())
        return not left

    eventually(all_have_fired, WAIT_S, lambda: left)


def ended(server: Prometheus, *wanted: tuple[str, str]) -> None:
    """Wait until none of these fires; of none given: no alert that is a page."""
    pages = {name for name, rule in alerts().items() if rule["labels"]["severity"] == "page"}

    def have_ended() -> bool:
        left = server.firing()
        return not (left & {*wanted} if wanted else {name for name, _ in left} & pages)

    eventually(have_ended, WAIT_S, server.firing)


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
            asyncio.run(_push(stack.endpoints["broker"]))
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


async def _push(endpoint: str) -> None:
    """To an ingest, through a broker."""
    async with slatemq.connect(endpoint) as client:
        await client.execute([Push("flaky", "y")])


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
        (message,) = await client.claim("old")
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
        held: list[str] = []
        while claimed := await client.claim("held", IN_FLIGHT_MAX, wait=1):
            held += [one.lease_token for one in claimed]
        waiting = asyncio.create_task(client.claim("held", wait=WAIT_S))
        alert = ("SlateMQInFlightFull", "broker")
        await asyncio.to_thread(firing, server, alert)
        await client.ack(held)
        assert await waiting
        await client.purge_queue("held", ["available", "in_flight"])
        await asyncio.to_thread(ended, server, alert)


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

    # A pod that is gone is no target any more: of two shards, then of the only one
    targets = list(stack.http_endpoints.items())
    _, _, port = stack.http_endpoints["broker"].rpartition(":")
    server.scrape([*targets, ("broker", f"localhost:{port}")])
    two = 'slatemq:owners:lasting{service="broker"} == 2'
    eventually(lambda: server.query(two), WAIT_S)
    server.scrape(targets)
    firing(server, ("SlateMQShardsMissing", "broker"))
    server.scrape([one for one in targets if one[0] != "broker"])
    firing(server, ("SlateMQServiceAbsent", "broker"))
    server.scrape(targets)
    ended(server)


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


def test_alerts_of_events_fire_while_their_backend_is_away(
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
def test_an_alert_fires_when_events_are_lost(tmp_path: Path, redis: RedisServer) -> None:
    arguments = with_events(tmp_path, redis, "fire-and-forget")
    with scraped(tmp_path, *arguments) as (stack, server):
        traffic = Traffic(stack.endpoint)
        eventually(lambda: server.query("slatemq_queue_lost"), WAIT_S)
        assert "SlateMQEventsLost" not in {name for name, _ in server.firing()}

        redis.kill()
        try:
            firing(server, ("SlateMQEventsLost", "ingest"))
        finally:
            redis.start()
            traffic.stop()


@pytest.mark.proof
def test_an_alert_fires_where_an_ingest_has_lost_pushes_until_they_are_given_up(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with LocalStack(tmp_path / "first", "--data", str(data), ready=True) as stack:
        asyncio.run(_push_and_claim(stack.endpoint))
    # Another ingest, which has none of the messages, stands in the place of that one
    (data / "ingest").rename(tmp_path / "lost")
    (data / "topology" / "ingest-0.json").unlink()
    with scraped(tmp_path / "second", "--data", str(data)) as (stack, server):
        asyncio.run(_push(stack.endpoint))
        halted = ("SlateMQOutboxHalted", "broker")
        firing(server, halted)
        asyncio.run(_resume(stack.endpoint))
        ended(server, halted)


async def _push_and_claim(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.create_queue("flaky")
        await client.execute([Push("flaky", b"x")])
        assert await client.claim("flaky", wait=WAIT_S)


async def _resume(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.resume_outbox(0, 0)


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


CLAIMED = 'slatemq_queue_claimed_messages_total{messaging_destination_name=~"poisoned|slow"}'


async def _fail_one(endpoint: str, server: Prometheus) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.create_queue("poisoned", max_attempts=1)
        await client.create_queue("slow", max_attempts=9)
        # Prometheus is to have seen both queues before: it compares.
        await asyncio.to_thread(eventually, lambda: len(server.query(CLAIMED)) == 2, WAIT_S)
        await client.publish("x", {"queue": "poisoned"})
        await client.publish("x", {"queue": "slow"})
        (message,) = await client.claim("poisoned", wait=30)
        await client.nack([message.lease_token], "no")
        assert await client.claim("slow", wait=30, lease=1)


@pytest.mark.s3
@pytest.mark.proof
def test_alerts_fire_while_a_store_refuses_is_slow_or_silent_and_end_with_it(
    tmp_path: Path,
) -> None:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with pytest.MonkeyPatch.context() as environ, moto() as port, faulty_store(port, 1) as store:
        for name, value in CREDENTIALS.items():
            environ.setenv(name, value)
        with scraped(tmp_path, "--store", root_url(store.port, "t")) as (stack, server):
            traffic = Traffic(stack.endpoint)
            eventually(lambda: server.query("slatemq_commit_size_bytes_count > 3"), WAIT_S)

            store.set(Fault(Outcome.REFUSE, match="topology"))
            refused = {("SlateMQStoreErrors", "broker")}
            eventually(lambda: refused <= server.firing(), 2 * WAIT_S, server.firing)
            store.set()
            eventually(lambda: not refused & server.firing(), 2 * WAIT_S, server.firing)

            store.set(Fault(method="PUT", delay_s=1.5))
            slow = {("SlateMQCommitsSlow", "ingest"), ("SlateMQCommitsSlow", "broker")}
            eventually(lambda: slow <= server.firing(), 2 * WAIT_S, server.firing)
            store.set()
            eventually(lambda: not slow & server.firing(), 2 * WAIT_S, server.firing)

            store.set(Fault(Outcome.HOLD))
            wanted = {("SlateMQStoreSilent", "ingest"), ("SlateMQNotServing", "ingest")}
            eventually(lambda: wanted <= server.firing(), 2 * WAIT_S, server.firing)

            store.set()
            eventually(lambda: not wanted & server.firing(), 2 * WAIT_S, server.firing)
            traffic.stop()


@pytest.mark.proof
def test_an_alert_fires_while_a_disk_has_little_room_and_ends_with_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        data = disk / "data"
        with scraped(tmp_path, "--data", str(data), "--logs", str(tmp_path / "logs")) as run:
            stack, server = run
            traffic = Traffic(stack.endpoint)
            full = {("SlateMQDiskFilling", "ingest"), ("SlateMQDiskFilling", "broker")}
            eventually(lambda: server.query("slatemq_store_disk_free_bytes"), WAIT_S)
            assert not full & server.firing()

            ballast = disk / "ballast"
            ballast.write_bytes(bytes(int(0.95 * shutil.disk_usage(disk).free)))
            eventually(lambda: full <= server.firing(), WAIT_S, server.firing)

            ballast.unlink()
            eventually(lambda: not full & server.firing(), WAIT_S, server.firing)
            traffic.stop()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own; skips the test where this process may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be made: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
