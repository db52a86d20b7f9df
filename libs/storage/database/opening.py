"""Opening a database, which may take as long as it makes progress.

Opening replays what the last owner had not yet moved into sorted tables: a HEAD and a GET for each
WAL object. How long that takes depends on the store. An abandoned opening has made no progress and
leaves one more WAL object behind, so a time limit would be a crash loop on every slower store.

::

    build ─┬─ done, or SlateDB's own error ──────────────────────────► database, or the error
           └─ every second: has the number of requests grown? ─ yes ─► wait on, log every 5 s
                             └─ no, for a while ─► ask the store ─┬──► it answers: wait on
                                                                  └──► StoreUnavailable

SlateDB starts the requests of a replay one after the other, and reads its manifest every second; so
the number stands still only while the store does not respond.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from slatedb.uniffi import Db, DbBuilder, DefaultMetricsRecorder

from libs.storage.errors import StorageError, StoreUnavailable

_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
LOG_EVERY_LOOKS: Final = 5

_REQUESTS: Final = "slatedb.object_store.request_count"


class Opening:
    """One opening of the database `name` for writing.

    Attributes:
        recorder: What SlateDB counts, also once the database is open.
    """

    def __init__(self, builder: DbBuilder, name: str) -> None:
        self._builder = builder
        self._name = name
        self.recorder = DefaultMetricsRecorder()
        self._wal_count: int | None = None
        builder.with_metrics_recorder(self.recorder)

    async def build(
        self,
        look: Callable[[], Awaitable[int]],
        stall_s: float,
        check: Callable[[], Awaitable[object]],
    ) -> Db:
        """The open database. Raises SlateDB's errors, and those of `look` and `check`.

        `look` returns the number of WAL objects to replay, or refuses to open it. `check` sends the
        stores a request; it is called whenever no request was started for `stall_s` seconds.
        """
        building = asyncio.ensure_future(self._build(look))
        try:
            await self._watch(building, stall_s, check)
            return await building
        finally:
            building.cancel()

    async def _build(self, look: Callable[[], Awaitable[int]]) -> Db:
        self._wal_count = await look()
        return await self._builder.build()

    async def _watch(
        self, building: asyncio.Future[Db], stall_s: float, check: Callable[[], Awaitable[object]]
    ) -> None:
        requests, looks, still_looks = 0, 0, 0
        look_s = min(LOOK_S, stall_s)
        # Counts looks, not seconds: a process that was stopped meanwhile has not waited.
        while True:
            done, _ = await asyncio.wait([building], timeout=look_s)
            if done:
                break
            looks += 1
            now = self._requests()
            still_looks = 0 if now > requests else still_looks + 1
            requests = now
            if looks % LOG_EVERY_LOOKS == 0:
                self._log_progress(requests)
            if still_looks * look_s >= stall_s:
                try:
                    await check()
                except StorageError as error:
                    raise StoreUnavailable(
                        f"opening {self._name} stopped after {requests} requests: {error}"
                    ) from error
                still_looks = 0
        if looks >= LOG_EVERY_LOOKS:
            _log.info("opened %s after %d requests to the store", self._name, self._requests())

    def _requests(self, api: str = "") -> int:
        """Requests to the store started so far, of one kind or of all."""
        return sum(
            int(metric.value[0]) if metric.value.is_COUNTER() else 0
            for metric in self.recorder.metrics_by_name(_REQUESTS)
            if not api or any(label.value == api for label in metric.labels)
        )

    def _log_progress(self, requests: int) -> None:
        if self._wal_count is None:
            _log.warning("opening %s: %d requests to the store", self._name, requests)
            return
        # Each WAL object is looked at with HEAD, and read in one range.
        read = min(self._requests("get_range"), self._wal_count)
        _log.warning(
            "opening %s: %d of about %d WAL objects read, %d requests to the store",
            *(self._name, read, self._wal_count, requests),
        )
