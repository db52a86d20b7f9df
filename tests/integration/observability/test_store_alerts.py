"""Alerts of stores, disks, memory and pushes fire in real faults, which a real Prometheus sees."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import slatemq
from slatemq import Push
from tests.acceptance.local_stack import LocalStack
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.faults.memory_limits import MemoryGroup, lacking
from tests.integration.observability.prometheus_server import LOOK_S, Prometheus, eventually
from tests.integration.observability.scraped_stack import (
    WAIT_S,
    Traffic,
    ended,
    firing,
    push,
    scraped,
)
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.proof]

SMALL_DISK_MIB = 256

LONG_S = 600.0
"""For thousands of commits, of which the store takes some 50 a second, and for a compactor, whose
looks are a minute apart."""

TABLE_DELAY_S = 20.0
"""For which the store takes a table of 16 MiB, two of them at a time."""

BATCH = [os.urandom(1024) for _ in range(1000)]
LARGE = bytes(1 << 20)
"""A payload that is an object of its own."""


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
        asyncio.run(push(stack.endpoint))
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


@contextmanager
def on_faulty_store(folder: Path) -> Iterator[tuple[FaultyStore, LocalStack, Prometheus]]:
    """A scraped stack on an S3 server that does as the store is set to."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with pytest.MonkeyPatch.context() as environ, moto() as port, faulty_store(port, 1) as store:
        for name, value in CREDENTIALS.items():
            environ.setenv(name, value)
        with scraped(folder, "--store", root_url(store.port, "t")) as (stack, server):
            yield store, stack, server


@pytest.mark.s3
def test_alerts_fire_while_a_store_refuses_is_slow_or_silent_and_end_with_it(
    tmp_path: Path,
) -> None:
    with on_faulty_store(tmp_path) as (store, stack, server):
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


@pytest.mark.s3
def test_alerts_fire_while_tables_cannot_be_compacted_or_stored_and_end_with_it(
    tmp_path: Path,
) -> None:
    with on_faulty_store(tmp_path) as (store, stack, server):
        # Given a compactor that cannot store what it is about to do
        store.set(Fault(Outcome.HOLD, "PUT", "/ingest/0/compactions/"))
        behind = ("SlateMQCompactionBehind", "ingest")
        asyncio.run(_publish_until(lambda: behind in server.firing(), stack.endpoint, [b"x"]))
        store.set()
        eventually(lambda: behind not in server.firing(), LONG_S, server.firing)

        # And a store that takes tables far more slowly than messages are published
        store.set(Fault(method="PUT", match="/ingest/0/compacted/", delay_s=TABLE_DELAY_S))
        stall = ("SlateMQWritesStall", "ingest")
        asyncio.run(_publish_until(lambda: stall in server.firing(), stack.endpoint, BATCH))
        store.set()
        ended(server, stall)


async def _publish_until(
    come_about: Callable[[], bool], endpoint: str, payloads: Sequence[bytes]
) -> None:
    """Publish these again and again, so that each time is a commit."""
    messages = [slatemq.OutgoingMessage(one, {"queue": "absent"}) for one in payloads]

    async def publish() -> None:
        while True:
            await client.publish_batch(messages)

    async with slatemq.connect(endpoint, call_timeout=LONG_S) as client, asyncio.timeout(LONG_S):
        publishing = asyncio.create_task(publish())
        while not await asyncio.to_thread(come_about):
            assert not publishing.done(), publishing.exception()
            await asyncio.sleep(LOOK_S)
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing


def test_an_alert_fires_while_a_container_has_too_little_memory(tmp_path: Path) -> None:
    if reason := lacking():
        pytest.skip(reason)
    with scraped(tmp_path, "--data", str(tmp_path / "data")) as (stack, server):
        high = ("SlateMQMemoryHigh", "ingest")
        group = MemoryGroup("ingest")
        try:
            group.add(stack.pids["ingest"])
            eventually(lambda: server.query('process_memory_usage_bytes{service="ingest"}'), WAIT_S)
            assert high not in server.firing()

            (taken,) = server.query('process_memory_usage_bytes{service="ingest"}')
            group.limit(int(1.2 * float(taken["value"][1])))
            firing(server, high)

            group.limit(None)
            ended(server, high)
        finally:
            stack.close()
            group.close()


def test_an_alert_fires_while_an_ingest_refuses_pushes_until_they_are_retried(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SLATEMQ_PAYLOAD_BYTES_MAX", str(len(LARGE) - 1))
        LocalStack(tmp_path / "first", "--data", str(data), ready=True).close()
    with scraped(tmp_path / "second", "--data", str(data)) as (stack, server):
        # Given larger payloads than once, and one that waits for an ingest that stands still
        asyncio.run(_permit_larger(stack.endpoint))
        for service in ("broker", "ingest"):
            _restart(stack, service)
        stack.signal("ingest", signal.SIGSTOP)
        asyncio.run(_push_large(stack.endpoints["broker"]))

        # When the ingest starts on an older copy of the settings
        newest = max((data / "instance").iterdir())
        newest.rename(tmp_path / "newest")
        _restart(stack, "ingest")
        refused = ("SlateMQPushesRefused", "broker")
        firing(server, refused)

        # And then on the new ones again, and the push is retried
        (tmp_path / "newest").rename(newest)
        _restart(stack, "ingest")
        asyncio.run(_retry(stack.endpoint))
        ended(server, refused)


async def _permit_larger(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.create_queue("large")
        await client.update_instance({"payload_bytes_max": len(LARGE)})


def _restart(stack: LocalStack, service: str) -> None:
    pid = stack.signal(service, signal.SIGKILL)
    stack.wait_restarted(service, pid)


async def _push_large(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        await client.execute([Push("large", LARGE)])


async def _retry(endpoint: str) -> None:
    async with slatemq.connect(endpoint) as client:
        (refused,) = [one async for one in client.refused_pushes()]
        assert "must be within" in refused.reason
        await client.retry_refused_push(refused)
        (message,) = await client.claim("large", wait=WAIT_S)
        assert message.payload == LARGE
