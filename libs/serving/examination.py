"""What a process finds when it examines itself, for `slatemq doctor`."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from libs.serving.process.config import ServingConfig
from libs.serving.tls import certificates_in_force
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.database.wal_stores import WalStore
from libs.storage.errors import ClockAhead, StorageError
from libs.storage.objects.probe import probe_store
from slatemq import __version__
from slatemq._secrets import redacted
from slatemq.models import now_ms
from slatemq.v1 import instance_pb2

STORE_S: Final = 5.0
"""How long the store may take to pass its test: callers wait for the answer."""


class Examiner:
    """Examines the process that it is in."""

    def __init__(
        self,
        name: str,
        root: Root,
        config: ServingConfig,
        database: Callable[[], Database | None],
        log_end: Callable[[], int | None],
    ) -> None:
        """`name` is such as `broker-3`; `database` gives that which it owns, once it is open.

        `log_end` gives the last durable message of an ingest's log.
        """
        self._service, _, shard = name.rpartition("-")
        self._shard = int(shard)
        self._root = root
        self._certificates = certificates_in_force(config, config.service_identity)
        self._database = database
        self._log_end = log_end
        self._started_at_ms = now_ms()

    async def examine(self) -> instance_pb2.ExamineProcessResponse:
        found = instance_pb2.ExamineProcessResponse(
            service=self._service,
            shard=self._shard,
            version=__version__,
            started_at_ms=self._started_at_ms,
        )
        database = self._database()
        if database is not None:
            await self._test_stores(found)
            statistics = await asyncio.to_thread(database.statistics)
            found.uncompacted_tables = statistics.uncompacted_tables
            found.uncompacted_tables_max = database.uncompacted_tables_max
        log_end = self._log_end()
        if log_end is not None:
            found.durable_sequence = log_end
        await asyncio.to_thread(self._look_at_disks, found)
        for one in await asyncio.to_thread(self._certificates):
            found.certificates.add(**one._asdict())
        found.now_ms = now_ms()  # last, so that the caller knows how old it can be at most
        return found

    def _look_at_disks(self, found: instance_pb2.ExamineProcessResponse) -> None:
        disks = []
        for content, folder in self._root.folders.items():
            try:
                disks.append(shutil.disk_usage(folder))
            except OSError as error:
                problem = f"looking at the disk of {folder}: {error.strerror}"
                if content == "data":
                    found.store_problem = found.store_problem or problem
                else:
                    found.wal_store = self._root.wal_address.url
                    found.wal_store_problem = found.wal_store_problem or problem
        fullest = min(disks, key=lambda disk: disk.free / max(disk.total, 1), default=None)
        if fullest is not None:
            found.disk_free_bytes, found.disk_size_bytes = fullest.free, fullest.total

    async def _test_stores(self, found: instance_pb2.ExamineProcessResponse) -> None:
        test = await _tested(probe_store(self._root.objects))
        if test.ahead_ms is not None:
            found.store_clock_ahead_ms = test.ahead_ms
        found.store_problem = test.problem
        if test.took_ms is not None:
            found.store_test_ms = test.took_ms
        wal = await self._root.wal_store()
        if wal.record is None:
            return
        found.wal_store = wal.address.url
        test = await _tested(_probe_wal_store(wal))
        found.wal_store_problem = test.problem
        if test.took_ms is not None:
            found.wal_store_test_ms = test.took_ms


class _Test(NamedTuple):
    """How the test of a store went: how far our clock is ahead, how long it took, what is wrong."""

    ahead_ms: int | None = None
    took_ms: int | None = None
    problem: str = ""


async def _probe_wal_store(wal: WalStore) -> int:
    await wal.check_marker()
    return await probe_store(wal.objects)


async def _tested(probe: Coroutine[Any, Any, int]) -> _Test:
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(STORE_S):
            ahead_ms = await probe
    except ClockAhead as error:
        ahead_ms = error.ahead_ms
    except StorageError as error:
        return _Test(problem=redacted(str(error)))
    except TimeoutError:
        return _Test(problem=f"the store has not answered within {STORE_S:g} s")
    return _Test(ahead_ms, round((time.monotonic() - begun_s) * 1000))
