"""What a job is given, and what it gives back: for whoever runs jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "JOBS",
    "ORPHAN_AGE_MS",
    "REPLAY_WINDOW_S",
    "JobCancelled",
    "JobFailed",
    "JobInstance",
    "JobOptions",
    "JobResult",
    "Progress",
    "Report",
]

JOBS: Final = ("retention", "unreferenced", "done", "dead-letters", "report", "restore")
"""The names of all jobs."""

REPLAY_WINDOW_S: Final = 7 * 24 * 3600
GRACE_S: Final = 60
OLDER_THAN_S: Final = 7 * 24 * 3600
REPORTS_KEPT: Final = 100

ORPHAN_AGE_MS: Final = 24 * 3600 * 1000
"""How old an object is by the store that nothing names, before it goes."""


class JobFailed(Exception):
    """The job could not go on: a shard is away, the store is away, a snapshot was lost.

    What it had removed by then stays removed; run it again.
    """


class JobCancelled(Exception):
    """Somebody cancelled the job. What it had removed by then stays removed."""


@dataclass(frozen=True)
class JobInstance:
    """Whose jobs these are.

    Attributes:
        root: URL of the instance's root; credentials come from the environment.
    """

    root: str


@dataclass(frozen=True)
class JobOptions:
    """How a job is to be done.

    Attributes:
        dry_run: Count what would go; remove and archive nothing.
        run: The run's ID, by which archived letters and reports are named; empty: one of its own.
        grace_s: How far clocks of machines may be apart; the owners have a grace of their own.
        now_ms: The time to judge by; None: the owners' own, as they told it with the snapshots.
        replay_window_s: `unreferenced`: how far back new queues may start; 0: for ever, and then
            nothing is ever unreferenced. As the brokers and the ingests have it.
        older_than_s: `dead-letters`: how long ago a message must have failed.
        queues: Of these queues alone; None: of all. `unreferenced` is never of some.
        target: `restore`: the queue that gets the messages; empty: the one that they failed in.
        message_ids: `restore`: these alone; None: all.
        failed_from_ms: `restore`: what failed then or later.
        failed_until_ms: `restore`: what failed before.
        days: `report`: how many days back from today.
        reports_kept: `report`: how many stay, this one included.
        master: The Spark master.
        memory: Heap of the Spark driver.
        spark: Spark's own settings, in place of ours.
        cancelled: Set it to end the job soon.
    """

    dry_run: bool = False
    run: str = ""
    grace_s: int = GRACE_S
    now_ms: int | None = None
    replay_window_s: int = REPLAY_WINDOW_S
    older_than_s: int = OLDER_THAN_S
    queues: Sequence[str] | None = None
    target: str = ""
    message_ids: Sequence[int] | None = None
    failed_from_ms: int | None = None
    failed_until_ms: int | None = None
    days: int = 30
    reports_kept: int = REPORTS_KEPT
    master: str = "local[*]"
    memory: str = "1g"
    spark: dict[str, str] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
        phase: What it is doing, in a few words.
        phase_number: Which of its phases that is, from 1.
        phases_count: How many it has.
        tasks_done: Of this phase's tasks in Spark, so far.
        tasks_count: Of this phase's tasks in Spark, as far as they are known.
    """

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
        counts: By name, such as `messages_purged`; the same names in a dry run, for what would go.
        artifacts: Paths below the root of what it wrote.
        phases: What it did, in order, each with its seconds.
    """

    counts: dict[str, int]
    artifacts: list[str] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
