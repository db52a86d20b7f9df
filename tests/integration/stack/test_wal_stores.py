"""Processes whose write-ahead logs are in a store of their own: made, killed, refused, lost."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import slatemq
from libs.serving.process.exits import EXIT_USAGE
from tests.integration.stack.processes import WAIT_SECONDS, Service
from tests.integration.stack.test_instance import ended, running
from tests.integration.storage.s3_servers import CREDENTIALS, make_bucket, moto

pytestmark = pytest.mark.s3

MESSAGES = 300


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture(params=["file", "s3"])
def wal_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    if request.param == "file":
        return (tmp_path / "logs").as_uri()
    port = request.getfixturevalue("port")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = make_bucket(port, request.node.name.partition("[")[0])
    return f"s3://{bucket}?endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=true"


def services(folder: Path, *settings: str) -> list[Service]:
    return [Service(folder, name, *settings) for name in ("ingest", "broker", "router")]


async def drained(client: slatemq.Client, count: int) -> set[bytes]:
    """The payloads of `count` messages of the queue, claimed and acked."""
    found: set[bytes] = set()
    async for message in client.consume("orders"):
        found.add(message.payload)
        await message.ack()
        if len(found) == count:
            break
    return found


async def status_of(client: slatemq.Client) -> slatemq.Status:
    """The status, once a process has said what the instance is: a busy one may answer late."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not (found := await client.status()).instance_number:
            pass
    return found


async def examined(client: slatemq.Client) -> list[slatemq.Examination]:
    """What the processes find, once all have answered, and the stores have answered them."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = await client.examine()
            late = [one.problem or "has not answered" in one.wal_store_problem for one in found]
            if not any(late):
                return found


async def test_kills_lose_nothing_whose_log_is_in_another_store(
    tmp_path: Path, wal_store: str
) -> None:
    ingest, broker, router = services(tmp_path, "--wal-store", wal_store)
    async with running(ingest, broker, router) as client:
        await client.create_queue("orders", filter="true")
        wanted: set[bytes] = set()
        for kill in (ingest, broker, ingest, broker):
            payloads = [f"{len(wanted) + at}".encode() for at in range(MESSAGES)]
            publishing = asyncio.create_task(client.publish_many(payloads))
            await asyncio.sleep(0)
            await kill.kill()
            await kill.start()
            await publishing
            wanted.update(payloads)
        assert await drained(client, len(wanted)) == wanted
        found = await status_of(client)
        assert found.store == (tmp_path / "data").as_uri()
        assert found.wal_store == wal_store.partition("?")[0]
        assert (await client.get_instance()).wal_store == found.wal_store
        for one in await examined(client):
            is_owner = one.service in ("ingest", "broker")
            assert one.wal_store == (found.wal_store if is_owner else "")
            assert one.wal_store_problem == ""
            assert (one.wal_store_test_ms is not None) == is_owner
    assert not (tmp_path / "data/ingest/0/wal").exists()


async def test_later_processes_take_the_store_from_the_record_and_refuse_others(
    tmp_path: Path,
) -> None:
    root, logs = (tmp_path / "data").as_uri(), (tmp_path / "logs").as_uri()
    async with running(Service(tmp_path, "ingest", "--wal-store", logs)):
        pass
    async with running(Service(tmp_path, "ingest")) as client:
        assert (await status_of(client)).wal_store == logs

    other = (tmp_path / "other").as_uri()
    for service in ("ingest", "router"):
        code, said = await ended(f"services.{service}", "--root", root, SLATEMQ_WAL_STORE=other)
        assert code == EXIT_USAGE
        assert "there is no folder" in said
        (tmp_path / "other").mkdir(exist_ok=True)
        code, said = await ended(f"services.{service}", "--root", root, SLATEMQ_WAL_STORE=other)
        assert code == EXIT_USAGE
        assert "is not the store that this instance has its WALs in" in said
        assert list((tmp_path / "other").iterdir()) == []
        (tmp_path / "other").rmdir()
    code, said = await ended(
        "services.broker", "--root", root, SLATEMQ_WAL_STORE="s3://key:geheim@fast"
    )
    assert code == EXIT_USAGE
    assert "credentials belong in the environment" in said
    assert "geheim" not in said


async def test_an_owner_whose_logs_are_lost_says_so_and_is_not_started_again(
    tmp_path: Path,
) -> None:
    root, logs = (tmp_path / "data").as_uri(), (tmp_path / "logs").as_uri()
    async with running(*services(tmp_path, "--wal-store", logs)) as client:
        await client.create_queue("orders", filter="true")
        await client.publish_many([b"1"] * 10)
    shutil.rmtree(tmp_path / "logs")
    for service in ("ingest", "broker"):
        code, said = await ended(f"services.{service}", "--root", root)
        assert code == EXIT_USAGE
        assert "this instance has its WALs there" in said
    code, said = await ended("services.janitor", "verify", "--root", root)
    assert code == 1
    assert "If the store of the WALs is lost" in said

    # When an operator goes on without what they had
    code, said = await ended("services.janitor", "move-wals", "--root", root, "--to", logs)
    assert code == 1, said
    code, said = await ended(
        "services.janitor", "move-wals", "--root", root, "--to", logs, "--lost"
    )
    assert code == 0, said

    # Then what comes from now on is delivered
    async with running(*services(tmp_path)) as client:
        if "orders" not in {one.queue_id async for one in client.list_queues()}:
            await client.create_queue("orders", filter="true")
        await client.publish(b"after")
        async with asyncio.timeout(60):
            async for message in client.consume("orders"):
                await message.ack()
                if message.payload == b"after":
                    break
