"""`python -m services.janitor.backup.worker`: the child that a janitor starts for a backup."""

from __future__ import annotations

import asyncio

from libs.serving.process.exits import exit_with
from libs.storage.database.roots import open_root
from libs.storage.errors import StorageError
from services.janitor.backup.shards import snapshots_of_owners
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.jobs.contract import JobFailed, JobOptions, JobResult, Report
from services.janitor.runs.history import RunStore
from services.janitor.runs.worker import work
from slatemq.errors import SlateMQError


def run_backup(job: str, root: str, options: JobOptions, report: Report) -> JobResult:
    """Take a backup of an instance that serves. Raises JobFailed, JobCancelled."""
    source = open_root(root)
    taking = Taking(
        BackupSource(source, lambda: snapshots_of_owners(source), RunStore(source.objects)),
        open_root(options.backup_root),
        options.backups_kept,
        options.dry_run,
        report,
        options.cancelled,
    )
    try:
        backup = asyncio.run(taking.take())
    except (SlateMQError, StorageError) as error:
        raise JobFailed(str(error)) from error
    counts = {
        "backups_damaged": taking.damaged_count,
        "backups_removed": taking.removed_count,
        "bytes_copied": backup.copied_bytes,
        "copies_checked": taking.checked_count,
        "copies_rotten": taking.rotten_count,
        "objects": backup.objects_count,
        "objects_copied": backup.copied_count,
        "payloads_gone": taking.payloads_gone_count,
    }
    artifacts = [f"{taking.target.url}/{backup.folder}"] if not options.dry_run else []
    return JobResult(counts, artifacts, taking.phases)


if __name__ == "__main__":
    exit_with(work(run_backup))
