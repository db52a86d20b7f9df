"""The table of SlateDB settings for each kind of database, every value with its reason.

Names and forms are SlateDB's own (`Settings`, 0.17.0); dotted names reach into nested options. What
is not named here keeps its default. The block cache and the metadata cache are not `Settings`, but
belong to the same budget: a service under 400 MB resident at full publishing speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from slatedb.uniffi import Settings

from libs.storage.database.addresses import PAID

MIB: Final = 1 << 20


class Kind(StrEnum):
    INGEST = "ingest"
    BROKER = "broker"


@dataclass(frozen=True)
class ReplayBound:
    """When the memtable is flushed, so that a start after a crash has few WAL objects to replay.

    SlateDB's own bound (max_wal_flushes_before_l0_flush) cannot be set below 4,096, which take a
    second from a disk and minutes from S3 (a HEAD and a GET each). The first commit of a process is
    flushed too, so that what one start has replayed is not left to the next.

    Attributes:
        commits: Flush after this many commits.
        age_s: Flush when the oldest commit in the memtable is this old.
    """

    commits: int
    age_s: float


@dataclass(frozen=True)
class Tuning:
    """Everything that one kind of database is opened with."""

    block_cache_bytes: int
    """Cache for blocks of sorted tables; each database has its own."""

    meta_cache_bytes: int
    """Cache for indexes and filters of sorted tables, which every cold get would read otherwise."""

    replay: ReplayBound
    """Bounds what a start after a crash has to replay."""

    settings: Mapping[str, object]
    """SlateDB's settings by dotted name."""

    @property
    def uncompacted_tables_max(self) -> int:
        """Sorted tables that may wait to be compacted: with as many, writes wait."""
        return int(str(self.settings["l0_max_ssts"]))


_BOTH: Final[Mapping[str, object]] = {
    # We flush ourselves after each commit: 0.3 ms instead of up to the interval, and nothing that
    # was not asked for becomes durable behind a commit's back.
    "flush_interval": None,
    # A newer writer is noticed within this time when nothing is written; costs a GET each time.
    "manifest_poll_interval": "1s",
    # 16 MiB tables: with memtables of that size in flight the whole stays under the bound below.
    "l0_sst_size_bytes": 16 * MIB,
    # Written but not yet in a sorted table; writers wait above it. The default of 1 GiB is what a
    # slow store would make us hold in memory; 128 MiB cost 60 MB more than 64 and were no faster.
    "max_unflushed_bytes": 64 * MIB,
    # Sorted tables before writers wait for the compactor: 8 (the default) stalls a burst.
    "l0_max_ssts": 32,
    "l0_max_ssts_per_key": 32,
    # Each compaction buffers its inputs and the tables it writes. Two at a time, undivided, with
    # tables of 32 MiB (256 by default) are enough for two cores and took 50 MB less than four parts
    # (peak 292 MB while 1 GB was published, with nothing of a service beside it).
    "l0_flush_parallelism": 2,
    "compactor_options.max_concurrent_compactions": 2,
    "compactor_options.worker.max_concurrent_compactions": 2,
    "compactor_options.worker.max_subcompactions": 1,
    "compactor_options.worker.bytes_to_fetch": 1 * MIB,
    # A compaction takes all new tables that may wait, one part of each at a time. Of 8 (the
    # default) it took 128 MiB in 5 s, so that 25 MiB/s were the most in a longer burst; now 33 to
    # 48 were, on the same machine. The peak of memory was 257 MB; with 8, four parts of each, 246.
    "compactor_options.scheduler_options.max_compaction_sources": "32",
    "compactor_options.worker.max_fetch_tasks": 1,
    "compactor_options.worker.max_sst_size": 32 * MIB,
    # A compaction whose inputs do not overlap moves them instead of rewriting them.
    "compactor_options.enable_trivial_move": True,
    # Collected every minute, not every ten: a thousand commits a second leave as many WAL objects.
    # The age stays at 300 s: a reader that is slower than that finds its files gone.
    "garbage_collector_options.wal_options.interval": "60s",
    "garbage_collector_options.compacted_options.interval": "60s",
    "garbage_collector_options.manifest_options.interval": "60s",
    "garbage_collector_options.compactions_options.interval": "60s",
    # Always off: with it a paused old writer got OK for a commit that exists nowhere. So the WAL
    # keeps an empty object of each start.
    "garbage_collector_options.wal_fence_options.dry_run": True,
    # The files that mark for a collector where live data begins; on wherever they can be used.
    "garbage_collector_options.boundary_files_enabled": True,
    # A store that is down for longer than these retries fails the commit, and the process restarts
    # from disk: better than never responding. Measured: 19 to 26 s until the error, of 10 to 14 s
    # with 3, so that a start whose store was down for 15 s of every 20 began again and again.
    "object_store_max_retries": 5,
}

