"""Whether there is any work for a job, asked of the owners with calls that cost them little.

A look returns what it found as numbers by name, its evidence: nothing at all means that there is no
work. The same evidence as before the last run that did all there was to do means that there is
none either, for a day: what has aged meanwhile is found then. So an instance in which nothing
happens starts no Spark, and one in which nothing has happened since yesterday starts it once a day.

==============  ================================================================================
retention       the log has entries older than an hour (the last of them); dead letters past
                their queue's retention
unreferenced    the log has entries that are older than any new queue may start (the last of them);
                there is a payload object that is old enough to be removed if nothing names it,
                or a part of the archive that is so small that it may be empty
done            queues that are older than their done retention list done messages (how many)
dead-letters    a dead letter is old enough for the archive (how many there are of any age)
report          there are entries, or messages in a state
==============  ================================================================================
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.blobs import FOLDER
from libs.storage.objects.small_objects import Objects
from services.janitor.archive_paths import ARCHIVE_FOLDER, may_be_empty
from services.janitor.asking import asking, is_moving
from services.janitor.orphans import ORPHAN_AGE_MS
from services.janitor.snapshots import SHARDED, refuse_unknown_shards
from slatemq.errors import NotFound, Unavailable
from slatemq.v1 import entry_pb2, entry_pb2_grpc, ingest_pb2, ingest_pb2_grpc, queue_pb2
from slatemq.v1 import queue_pb2_grpc as queue_grpc

SCHEDULED: Final = ("retention", "unreferenced", "done", "dead-letters", "report", "backup")
"""The jobs that may have a schedule."""

AGES_MS: Final = 86_400_000
"""How long the same evidence does not count as a change."""

YOUNG_MS: Final = 3_600_000
"""Messages may live for a second; Spark is not started for those that came within the hour."""

PAGE_QUEUES: Final = 1_000

Evidence = Mapping[str, int]


@dataclass(frozen=True)
class Ages:
    """At which age jobs take things, in seconds; `replay_window_s` 0 is never."""

    replay_window_s: int
    dead_letters_s: int
    grace_s: int


def has_changed(probe: Evidence, before: Evidence | None, since_ms: int) -> bool:
    """Whether a probe says that there is work, given that of the last run, `since_ms` ago."""
    return bool(probe) and (before is None or probe != before or since_ms >= AGES_MS)


@dataclass(eq=False)
class ChangeDetector:
    """Probes the owners. Raises Unavailable and the like when a shard is down, StoreUnavailable."""

    _directory: TopologyDirectory
    _channels: Channels
    _objects: Objects
    _ages: Ages

    async def look(self, job: str, now_ms: int) -> Evidence:
        """The evidence of work for a job; empty where there is none."""
        grace_ms = self._ages.grace_s * 1000
        match job:
            case "retention":
                return {
                    **await self._logs(now_ms - YOUNG_MS - grace_ms),
                    **await self._dead_letters_due(now_ms - grace_ms, archive=False),
                }
            case "unreferenced":
                window_ms = self._ages.replay_window_s * 1000
                logs = await self._logs(now_ms - window_ms - grace_ms) if window_ms else {}
                return {**logs, **await self._objects_of_old(now_ms - ORPHAN_AGE_MS - grace_ms)}
            case "done":
                return await self._done(now_ms - grace_ms)
            case "dead-letters":
                return await self._dead_letters_due(now_ms, archive=True)
            case "report":
                return {**await self._logs(), **await self._states()}
            case "backup":
                # Always: changes of queues are in none of these. It needs all shards, as they do.
                await self._check_announced()
                return {"time": now_ms, **await self._logs(), **await self._states()}
        raise ValueError(f"{job} has no schedule")

    async def _check_announced(self) -> None:
        """Raises Unavailable before the first, or the last, process of the shards is announced."""
        topology = await self._directory.read()
        known = {f"{name}/{shard}" for name in SHARDED for shard in topology.shards(name)}
        await refuse_unknown_shards(self._objects, known)
        if not known:
            raise Unavailable("no ingest or broker has announced itself yet")

    async def _logs(self, before_ms: int | None = None) -> Evidence:
        """The last entry of each log that is older than `before_ms`; None: the last of all."""
        shards = (await self._directory.read()).ingests
        found = await asyncio.gather(*(self._log(shard, before_ms) for shard in shards))
        return {f"ingest/{shard}": last for shard, last in zip(shards, found, strict=True) if last}

    async def _log(self, shard: int, before_ms: int | None) -> int:
        # The status of a log has its end though all of it was removed: this finds what is there.
        asked = ingest_pb2.FindLogPositionRequest(
            received_at_ms=_EVER_MS if before_ms is None else max(before_ms, 0)
        )
        with asking("ingest", shard):
            stub = ingest_pb2_grpc.IngestServiceStub(await self._channels.to("ingest", shard))
            return (await stub.FindLogPosition(asked)).after_sequence

    async def _objects_of_old(self, before_ms: int) -> Evidence:
        """Whether an object is that old; only the job can say which of them nothing names.

        So the job looks once a day where payloads are large. One object is enough, and the first of
        256 folders has one, unless there are hardly any.
        """
        for folder in await self._objects.folders(FOLDER):
            for info in await self._objects.describe(folder):
                if info.modified_ms < before_ms:
                    return {"objects": 1}
        for folder in await self._objects.folders(ARCHIVE_FOLDER):
            for info in await self._objects.describe(folder):
                if may_be_empty(info) and info.modified_ms < before_ms:
                    return {"emptied": 1}
        return {}

    async def _done(self, now_ms: int) -> Evidence:
        found: Counter[str] = Counter()
        async for shard, queue in self._queues():
            kept_ms = queue.done_retention_s * 1000
            if kept_ms and queue.counts.done_count and queue.created_at_ms + kept_ms < now_ms:
                found[f"broker/{shard}"] += queue.counts.done_count
        return dict(found)

    async def _dead_letters_due(self, now_ms: int, *, archive: bool) -> Evidence:
        """Whether a dead letter is due for the archive, or past its queue's retention."""
        due, found = False, Counter[str]()
        async for shard, queue in self._queues():
            kept_s = self._ages.dead_letters_s if archive else queue.failed_retention_s
            if not queue.counts.failed_count or (not archive and not kept_s):
                continue
            due = due or await self._has_failed(shard, queue.queue_id, now_ms - kept_s * 1000)
            found[f"failed/{shard}"] += queue.counts.failed_count
        return dict(found) if due else {}

    async def _has_failed(self, shard: int, queue_id: str, before_ms: int) -> bool:
        if before_ms <= 0:
            return False
        asked = entry_pb2.ListEntriesRequest(
            queue_id=queue_id,
            state=queue_pb2.ENTRY_STATE_FAILED,
            page_size=1,
            finished_until_ms=before_ms,
        )
        try:
            with asking("broker", shard):
                stub = entry_pb2_grpc.EntryServiceStub(await self._channels.to("broker", shard))
                return bool((await stub.ListEntries(asked)).entries)
        except (NotFound, Unavailable) as error:
            if isinstance(error, NotFound) or is_moving(error, queue_id):
                return False  # It was deleted since it was listed, or moves.
            raise

    async def _states(self) -> Evidence:
        found: Counter[str] = Counter()
        async for shard, queue in self._queues():
            counts = queue.counts
            found[f"waiting/{shard}"] += (
                counts.available_count + counts.delayed_count + counts.in_flight_count
            )
            found[f"done/{shard}"] += counts.done_count
            found[f"failed/{shard}"] += counts.failed_count
        return dict(+found)  # without zeros

    async def _queues(self) -> AsyncIterator[tuple[int, queue_pb2.Queue]]:
        for shard in (await self._directory.read()).brokers:
            token = ""
            while True:
                asked = queue_pb2.ListQueuesRequest(page_size=PAGE_QUEUES, page_token=token)
                with asking("broker", shard):
                    stub = queue_grpc.QueueServiceStub(await self._channels.to("broker", shard))
                    page = await stub.ListQueues(asked)
                for queue in page.queues:
                    yield shard, queue
                token = page.next_page_token
                if not token:
                    break


_EVER_MS: Final = 1 << 62
