"""What callers of jobs pass, and what jobs return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

VERIFYING: Final = ("verify", "repair")
"""The jobs that read snapshots row by row."""

WITHOUT_SPARK: Final = (*VERIFYING, "backup")
"""The jobs that run wherever a janitor does."""

FINDINGS_KEPT: Final = 200
"""Findings that a run keeps, faults first; its counts are of all."""


class JobFailed(Exception):
    """The job could not go on: a shard or the store is down, or a snapshot was lost.

    What it has removed stays removed; run it again.
    """


class JobCancelled(Exception):
    """The job was cancelled. What it has removed stays removed."""


@dataclass(frozen=True)
class JobOptions:
    """How to do a job.

    Attributes:
        dry_run: Count what would be removed; remove and archive nothing.
        run: The run's ID, which archived dead letters and reports are named by; empty: a new one.
        grace_s: How far clocks of machines may be apart; the owners have a grace of their own.
        now_ms: The time to judge by; None: the owners' own, which comes with the snapshots.
        replay_window_s: `unreferenced`: how far back new queues may start, as the brokers and the
            ingests have it; 0: without limit, so nothing is ever unreferenced.
        older_than_s: `dead-letters`: how long ago a message must have failed.
        queue_ids: These queues only; None: all. `unreferenced` is always about all.
        target_queue_id: `restore`: the queue that gets them; empty: the one that they failed in.
        message_ids: `restore`: these only; None: all.
        failed_from_ms: `restore`: what failed then or later.
        failed_until_ms: `restore`: what failed before.
        days: `report`: how many days back from today.
        reports_kept: `report`: how many stay, this one included.
        backup_root: `backup`: the URL of the root that gets it.
        backups_kept: `backup`: how many stay, this one included.
        wal_store: `verify` and `repair`: the URL of the store of the WALs alone; empty: that of the
            instance's record.
        sizes_only: `verify` and `repair`: compare the sizes of payload objects; do not read them.
        memory: Heap of the Spark driver.
        spark: Spark's own settings, in place of ours.
        cancelled: Set it to end the job soon.
    """

    dry_run: bool = False
    run: str = ""
    grace_s: int = 60
    now_ms: int | None = None
    replay_window_s: int = 7 * 24 * 3600
    older_than_s: int = 7 * 24 * 3600
    queue_ids: Sequence[str] | None = None
    target_queue_id: str = ""
    message_ids: Sequence[int] | None = None
    failed_from_ms: int | None = None
    failed_until_ms: int | None = None
    days: int = 30
    reports_kept: int = 100
    backup_root: str = ""
    backups_kept: int = 14
    wal_store: str = ""
    sizes_only: bool = False
    master: str = "local[*]"
    memory: str = "1g"
    spark: dict[str, str] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Progress:
    """How far a job is; phases count from 1, and tasks are those of the phase known so far."""

    phase: str
    phase_number: int
    phases_count: int
    tasks_done: int = 0
    tasks_count: int = 0


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class JobResult:
    """What a job did, or would do in a dry run.

    Attributes:
        counts: By name, such as `messages_purged`; a dry run has the same names.
        artifacts: Paths below the root of what it wrote.
        phases: Its phases in order, each with its seconds.
        findings: What a verification found, the first FINDINGS_KEPT.
    """

    counts: dict[str, int]
    artifacts: list[str] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
