"""The direct calls do what the public ones do, and an unknown binding is named and survived."""

from __future__ import annotations

import importlib.metadata
import logging
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slatedb.uniffi._slatedb_uniffi.slatedb as stock
from slatedb.uniffi import Error, WriteBatch

from libs.storage.database import binding, slate, snapshots
from libs.storage.database.binding import (
    CALLS,
    KNOWN_VERSION,
    DirectCalls,
    PublicCalls,
    UnknownBinding,
    choose,
    direct_calls,
)
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.primitives import RowChange

SIZES = (0, 1, 100, 65_535, 1 << 20)
STEPS = "follow the steps for a new version of slatedb at the head of libs/storage/database/binding"

PRIVATE_NAMES = (
    "_UniffiLib",
    "_UniffiFfiConverterBytes",
    "_UniffiFfiConverterSequenceTypeKeyValue",
    "_UniffiFfiConverterTypeDbIterator",
    "_UniffiFfiConverterTypeError",
    "_UniffiRustCallStatus",
    "_UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK",
    "_UNIFFI_RUST_FUTURE_POLL_READY",
    "_uniffi_check_call_status",
    "_uniffi_rust_call_async",
)


def test_the_installed_binding_is_the_known_one() -> None:
    """Where this fails, `UnknownBinding` says what differs and what to do."""
    direct_calls(importlib.metadata.version("slatedb"))
    assert isinstance(CALLS, DirectCalls)


def test_no_other_file_knows_the_private_names() -> None:
    sources = [path for part in ("libs", "services") for path in Path(part).rglob("*.py")]
    private = ("_slatedb_uniffi", "_Uniffi", "_uniffi", "_UNIFFI")
    knowing = [path for path in sources if any(name in path.read_text() for name in private)]
    assert knowing == [Path("libs/storage/database/binding.py")]


def test_the_binding_stays_as_it_was_generated() -> None:
    for name in ("write", "_pack_into"):
        assert getattr(stock._UniffiRustBufferBuilder, name).__module__ == stock.__name__


@pytest.mark.parametrize("kind", [DirectCalls, PublicCalls])
async def test_bytes_come_back_as_they_were_written(
    kind: type[PublicCalls], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = direct_calls(KNOWN_VERSION) if kind is DirectCalls else PublicCalls()
    for module in (slate, snapshots):
        monkeypatch.setattr(module, "CALLS", calls)
    root = open_root(tmp_path.as_uri())
    database = await root.database("ingest/0", Kind.INGEST)
    values = {b"k%d" % size: bytes(i % 251 for i in range(size)) for size in SIZES}
    batch = Batch()
    for key, value in values.items():
        batch.put(key, value)
    batch.put(b"gone", b"x")
    batch.delete(b"gone")

    await database.commit(batch)

    for durable in (False, True):
        assert {key: await database.get(key, durable) for key in values} == values
    assert await database.get(b"gone") is None
    ordered = sorted(values.items())
    assert [row async for page in database.scan(b"a", b"z") for row in page] == ordered
    backwards = [row async for page in database.scan(b"a", b"z", descending=True) for row in page]
    assert backwards == ordered[::-1]
    assert [row async for page in database.scan(b"k1", b"k100") for row in page] == ordered[1:2]
    snapshot_id = await root.snapshots(database).take(60_000)
    reader = await root.open_snapshot("ingest/0", snapshot_id)
    assert {key: await reader.get(key) for key in values} == values
    assert await reader.get(b"gone") is None
    assert [row async for page in reader.scan(b"a", b"z") for row in page] == ordered
    await reader.close()
    await database.close()


def test_another_version_gets_the_public_calls_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        calls = choose("0.18.0")

    assert type(calls) is PublicCalls
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "its version is 0.18.0, known is" in caplog.text
    assert STEPS in caplog.text


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_private_name_that_is_gone_gets_the_public_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(stock, name)
    with pytest.raises(UnknownBinding, match=f"{name}.*{STEPS}"):
        direct_calls(KNOWN_VERSION)
    assert type(choose(KNOWN_VERSION)) is PublicCalls


def test_other_arguments_get_the_public_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    function = stock._UniffiLib.uniffi_slatedb_uniffi_fn_method_db_write
    monkeypatch.setattr(function, "argtypes", function.argtypes[:1])
    with pytest.raises(UnknownBinding, match=f"method_db_write takes other arguments.*{STEPS}"):
        direct_calls(KNOWN_VERSION)


def test_another_layout_of_rows_gets_the_public_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_TAIL_BYTES", 8)
    with pytest.raises(UnknownBinding, match=STEPS):
        direct_calls(KNOWN_VERSION)


async def test_an_error_of_the_callee_reaches_the_caller(tmp_path: Path) -> None:
    database = await open_root(tmp_path.as_uri()).database("ingest/0", Kind.INGEST)
    batch = WriteBatch()
    CALLS.put_all(batch, [(b"k", b"v")])
    await database._db.write(batch)

    late: list[RowChange] = [(b"late", b"v"), (b"late", None)]
    for change in late:  # a batch that was written takes no more
        with pytest.raises(Error.Invalid):
            CALLS.put_all(batch, [change])
    await database.close()
    with pytest.raises(Error.Closed):
        await CALLS.get(database._db, b"k", slate.READ_MEMORY)


@pytest.mark.slow
def test_no_memory_is_lost_over_many_batches() -> None:
    """Slow: a leak of one argument in ten would show only after some hundred megabytes."""

    def fill(rounds: int) -> int:
        for _ in range(rounds):
            batch = WriteBatch()
            for number in range(40):
                CALLS.put_all(batch, [(b"k%d" % number, b"v" * 65_535), (b"k%d" % number, None)])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    warm_kib = fill(20)
    assert fill(200) - warm_kib < 100 * 1024  # written through: 524 MB


async def test_threads_fill_their_batches_side_by_side() -> None:
    database = await open_root("memory:///").database("ingest/0", Kind.INGEST)
    shared = WriteBatch()

    def work(thread: int) -> WriteBatch:
        own = WriteBatch()
        for number in range(500):
            CALLS.put_all(own, [(b"own %d-%d" % (thread, number), b"v" * 100)])
            CALLS.put_all(shared, [(b"shared %d-%d" % (thread, number), b"v" * 100)])
        return own

    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(work, range(4)))
    for batch in (*batches, shared):
        await database._db.write(batch)
    for start, end in ((b"own", b"own~"), (b"shared", b"shared~")):
        assert sum([len(page) async for page in database.scan(start, end)]) == 4 * 500
    await database.close()
