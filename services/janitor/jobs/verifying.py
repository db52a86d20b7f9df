"""The jobs `verify` and `repair`: no Spark, every row of every snapshot, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.errors import StorageError
from services.janitor.jobs.contract import (
    FINDINGS_KEPT,
    JobCancelled,
    JobFailed,
    JobOptions,
    JobResult,
    Progress,
    Report,
)
from services.janitor.orphans import store_time_ms
from services.janitor.snapshots import channels_of, snapshots_of_all
from services.janitor.verify.command import fields_of
from services.janitor.verify.findings import Findings
from services.janitor.verify.repairs import Repairs
from services.janitor.verify.running import RunningDatabases, StoredShards
from services.janitor.verify.verification import Cancelled, Verification
from slatemq.errors import SlateMQError

SNAPSHOTS: Final = "taking snapshots"
REPAIRING: Final = "repairing"

PHASES: Final[Mapping[str, int]] = {"verify": 2, "repair": 3}
"""How many phases each job has."""


def run_job(job: str, root: str, options: JobOptions, progress: Report) -> JobResult:
    """Like `services.janitor.jobs.run.run_job`, for the jobs that need no Spark."""
    return asyncio.run(_Work(job, root, options, progress).do())


class _Work:
    def __init__(self, job: str, url: str, options: JobOptions, progress: Report) -> None:
        self._root = open_root(url, options.wal_store)
        self._options = options
        self._report = progress
        self._phases_count = PHASES[job]
        self._repairs = job == "repair"
        self._phases: list[tuple[str, float]] = []
        self._began = time.monotonic()

    async def do(self) -> JobResult:
        """Raises JobFailed, JobCancelled."""
        self._report(Progress(SNAPSHOTS, 1, self._phases_count))
        try:
            async with channels_of(self._root) as (directory, channels):
                return await self._verify(directory, channels)
        except Cancelled:
            raise JobCancelled("cancelled") from None
        except (SlateMQError, StorageError) as error:
            raise JobFailed(str(error)) from error

    async def _verify(self, directory: TopologyDirectory, channels: Channels) -> JobResult:
        began_ms = await store_time_ms(self._root.objects)
        async with snapshots_of_all(StoredShards(self._root), channels) as taken:
            self._end_phase(SNAPSHOTS)
            databases = RunningDatabases(self._root, channels, taken)
            verification = Verification(
                self._root,
                databases,
                began_ms,
                self._report_reading,
                self._options.cancelled.is_set,
                self._options.sizes_only,
            )
            findings = await verification.run()
            databases.check()
        self._end_phase("reading")
        repairs = Repairs(self._root, directory, channels, self._options.dry_run)
        if self._repairs:
            self._report(Progress(REPAIRING, self._phases_count, self._phases_count))
            await repairs.repair(findings)
            self._end_phase(REPAIRING)
        return self._result(findings, repairs)

    def _report_reading(self, doing: str, done: int, count: int) -> None:
        self._report(Progress(doing, 2, self._phases_count, done, count))

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self._phases.append((name, round(now - self._began, 3)))
        self._began = now

    def _result(self, findings: Findings, repairs: Repairs) -> JobResult:
        read = findings.counts
        counts = {
            "faults": findings.faults_count,
            "leftovers": findings.leftovers_count,
            "databases": read["databases"],
            "files": read["files"],
            "rows": sum(count for name, count in read.items() if name.startswith("rows/")),
            "messages": read["messages"],
            "entries": read["entries"],
            "payload_objects": read["payload objects"],
            "shards_unread": len(findings.unreadable),
            **repairs.counts,
        }
        found = findings.all()[:FINDINGS_KEPT]
        named = [{**fields_of(one), "repaired": one in repairs.repaired} for one in found]
        return JobResult(counts, [], self._phases, named)
