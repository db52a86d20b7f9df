"""Answers of a store that end early, and listings that lag behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import DamagedObject, DamagedStore, StorageError, UnsafeStore
from libs.storage.objects.probe import probe_store
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = pytest.mark.s3

ROWS = 300

_KILLED: list[Database] = []
"""Owners that will be fenced."""


@pytest.fixture(scope="module")
def store() -> Iterator[FaultyStore]:
    with moto() as port, faulty_store(port) as before:
        yield before


@pytest.fixture
async def root(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Root]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield open_root(root_url(store.port, f"spoiled/{secrets.token_hex(8)}"))
    store.set()
    while _KILLED:
        await _KILLED.pop().close()


async def _fill(root: Root) -> dict[bytes, bytes]:
    """A database as a killed owner leaves it: rows partly in tables, partly in its WAL."""
    rows = {b"%04d" % n: os.urandom(500) for n in range(ROWS)}
    database = await root.database("broker/0", Kind.BROKER)
    for n, (key, value) in enumerate(rows.items()):
        batch = Batch()
        batch.put(key, value)
        if n % 10 == 9:
            await database.commit(batch)
        else:
            await database.write(batch)
        if n == ROWS // 2:
            await database.flush_memtable()
    await database.flush()
    _KILLED.append(database)
    return rows


async def _read(root: Root) -> dict[bytes, bytes | None]:
    database = await root.database("broker/0", Kind.BROKER)
    try:
        keys = [b"%04d" % n for n in range(ROWS)]
        return dict(zip(keys, await database.get_many(keys, durable=True), strict=True))
    finally:
        await database.close()


async def test_reads_of_a_database_that_are_broken_off_are_repeated(
    store: FaultyStore, root: Root
) -> None:
    rows = await _fill(root)
    match = "broker/0/"  # no listing, which is asked by the folder's encoded name
    first = Fault(Outcome.BREAK, method="GET", match=match, times=1)

    store.set(first, Fault(Outcome.BREAK, method="GET", match=match, chance=0.3))

    assert await _read(root) == rows
    assert first.happened > 0


async def test_a_payload_whose_read_is_broken_off_twice_is_read_again(
    store: FaultyStore, root: Root
) -> None:
    blobs, payload = Blobs(root), os.urandom(200_000)
    uri = await blobs.put(payload)
    broken = Fault(Outcome.BREAK, method="GET", match="blobs/", times=2)

    store.set(broken)

    assert await blobs.get(uri) == payload
    assert broken.happened == 2


@pytest.mark.parametrize("folder", ["/wal/", "/manifest/", "/compacted/"])
async def test_a_read_that_ends_early_is_refused_or_repeated_and_never_served(
    store: FaultyStore, root: Root, folder: str
) -> None:
    rows = await _fill(root)
    match = f"broker/0{folder}"
    first = Fault(Outcome.SHORTEN, method="GET", match=match, times=1)

    store.set(first, Fault(Outcome.SHORTEN, method="GET", match=match, chance=0.5))
    with suppress(StorageError):
        assert await _read(root) == rows
    store.set()

    assert first.happened > 0
    assert await _read(root) == rows, "the short reads have left something behind"


async def test_a_payload_that_came_short_once_is_not_damaged(
    store: FaultyStore, root: Root
) -> None:
    blobs = Blobs(root)
    payload = os.urandom(200_000)
    uri = await blobs.put(payload)

    store.set(Fault(Outcome.SHORTEN, method="GET", match="blobs/", times=1))
    assert await blobs.get(uri) == payload
    store.set(Fault(Outcome.SHORTEN, method="GET", match="blobs/", times=1))
    assert await blobs.get_slowly(uri, 10) == payload

    store.set(Fault(Outcome.SHORTEN, method="GET", match="blobs/"))
    with pytest.raises(DamagedObject):
        await blobs.get(uri)


async def test_a_store_whose_listings_lag_is_refused(store: FaultyStore, root: Root) -> None:
    await probe_store(root.objects)

    store.set(Fault(Outcome.STALE, stale_after=time.monotonic()))

    with pytest.raises(UnsafeStore, match="a listing does not show"):
        await probe_store(root.objects)


@pytest.mark.parametrize("shown", [0.1, 0.9])
async def test_an_owner_finds_commits_that_a_listing_does_not_show_yet(
    store: FaultyStore, root: Root, shown: float
) -> None:
    # Given listings that lack the last of its WAL, and show its last manifest
    rows = await _fill(root)
    prefix = f"{root.url.partition('://')[2]}/broker/0/manifest/"
    since = max(store.created_at(prefix))
    lagging = Fault(Outcome.STALE, stale_after=since + (time.monotonic() - since) * shown)

    store.set(lagging)

    assert await _read(root) == rows
    assert lagging.happened > 0


async def test_an_owner_whose_database_a_listing_does_not_show_makes_no_other(
    store: FaultyStore, root: Root
) -> None:
    before = time.monotonic()
    rows = await _fill(root)

    store.set(Fault(Outcome.STALE, stale_after=before))
    with pytest.raises(DamagedStore, match="already exists"):
        await _read(root)
    store.set()

    assert await _read(root) == rows


async def test_reads_of_small_objects_that_are_broken_off_are_repeated(
    store: FaultyStore, root: Root
) -> None:
    objects = root.objects
    await objects.put("topology/ingest-0.json", b"an entry of the topology")
    broken = [
        Fault(Outcome.BREAK, method="GET", match=match, times=2)
        for match in ("list-type", "topology/ingest")
    ]

    store.set(*broken)

    assert await objects.list("topology") == ["topology/ingest-0.json"]
    assert await objects.get("topology/ingest-0.json") == b"an entry of the topology"
    assert [fault.happened for fault in broken] == [2, 2]
    for read in (objects.folders(""), objects.has_any("topology"), objects.check(60)):
        store.set(fault := Fault(Outcome.BREAK, method="GET", match="list-type", times=1))
        await read
        assert fault.happened == 1
    store.set(fault := Fault(Outcome.BREAK, method="GET", match="topology/ingest", times=1))
    data, _ = await objects.get_version("topology/ingest-0.json")
    assert (data, fault.happened) == (b"an entry of the topology", 1)
