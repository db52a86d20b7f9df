"""The ingest process: what it opens, when it serves, how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from libs.serving.http.parts import HttpParts
from libs.serving.peers.topology import Peer
from libs.serving.process.commit_config import check_pace
from libs.serving.process.exits import ExitCause, FatalError, first_cause
from libs.serving.process.ownership import Ownership
from libs.serving.process.removal import ShardRemoval, measure_draining
from libs.serving.process.shards import watch_wal_store
from libs.serving.process.store_measures import measure_commits
from libs.serving.service import Service
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from libs.storage.errors import StorageError, StoreUnavailable
from libs.storage.objects.shard_owners import Owner
from services.ingest.config import IngestConfig
from services.ingest.draining import Drain
from services.ingest.rpc.ingest import IngestServicer, rules_of
from services.ingest.rpc.purge import PurgeServicer
from services.ingest.shard import Shard, open_shard
from services.ingest.tasks.bodies import warn_of_stranded
from services.ingest.tasks.servicer import TaskServicer
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.events.watch import QueueHealth
    from services.ingest.events.relay import IngestRelay
    from services.ingest.events.s3_events import S3Events
    from services.ingest.tasks.queued import Tasks

log = logging.getLogger(__name__)

QUEUED: Final = ("async", "sync")
"""The consistencies of event queues with which publishes are tasks."""

STORE_LOOK_S: Final = 2.0
"""How often to see whether a store that refused answers again."""


class IngestProcess(Service[IngestConfig]):
    """One ingest shard; a Service of `libs.serving.server`."""

    kind = "ingest"
    owns_shard = True

    def __init__(self, config: IngestConfig, telemetry: Telemetry, root: Root) -> None:
        super().__init__(config, config.shard, telemetry, root)
        check_pace(config)
        self._removal = ShardRemoval(root, self.directory, f"ingest/{config.shard}")
        self._shard: Shard | None = None
        self._servicer: IngestServicer | None = None
        self._tasks: Tasks | None = None
        if config.queue is not None and config.queue.consistency in QUEUED:
            # Loaded only here: a direct ingest needs nothing of it.
            queued = import_module("services.ingest.tasks.queued")
            rules = rules_of(config)
            self._tasks = queued.Tasks(config.queue, config.shard, root.objects, rules, telemetry)
        self._relay: IngestRelay | None = None
        if config.queue is not None:
            # Loaded when it is wanted: direct mode has nothing of it. What tasks store has events
            # as anything else in the log.
            relays = import_module("services.ingest.events.relay")
            self._relay = relays.IngestRelay(
                config,
                config.queue,
                telemetry,
                task_refusal=None if self._tasks is None else self._tasks.refusal,
            )
        self._looking: asyncio.Task[None] | None = None
        self._s3_events = self._s3_events_of(config)

    def _s3_events_of(self, config: IngestConfig) -> S3Events | None:
        """What takes the notifications of S3 stores, where it has a token. Raises FatalError."""
        if not config.s3_events_token and not config.s3_events_token_file:
            return None
        # Loaded when asked for: few processes have it.
        module = import_module("services.ingest.events.s3_events")
        try:
            token = module.token_of(config.s3_events_token, config.s3_events_token_file)
        except InvalidArgument as error:
            problem = f"--s3-events-token-file: {error.description}"
            raise FatalError.usage(problem) from error
        s3_events: S3Events = module.S3Events(
            self.directory, self.channels, token, config.instance.payload_bytes_max
        )
        return s3_events

    @property
    def http_parts(self) -> HttpParts:
        """A path on the HTTP port for the notifications of S3 stores, where it has a token."""
        posts = [self._s3_events.post] if self._s3_events is not None else []
        return HttpParts(posts, self._queue_health if self._relay is not None else None)

    async def _queue_health(self) -> QueueHealth:
        assert self._relay is not None, "asked for with a queue"
        if self._tasks is None:
            return await self._relay.health()
        health = await self._tasks.health()
        return replace(health, connected=health.connected and not self._relay.refusal)

    @property
    def note(self) -> str:
        if self._shard is None:
            return ""
        return "; ".join(filter(None, (self._shard.publisher.commits.pace.note, super().note)))

    @property
    def held_bytes(self) -> int:
        posted = 0 if self._s3_events is None else self._s3_events.held_bytes
        return posted + (0 if self._servicer is None else self._servicer.held_bytes)

    @property
    def log_end(self) -> int | None:
        return None if self._shard is None else self._shard.log.end.last_message_id

    @property
    def memory_parts(self) -> Mapping[str, int]:
        if self._shard is None:
            return {}
        return self._shard.memory_parts

    @property
    def cache_lookups(self) -> Mapping[str, tuple[int, int]]:
        if self._shard is None:
            return {}
        reader = self._shard.reader
        return {"payloads": (reader.cached_count, reader.stored_count)}

    def servicers(self) -> Iterable[object]:
        shard = self._shard
        assert shard is not None, "called after start"
        assert self._servicer is not None, "called after start"
        return [
            self._servicer,
            PurgeServicer(self._config.shard, shard.purger),
            SnapshotServicer(
                self._root.snapshots(shard.database),
                shard.clock.now_ms,
                shard.prove_ownership,
                purge_epoch=lambda: shard.purge_epoch.durable,
            ),
            TaskServicer(self._tasks),
        ]

    async def start(self, address: str, peer_address: str) -> None:
        config = self._config
        await self._removal.check_start()
        shard = self._shard = await open_shard(
            self._root, config, Owner(self.owner_name, peer_address)
        )
        self.database = shard.database
        self.shard_drain = drain = Drain(
            shard,
            self.directory,
            self.channels,
            self._root.objects,
            self._announce,
            has_tasks=self._tasks is not None,
        )
        if self._tasks is not None and drain.is_draining:
            raise _drains_tasks(config.shard)
        await drain.finish()
        measure_draining(self._telemetry.meter, drain)
        if self._telemetry.enabled:
            measure_commits(self._telemetry.meter, shard.publisher.commits)
        if self._tasks is None:
            self._servicer = IngestServicer(config, shard, self.directory, self._telemetry)
        else:
            queued = import_module("services.ingest.rpc.queued")
            self._servicer = queued.QueuedServicer(
                config, shard, self.directory, self._telemetry, self._tasks
            )
        limit = config.instance.payload_bytes_max
        self._peer = Peer("ingest", config.shard, address, peer_address, limit)
        self._peer = replace(self._peer, is_draining=drain.is_draining)
        commits = shard.publisher.commits
        self.announcement = self._ownership = Ownership(commits, self.directory, self._peer)
        if self._tasks is not None:
            self.announcement.serves_without_store = self._tasks.serves_without_store
        await self.announcement.announce()
        if self._tasks is not None:
            # Clients learn from it where all are, also once the store does not say it any more.
            await self.directory.prepare()
            await self._tasks.begin(shard)
        else:
            # Beside the start: it serves meanwhile.
            self._looking = asyncio.create_task(warn_of_stranded(self._root.objects, config.shard))
        if self._relay is not None:
            await self._relay.start(shard)

    async def _announce(self) -> None:
        """Say in the topology whether the shard drains. Raises StorageError."""
        assert self._shard is not None, "called after start"
        is_draining = self._shard.publisher.is_draining
        await self._ownership.change(replace(self._peer, is_draining=is_draining))

    async def wait_fatal(self) -> ExitCause:
        """Wait until the shard is lost. Raises the error of a failed commit."""
        shard, drain = self._shard, self.shard_drain
        assert shard is not None, "called after start"
        assert drain is not None, "called after start"
        queues = [queue for queue in (self._tasks, self._relay) if queue is not None]
        watch = watch_wal_store(self._root, shard.database)
        ends = [shard.wait_lost(), watch, self._removal.wait(drain.removed)]
        try:
            return await first_cause(*ends, *(queue.wait_fatal() for queue in queues))
        except StoreUnavailable as error:
            # With a standby it ends, since this one alone may have lost the store.
            if (
                self._tasks is not None
                and self._tasks.serves_without_store()
                and not self._config.standby
            ):
                await self._accept_until_back(error)
            raise

    async def _accept_until_back(self, error: StoreUnavailable) -> None:
        """Let publishes go on while the store refuses: the backend takes them.

        What they become is applied by the next start. It needs the store, so this process ends when
        that answers.
        """
        log.error("publishes are accepted as tasks, all else waits for the store: %s", error)
        assert self._shard is not None, "called after start"
        self._shard.drain()
        while True:
            await asyncio.sleep(STORE_LOOK_S)
            try:
                await self.probe_store()
            except StoreUnavailable as still:
                log.debug("the store is not back: %s", still)
            except StorageError:
                return  # The next start says it.
            else:
                return

    async def drain(self) -> None:
        """End the streams; publishes in flight complete."""
        if self._servicer is not None:
            self._servicer.drain()
        if self._tasks is not None:
            self._tasks.drain()
        if self._shard is not None:
            self._shard.drain()

    async def stop(self) -> None:
        """Commit what was accepted, and close the database."""
        if self._looking is not None:
            self._looking.cancel()
        if self._tasks is not None:
            await self._tasks.close()
        if self._relay is not None:
            await self._relay.stop()
        if self._shard is not None:
            await self._shard.close()
        await super().stop()
        if self.shard_drain is not None and self.shard_drain.removed.is_set():
            await self._removal.finish()


def _drains_tasks(shard: int) -> FatalError:
    return FatalError.usage(
        f"ingest shard {shard} is being drained, and takes no publishes as tasks: start it without "
        "the queue settings, or so, and end the drain with `slatemq shard drain --ingest --cancel`"
    )
