"""Settings of the janitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libs.serving.process.config import ServingConfig
from libs.serving.process.settings import setting

JANITORS_MAX: Final = 16_384

U32_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class JanitorConfig(ServingConfig):
    """The SlateMQ janitor: runs jobs over all shards with Spark, on schedule and on demand.

    `python -m services.janitor sql --help` says how to query an instance in SQL; `backup`,
    `verify`, `move-wals` and `give-up` are for a root whose processes are stopped.
    """

    shard: int = setting(
        "Number of this janitor; a second process of the same number takes its "
        "place, and runs of the first are interrupted.",
        default=0,
        minimum=0,
        maximum=JANITORS_MAX - 1,
    )
    retention_schedule: str = setting(
        "When to remove what is past its retention: every 30m, 6h, 1d, or five fields of cron in "
        "UTC, such as '17 3 * * *'; empty: only when asked to. Without work no Spark is started.",
        default="1h",
    )
    unreferenced_schedule: str = setting(
        "When to remove messages that no queue needs any more; as above.", default="6h"
    )
    done_schedule: str = setting(
        "When to prune the done lists; as above.",
        default="1h",
    )
    dead_letters_schedule: str = setting(
        "When to move old dead letters into the archive; as above.", default=""
    )
    report_schedule: str = setting("When to write the report; as above.", default="")
    backup_schedule: str = setting(
        "When to take a backup; as above. It needs `backup_root`.", default=""
    )
    backup_root: str = setting(
        "URL of the root that backups are written to, in another bucket or folder than the "
        "instance: file:///path, s3://bucket/prefix?…, gs://…, az://…; empty: none are taken. "
        "Credentials come from the environment.",
        default="",
    )
    backups_kept: int = setting(
        "Backups kept, the newest; the others go after the next one was taken.",
        default=14,
        minimum=1,
        maximum=10_000,
    )
    schedule_jitter_s: int = setting(
        "The longest random delay of a scheduled job, in seconds, so that janitors and "
        "instances do not all begin together; a job with an interval is delayed by a quarter of it "
        "at most.",
        default=60,
        minimum=0,
        maximum=86_400,
    )
    dead_letters_older_than_s: int = setting(
        "How long ago a message must have failed to go into the archive, in seconds.",
        default=604_800,
        minimum=0,
        maximum=U32_MAX,
    )
    spark_master: str = setting(
        "Where Spark runs the jobs: local[*] uses all cores of this machine; the executors of a "
        "cluster need the packages and the store's credentials, and are sent this code.",
        default="local[*]",
    )
    spark_memory: str = setting(
        "Heap of the Spark driver, which on a local master does all the work: 512m, 4g.",
        default="1g",
    )
    runs_kept: int = setting(
        "Runs kept in the history, those that have not ended aside.",
        default=1_000,
        minimum=1,
        maximum=100_000,
    )
    run_retention_s: int = setting(
        "How long a run stays in the history after its end, in seconds; 0 = forever.",
        default=2_592_000,
        minimum=0,
        maximum=U32_MAX,
    )
    reports_kept: int = setting(
        "Reports kept, the newest; the others go after the next one was written.",
        default=100,
        minimum=1,
        maximum=100_000,
    )
