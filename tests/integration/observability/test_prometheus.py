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

import pytest
import yaml

import slatemq
from slatemq import Push
from slatemq.errors import NotFound
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
PAUSE_S = 0.05
SMALL_DISK_MIB = 256
ELSEWHERE = {
    "overview, Refused ranges and replays, refused ranges",  # two routers that compete
    "processes, Events, failed",  # a backend that is down
    "processes, Age of the newest backup, {{namespace}}",  # a janitor with a place for them
    "processes, Duration of runs, {{slatemq_job}}",  # a job of Spark
    "processes, Logins, refused {{slatemq_login_refused}}",  # an instance with a policy
}
"""Curves of what does not happen here."""

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
        stack = LocalStack(folder / "stack", *arguments, "--http-ports", "0", ready=True)
    with stack, prometheus(folder / "prometheus", stack.http_endpoints) as server:
        yield stack, server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, Prometheus]]:
    """With traffic, and with event queues on Redis."""
    folder = tmp_path_factory.mktemp("observed")
    with running(RedisServer(folder, "streams")) as redis:
        queue = {
            "enabled": True,
            "backend": "redis",
            "consistency": "write-through",
            "redis": {"url": redis.settings("t").url},
        }
        (folder / "slatemq.yaml").write_text(yaml.safe_dump({"queue": queue}))
        arguments = ("--data", str(folder / "data"), "--config", str(folder / "slatemq.yaml"))
        with scraped(folder, *arguments) as (stack, server):
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
    assert {*curves} >= ELSEWHERE
    # Without the zero that stands in where there is nothing.
    without = {
        curve: shortened(expression.partition(" or ")[0])
        for curve, expression in curves.items()
        if curve not in ELSEWHERE
    }

    def all_have_data() -> bool:
        with urllib.request.urlopen(stack.console, timeout=WAIT_S):  # Of which samples are taken.
            pass
        for curve, expression in list(without.items()):
            if server.query(expression):
                del without[curve]
        return not without

    eventually(all_have_data, WAIT_S, lambda: without)


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


def test_alerts_fire_in_real_faults_and_end_with_them(run: tuple[LocalStack, Prometheus]) -> None:
    stack, server = run
    pages = {name for name, rule in alerts().items() if rule["labels"]["severity"] == "page"}

    def fire(*wanted: tuple[str, str]) -> None:
        left = set(wanted)  # Each for as long as its window lasts, perhaps not together.

        def all_have_fired() -> bool:
            left.difference_update(server.firing())
            return not left

        eventually(all_have_fired, WAIT_S, lambda: left)

    # Given a stack that is well: no alert is a page
    eventually(lambda: not {name for name, _ in server.firing()} & pages, WAIT_S, server.firing)

    # When a message uses up its attempts, and a lease ends, that is a ticket
    asyncio.run(_fail_one(stack.endpoint, server))
    fire(("SlateMQDeadLetters", "poisoned"), ("SlateMQLeasesEnd", "slow"))

    # When the router and then an ingest stand still, that is a page, for as long as they do
    for service, alert in (("router", ("SlateMQNoRouter", "")), ("ingest", None)):
        stopped = stack.signal(service, signal.SIGSTOP)
        try:
            fire(("SlateMQProcessDown", service), *([alert] if alert else []))
        finally:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: not {name for name, _ in server.firing()} & pages, WAIT_S, server.firing)


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
def test_alerts_fire_while_a_store_is_slow_or_silent_and_end_with_it(tmp_path: Path) -> None:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with pytest.MonkeyPatch.context() as environ, moto() as port, faulty_store(port, 1) as store:
        for name, value in CREDENTIALS.items():
            environ.setenv(name, value)
        with scraped(tmp_path, "--store", root_url(store.port, "t")) as (stack, server):
            traffic = Traffic(stack.endpoint)
            eventually(lambda: server.query("slatemq_commit_size_bytes_count > 3"), WAIT_S)

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
