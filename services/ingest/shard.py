"""One ingest shard, opened: its database and everything that works on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from libs.serving.process.commit_config import pace_of
from libs.serving.process.exits import ExitCause
from libs.serving.process.shards import open_owned, wait_for_clock, wait_lost
from libs.storage.database.blobs import Blobs
from libs.storage.database.clocks import Clock, HybridClock
from libs.storage.database.pace import Pace
from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from libs.storage.layout.ids import IdAllocator, decode_seq_block
from libs.storage.layout.own_keys import CLOCK_KEY, DRAINING_KEY, ID_BLOCK_KEY, LEAVING_KEY
from libs.storage.objects.shard_owners import Owner
from libs.storage.records.states import decode_clock
from services.ingest.config import IngestConfig
from services.ingest.edit.changes import Changes, Turns
from services.ingest.edit.purge_rules import PurgeEpoch, Rules
from services.ingest.edit.purging import Purger
from services.ingest.edit.replacing import Replacer
from services.ingest.read.payload_cache import PayloadCache
from services.ingest.read.reading import Reader
from services.ingest.read.tailing import MetadataLog, read_log_bounds
from services.ingest.write.dedupe_keys import DedupeKeys
from services.ingest.write.id_gaps import IdGaps
from services.ingest.write.publishing import Publisher, PublisherLimits
from services.ingest.write.pushing import Outboxes
from services.ingest.write.request_ids import RequestIds
from slatemq.errors import Unavailable

log = logging.getLogger(__name__)

TIDY_S: Final = 0.25
"""64 tables of request IDs are to be sealed in a minute: this does 240."""


@dataclass(eq=False)
class Shard:
    """One opened shard; `open_shard` makes it. Commits from the start on."""

    database: Database
    clock: Clock
    publisher: Publisher
    reader: Reader
    replacer: Replacer
    purger: Purger
    log: MetadataLog
    gaps: IdGaps
    purge_epoch: PurgeEpoch

    def __post_init__(self) -> None:
        self._committing = asyncio.create_task(self.publisher.commits.run())
        self._tidying = asyncio.create_task(self._clean_up())

    async def prove_ownership(self) -> None:
        await self.publisher.commits.prove_ownership()

    @property
    def memory_parts(self) -> dict[str, int]:
        """Bytes in memory by what they are for."""
        return {
            "payload_cache": self.reader.cache.size_bytes,
            "log_cache": self.log.size_bytes,
            "uncommitted": self.publisher.commits.uncommitted_bytes,
        }

    async def confirm_missing(self, missing_ids: Sequence[int], last_message_id: int) -> None:
        """Return if it is certain that messages which were not found are not stored.

        `last_message_id` is where the log ended before they were looked for. Raises Unavailable for
        one behind that: a caller that knows of it may have it from an owner that has replaced this
        one.
        """
        if not missing_ids:
            return
        if (message_id := max(missing_ids)) > last_message_id:
            raise Unavailable(
                f"message {message_id} is not here yet: the log ends at {last_message_id}",
                reason="NOT_YET_STORED",
            )
        await self.prove_ownership()

    async def wait_lost(self) -> ExitCause:
        """Return when another process owns the shard. Raises why nothing can be committed."""
        return await wait_lost(self.database, (self._committing, self._tidying))

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            await self.publisher.clean_up()

    def drain(self) -> None:
        """End the tailers; publishes in flight complete."""
        self.log.close()

    async def close(self) -> None:
        """Commit what was accepted, and close the database; works for a broken shard too."""
        self.log.close()
        self._tidying.cancel()
        await self.publisher.commits.close()
        await asyncio.wait([self._committing, self._tidying])
        for task in (self._committing, self._tidying):
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.debug("ended with %r", error)
        await self.reader.close()
        await self.database.close()


async def open_shard(
    root: Root,
    config: IngestConfig,
    owner: Owner,
    clock: Callable[[int], Clock] = HybridClock,
) -> Shard:
    """Open the shard's database, which fences an older process, and go on where it ended.

    `owner` is this process; `clock` makes a clock that goes on from the time of the last commit, in
    ms. Raises the errors of libs.storage.
    """
    database = await open_owned(root, f"ingest/{config.shard}", Kind.INGEST, owner)
    try:
        # A process killed between writing and syncing left commits that are served from now on.
        await root.sync()
        pace = pace_of(config, root, database)
        return await _recover(database, Blobs(root), config, pace, clock)
    except BaseException:
        await database.close()
        raise


async def _recover(
    database: Database,
    blobs: Blobs,
    config: IngestConfig,
    pace: Pace,
    make_clock: Callable[[int], Clock],
) -> Shard:
    value = await database.get(CLOCK_KEY)
    last_ms = decode_clock(value) if value is not None else 0
    await wait_for_clock(database)
    clock = make_clock(last_ms)
    value = await database.get(ID_BLOCK_KEY)
    block = decode_seq_block(value) if value is not None else None
    outboxes = await Outboxes.load(database)
    requests = RequestIds(database, config.instance.request_id_window_s * 1000)
    await requests.load(last_ms, clock.now_ms())
    metadata_log: MetadataLog = MetadataLog(
        database,
        await read_log_bounds(database, config.shard),
        bytes_max=config.log_cache_bytes,
        streams_max=config.tail_streams_max,
        heartbeat_ms=config.heartbeat_ms,
    )
    gaps = await IdGaps.load(database, metadata_log, config.shard)
    cache = PayloadCache(config.payload_cache_bytes)
    publisher = Publisher(
        database,
        blobs,
        clock,
        config.shard,
        IdAllocator(block, config.id_block_size),
        gaps,
        requests,
        DedupeKeys(database, config.instance.dedupe_window_s * 1000, config.dedupe_cache_keys),
        outboxes,
        metadata_log,
        cache,
        PublisherLimits(
            uncommitted_bytes=config.uncommitted_bytes_max,
            blob_uploads=config.blob_uploads_max,
        ),
        pace,
    )
    publisher.is_draining = await database.get(DRAINING_KEY) is not None
    publisher.is_leaving = await database.get(LEAVING_KEY) is not None
    reader = Reader(database, blobs, metadata_log, cache)
    turns, changes = Turns(), Changes(publisher, metadata_log, reader)
    replacer = Replacer(database, clock, publisher, metadata_log, reader, turns, changes)
    purge_epoch = await PurgeEpoch.load(database, publisher)
    rules = Rules(config.instance.purge_grace_s * 1000, config.instance.replay_window_s * 1000)
    purger = Purger(database, blobs, clock, metadata_log, changes, turns, purge_epoch, rules)
    return Shard(
        database,
        clock,
        publisher,
        reader,
        replacer,
        purger,
        metadata_log,
        gaps,
        purge_epoch,
    )
