from __future__ import annotations

import logging
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import slatedb.uniffi._slatedb_uniffi.slatedb as binding

from libs.storage.database import binding as fastffi
from libs.storage.database import slate
from libs.storage.database.binding import DirectCalls, StockCalls, choose
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch

SIZES = (0, 1, 100, 65_535, 1 << 20)


def test_the_installed_binding_is_the_known_one() -> None:
    assert isinstance(fastffi.CALLS, DirectCalls)
    assert binding._UniffiRustBufferBuilder.write is fastffi._write
    assert binding._UniffiRustBufferBuilder._pack_into is fastffi._pack_into


@pytest.mark.parametrize("calls", [DirectCalls(), StockCalls()], ids=["direct", "stock"])
async def test_bytes_come_back_as_they_were_written(
    calls: fastffi.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slate, "CALLS", calls)
    database = await open_root("memory:///").database("ingest/0", Kind.INGEST)
    values = {b"k%d" % size: bytes(i % 251 for i in range(size)) for size in SIZES}
    batch = Batch()
    for key, value in values.items():
        batch.put(key, value)
    batch.put(b"gone", b"x")
    batch.delete(b"gone")

    await database.commit(batch)

    assert {key: await database.get(key) for key in values} == values
    assert await database.get(b"gone") is None
    rows = [row async for page in database.scan(b"a", b"z") for row in page]
    assert rows == sorted(values.items())
    await database.close()


def test_another_version_falls_back_to_the_stock_calls_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        calls = choose("0.18.0")

    assert isinstance(calls, StockCalls)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "0.18.0" in caplog.text


def test_changed_internals_fall_back_to_the_stock_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(binding, "_UniffiFfiConverterSequenceTypeKeyValue")
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(fastffi.KNOWN_VERSION), StockCalls)
    assert "SequenceTypeKeyValue" in caplog.text


def test_another_layout_of_rows_falls_back_to_the_stock_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastffi, "_TAIL_BYTES", 8)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(fastffi.KNOWN_VERSION), StockCalls)
    assert caplog.records


async def test_an_error_of_the_callee_reaches_the_caller(tmp_path: Path) -> None:
    database = await open_root(tmp_path.as_uri()).database("ingest/0", Kind.INGEST)
    writer = fastffi.CALLS.new_batch_writer()
    writer.put(b"k", b"v")
    await database._db.write(writer.raw)

    with pytest.raises(binding.Error.Invalid):  # a batch that was written takes no more
        writer.put(b"late", b"v")
    with pytest.raises(binding.Error.Invalid):
        writer.delete(b"late")
    await database.close()


@pytest.mark.slow
def test_no_memory_is_lost_over_many_batches() -> None:
    """Slow: a leak of one argument in ten would show only after some hundred megabytes."""

    def fill(rounds: int) -> int:
        for _ in range(rounds):
            writer = fastffi.CALLS.new_batch_writer()
            for number in range(40):
                writer.put(b"k%d" % number, b"v" * 65_535)
                writer.delete(b"k%d" % number)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    warm_kib = fill(20)
    assert fill(200) - warm_kib < 100 * 1024  # written through: 524 MB


async def test_threads_fill_their_batches_side_by_side() -> None:
    database = await open_root("memory:///").database("ingest/0", Kind.INGEST)
    shared = fastffi.CALLS.new_batch_writer()

    def work(thread: int) -> Any:
        own = fastffi.CALLS.new_batch_writer()
        for number in range(500):
            own.put(b"own %d-%d" % (thread, number), b"v" * 100)
            shared.put(b"shared %d-%d" % (thread, number), b"v" * 100)
        return own.raw

    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(work, range(4)))
    for raw in (*batches, shared.raw):
        await database._db.write(raw)
    for start, end in ((b"own", b"own~"), (b"shared", b"shared~")):
        assert sum([len(page) async for page in database.scan(start, end)]) == 4 * 500
    await database.close()