_ON_DISK: Final = ReplayBound(1024, 60)
_REMOTE: Final = ReplayBound(128, 60)
"""128 objects are two to three seconds at 100 ms a request. Each flush costs two PUTs and some GETs
beside its 128 PUTs; see benchmarks/opening.py."""

_TABLE: Final[Mapping[Kind, Tuning]] = {
    # Payloads are read once, soon after they are written, and mostly from the broker's cache.
    Kind.INGEST: Tuning(16 * MIB, 16 * MIB, _ON_DISK, _BOTH),
    # Buckets live in the broker's own memory; the cache serves cold ones and idempotency look-ups.
    Kind.BROKER: Tuning(16 * MIB, 16 * MIB, _ON_DISK, _BOTH),
}


_NO_CONDITIONAL_UPDATE: Final[Mapping[str, object]] = {
    # SlateDB moves a boundary by a conditional update, which folders do not have: its collector
    # removed manifests once, and never again (16 more files a minute under a steady load).
    "garbage_collector_options.boundary_files_enabled": False,
    # The boundary's purpose: an owner that stood still between two steps for longer than this,
    # while another one went on, could use a number a second time.
    "garbage_collector_options.manifest_options.min_age": "21600s",
    "garbage_collector_options.compactions_options.min_age": "21600s",
}


_PAID_REQUESTS: Final[Mapping[str, object]] = {
    # Every look at the store costs money there, whether anything happens or not: with SlateDB's
    # looks each second and its collectors each minute, a quiet instance cost $10 a month. A newer
    # writer is noticed by the next commit, and by the look at the own entry of the topology.
    "manifest_poll_interval": "60s",
    # A compaction begins up to two looks after its tables are there; as many tables as 120 s of
    # writing at 50 MiB/s make may wait for it.
    "compactor_options.poll_interval": "60s",
    "compactor_options.worker.compactions_poll_interval": "60s",
    "l0_max_ssts": 384,
    "l0_max_ssts_per_key": 384,
    # As many new tables come in between two looks at 150 commits a second; with 8 (the default),
    # they grew from 13 a second on, until writes waited. The parts are smaller, so that all take no
    # more memory: 230 MB at the peak while 140 tables of 16 MiB are compacted, and 330 MB in parts
    # of 1 MiB.
    "compactor_options.scheduler_options.max_compaction_sources": "128",
    "compactor_options.worker.bytes_to_fetch": MIB // 2,
    "garbage_collector_options.compacted_options.interval": "1200s",
    "garbage_collector_options.manifest_options.interval": "1200s",
    "garbage_collector_options.compactions_options.interval": "1200s",
}


_PAID_WAL: Final[Mapping[str, object]] = {
    "garbage_collector_options.wal_options.interval": "1200s",
}

_LOG_ON_DISK: Final = ReplayBound(8192, 60)
"""A WAL on a disk beside tables in a paid store: each flush costs two PUTs there, and a replay of
this many WAL objects takes some two seconds from a disk."""


def tuning_of(kind: Kind, scheme: str = "", wal_scheme: str = "") -> Tuning:
    """The row of the table for one kind of database, in a store with URLs of this scheme.

    `wal_scheme` is that of the store of its WAL, where it is another one.
    """
    row = _TABLE[kind]
    wal_scheme = wal_scheme or scheme
    settings, replay = dict(row.settings), row.replay
    if scheme == "file":
        settings |= _NO_CONDITIONAL_UPDATE
    if scheme in PAID:
        settings |= _PAID_REQUESTS
        replay = _LOG_ON_DISK
    if wal_scheme in PAID:
        settings |= _PAID_WAL
        replay = _REMOTE
    return replace(row, replay=replay, settings=settings)


def slatedb_settings(tuning: Tuning) -> Settings:
    """SlateDB's settings object with the table's values set on top of its defaults."""
    settings = Settings.default()
    for name, value in tuning.settings.items():
        settings.set(name, json.dumps(value))
    return settings
