"""The janitor's process: what it opens, when it serves, how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from libs.serving.access import tls_environment
from libs.serving.peers.topology import Peer
from libs.serving.process.exits import ExitCause, FatalError, first_cause
from libs.serving.process.ownership import Announcement
from libs.serving.service import Service
from libs.serving.telemetry import Telemetry
from libs.storage.database.addresses import overlap, parse_root
from libs.storage.database.roots import Root
from services.janitor.asking import release_snapshot
from services.janitor.config import JanitorConfig
from services.janitor.jobs.contract import WITHOUT_SPARK
from services.janitor.metrics import RunMeasures
from services.janitor.rpc.archived import ArchivedDeadLetters
from services.janitor.rpc.janitor import JanitorServicer, NamedQueues
from services.janitor.runs.change_detector import SCHEDULED, Ages, ChangeDetector
from services.janitor.runs.folders import remove_left
from services.janitor.runs.history import Run, RunEvents, RunStore
from services.janitor.runs.runner import HistoryLimits, Runner
from services.janitor.runs.timetable import Schedule, Timetable, parse_schedule
from services.janitor.spark.packages import check_installed, lacking_temporary_folder, missing
from slatemq._cancelling import end_all
from slatemq.errors import FailedPrecondition
from slatemq.models import now_ms

if TYPE_CHECKING:
    from services.janitor.events import JanitorRelay

log = logging.getLogger(__name__)

RELEASE_S: Final = 5.0

WORKER: Final = (sys.executable, "-m", "services.janitor.runs.worker")
BACKUP_WORKER: Final = (sys.executable, "-m", "services.janitor.backup.worker")

_MASTER: Final = re.compile(
    r"local(\[(\*|[1-9]\d{0,3})(,[1-9]\d{0,3})?\])?"
    r"|local-cluster\[\d{1,4},\d{1,4},\d{1,6}\]"
    r"|spark://[A-Za-z0-9._:,\[\]-]{1,200}"
    r"|k8s://[A-Za-z0-9._:/\[\]-]{1,200}"
    r"|yarn",
    re.ASCII,
)
"""What Spark takes for a master."""

_HEAP: Final = re.compile(r"[1-9]\d{0,5}[kmgtKMGT]", re.ASCII)


class JanitorProcess(Service[JanitorConfig]):
    """A janitor as `libs.serving.server` runs it. It never imports Spark: its children do."""

    kind = "janitor"

    def __init__(
        self,
        config: JanitorConfig,
        telemetry: Telemetry,
        root: Root,
        worker: Sequence[str] = WORKER,
    ) -> None:
        """`worker` is the command of the jobs of Spark. Raises FatalError for wrong settings."""
        super().__init__(config, config.shard, telemetry, root)
        objects = root.objects
        self._store = RunStore(objects)
        self._archived = ArchivedDeadLetters(objects, self.channels)
        self._queues = NamedQueues(self.directory, self.channels)
        self._relay: JanitorRelay | None = None
        if config.queue is not None:
            # Loaded when it is wanted: direct mode has nothing of it.
            relays = import_module("services.janitor.events")
            self._relay = relays.JanitorRelay(
                config.queue, telemetry, self._store, objects, config.shard
            )
        self._measures = RunMeasures(telemetry, now_ms)
        self.runner = Runner(
            self._store,
            config.shard,
            lambda job: BACKUP_WORKER if job == "backup" else worker,
            self._task_of,
            self._release,
            HistoryLimits(config.runs_kept, config.run_retention_s * 1000),
            now_ms,
            self._check_job,
            telemetry.tracer,
            self._relay.events if self._relay is not None else RunEvents(),
            self._measures.ended,
            objects.counts.add,
        )
        shared = config.instance
        ages = Ages(shared.replay_window_s, config.dead_letters_older_than_s, shared.purge_grace_s)
        self._timetable = Timetable(
            _schedules(config),
            ChangeDetector(self.directory, self.channels, objects, ages).look,
            self.runner.begin,
            self._store,
            config.schedule_jitter_s * 1000,
            now_ms,
        )
        self._works: list[asyncio.Task[None]] = []

    def servicers(self) -> Iterable[object]:
        yield JanitorServicer(
            self.runner, self._store, self._archived, self._queues, self.channels, now_ms
        )

    async def start(self, address: str, peer_address: str) -> None:
        """Take the place of an earlier process of this number, and begin."""
        if names := missing():
            without, lacking = ", ".join(WITHOUT_SPARK), ", ".join(names)
            log.info("only %s run until these are installed: %s", without, lacking)
        if (why := lacking_temporary_folder()) is not None:
            log.warning("no job runs until there is a folder for temporary files: %s", why)
        else:
            await asyncio.to_thread(remove_left, os.environ)
        peer = Peer("janitor", self._config.shard, address, peer_address)
        self.announcement = Announcement(self.directory, peer, tls=self.probe_tls)
        await self.runner.take_over()
        for stored in await self._store.latest("backup"):
            self._measures.note_backup(stored.run)
        await self.announcement.announce()
        works = (self.runner.work(), self._timetable.keep())
        self._works = [asyncio.create_task(work) for work in works]
        if self._relay is not None:
            self._relay.begin(self._relay.events, now_ms)

    async def wait_fatal(self) -> ExitCause:
        """Wait until something breaks, which only a bug or a wrong setting can cause."""
        broken = self._wait_broken()
        if self._relay is None:
            return await broken
        return await first_cause(broken, self._relay.wait_fatal())

    async def _wait_broken(self) -> ExitCause:
        await asyncio.wait(self._works, return_when=asyncio.FIRST_COMPLETED)
        for work in self._works:
            if work.done():
                work.result()
        return ExitCause.failed("a background task ended")

    async def drain(self) -> None:
        """End what runs, with its Spark."""
        for timetable in self._works[1:]:  # There is none before the end of the start.
            timetable.cancel()
        await self.runner.drain()

    async def stop(self) -> None:
        """End what has not ended, leave the topology, close the channels."""
        await end_all(self._works)
        await self.runner.stop()
        if self._relay is not None:
            await self._relay.stop()
        await super().stop()

    def _check_job(self, job: str) -> None:
        """Raise FailedPrecondition where a job cannot run."""
        if job not in WITHOUT_SPARK:
            check_installed()
        if job == "backup" and not self._config.backup_root:
            raise FailedPrecondition(
                "NO_BACKUP_ROOT",
                "this janitor has nowhere to put a backup: start it with `--backup-root URL` (or "
                "`make up` with SLATEMQ_BACKUP_ROOT=URL), of another bucket or folder than the "
                "instance's root",
            )

    def _task_of(self, run: Run) -> Mapping[str, Any]:
        """The task that the child gets."""
        config, ask = self._config, run.ask
        older_than_s = ask.older_than_s
        if older_than_s is None:
            older_than_s = config.dead_letters_older_than_s
        return {
            "job": ask.job,
            "root": config.root,
            "log_level": config.log_level,
            "log_format": config.log_format,
            "trace": dict(self._telemetry.carrier() if self._telemetry.carrier is not None else ()),
            "tls": tls_environment(config),
            "options": {
                # What is not asked for is as JobOptions has it.
                **{name: value for name, value in vars(ask).items() if value and name != "job"},
                "run": run.run_id,
                "grace_s": config.instance.purge_grace_s,
                "replay_window_s": config.instance.replay_window_s,
                "older_than_s": older_than_s,
                "reports_kept": config.reports_kept,
                "backup_root": config.backup_root,
                "wal_store": config.wal_store,
                "backups_kept": config.backups_kept,
                "master": config.spark_master,
                "memory": config.spark_memory,
            },
        }

    async def _release(self, snapshots: Sequence[tuple[str, str]]) -> None:
        releases = (release_snapshot(self.channels, *one, RELEASE_S) for one in snapshots)
        await asyncio.gather(*releases)


def _check_backup_root(config: JanitorConfig) -> None:
    """Raises FatalError for a backup root that cannot be one."""
    if not config.backup_root:
        if config.backup_schedule:
            raise FatalError.usage(
                "backup_schedule: set backup_root too, where backups are written to"
            )
        return
    try:
        backups, root = parse_root(config.backup_root), parse_root(config.root)
    except ValueError as error:
        raise FatalError.usage(f"backup_root: {error}") from error
    if overlap(backups, root):
        raise FatalError.usage(
            "backup_root: must be neither below the instance's root nor above it"
        )


def _schedules(config: JanitorConfig) -> dict[str, Schedule]:
    """The schedules of the settings. Raises FatalError for wrong settings."""
    found: dict[str, Schedule] = {}
    for job in SCHEDULED:
        name = f"{job.replace('-', '_')}_schedule"
        try:
            schedule = parse_schedule(getattr(config, name))
        except ValueError as error:
            raise FatalError.usage(f"{name}: {error}") from error
        if schedule is not None:
            found[job] = schedule
    _check_backup_root(config)
    if not _MASTER.fullmatch(config.spark_master):
        raise FatalError.usage(f"spark_master: {config.spark_master!r} is not a Spark master")
    if not _HEAP.fullmatch(config.spark_memory):
        raise FatalError.usage(
            f"spark_memory: {config.spark_memory!r} must be a size such as 512m or 4g"
        )
    return found
