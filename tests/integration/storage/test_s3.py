"""The storage library against a real S3 interface (moto's server)."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import (
    ClockAhead,
    Fenced,
    ObjectNotFound,
    StoreUnavailable,
    UnsafeStore,
)
from libs.storage.objects.probe import probe_store
from tests.integration.storage.s3_servers import CREDENTIALS, forgetful_proxy, moto, root_url

pytestmark = pytest.mark.s3

SOON_S = 60
"""A third of the time for which the store's library repeats a request by itself."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def root(port: int, request: pytest.FixtureRequest) -> Root:
    return open_root(root_url(port, f"tests/{request.node.name[:60]}"))


def _batch(key: bytes, value: bytes) -> Batch:
    batch = Batch()
    batch.put(key, value)
    return batch


async def test_what_was_committed_is_there_for_the_next_process(root: Root) -> None:
    first = await root.database("ingest/0", Kind.INGEST)
    await first.commit(_batch(b"k", b"v" * 70_000))
    await first.close()

    second = await root.database("ingest/0", Kind.INGEST)
    assert await second.get(b"k", durable=True) == b"v" * 70_000
    assert [page async for page in second.scan(b"a", b"z")] == [[(b"k", b"v" * 70_000)]]
    await second.close()


async def test_a_second_writer_fences_the_first(root: Root) -> None:
    old = await root.database("broker/0", Kind.BROKER)
    await old.commit(_batch(b"kept", b"1"))
    new = await root.database("broker/0", Kind.BROKER)
    with pytest.raises(Fenced):
        await old.commit(_batch(b"lost", b"1"))
    await old.close()
    assert await new.get_many([b"kept", b"lost"], durable=True) == [b"1", None]
    await new.close()


async def test_blobs_and_small_objects_live_below_the_prefix(root: Root, port: int) -> None:
    blobs = Blobs(root)
    payload = os.urandom(200_000)

    uri = await blobs.put(payload)

    assert uri.startswith("blobs/")
    assert await blobs.get(uri) == payload
    assert len(await root.objects.list("blobs")) == 1
    with pytest.raises(ObjectNotFound):
        await Blobs(open_root(root_url(port, "elsewhere"))).get(uri)
    await blobs.delete(uri)
    with pytest.raises(ObjectNotFound):
        await blobs.get(uri)


async def test_an_object_is_replaced_only_as_the_version_that_was_read(root: Root) -> None:
    assert await root.objects.put_if_absent("janitor/runs/a.json", b"1")
    data, tag = await root.objects.get_version("janitor/runs/a.json")

    newer = await root.objects.replace("janitor/runs/a.json", b"2", tag)
    assert newer not in (None, tag)
    assert await root.objects.replace("janitor/runs/a.json", b"3", tag) is None
    assert await root.objects.get_version("janitor/runs/a.json") == (b"2", newer)
    assert data == b"1"

    await root.objects.delete("janitor/runs/a.json")
    assert await root.objects.replace("janitor/runs/a.json", b"4", str(newer)) is None


async def test_a_store_that_keeps_its_promises_passes_the_probe(root: Root) -> None:
    await probe_store(root.objects)
    assert await root.objects.list("probe") == []


async def test_a_store_that_ignores_conditions_is_refused_with_the_reason(port: int) -> None:
    with forgetful_proxy(port) as proxy_port:
        root = open_root(root_url(proxy_port, "tests/forgetful"))
        with pytest.raises(UnsafeStore, match="If-None-Match"):
            await probe_store(root.objects)
        assert await root.objects.list("probe") == []


async def test_a_clock_more_than_a_minute_ahead_is_refused(root: Root) -> None:
    with pytest.raises(ClockAhead) as caught:
        await probe_store(root.objects, lambda: time.time() + 90)
    assert 60_000 < caught.value.ahead_ms < 95_000
    assert await root.objects.list("probe") == []

    await probe_store(root.objects, lambda: time.time() + 45)
    await probe_store(root.objects, lambda: time.time() - 3600)  # behind: nothing is lost by it


async def test_a_missing_bucket_is_a_clear_error_within_seconds(port: int) -> None:
    root = open_root(root_url(port, "p", bucket="no-such-bucket"))
    async with asyncio.timeout(SOON_S):
        with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
            await root.database("ingest/0", Kind.INGEST)
        with pytest.raises(StoreUnavailable):
            await probe_store(root.objects)


async def test_an_unreachable_port_is_a_clear_error_within_seconds() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        root = open_root(root_url(closed.getsockname()[1], "p"), timeout_s=3)
        with pytest.raises(StoreUnavailable) as caught:
            await asyncio.wait_for(probe_store(root.objects), SOON_S)
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
