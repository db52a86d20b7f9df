"""The jobs that remove: `retention`, `unreferenced` and `done`, over an instance."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from libs.storage.objects.unfinished_files import unfinished_files
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from services.janitor.jobs.archive import emptied_parts
from services.janitor.jobs.batches import (
    Task,
    counted,
    in_list_order,
    in_log_order,
    totals,
    totals_by_queue,
)
from services.janitor.jobs.leftovers import (
    ObjectRemoval,
    named_by_messages,
    named_by_pushes,
    stored_objects,
)
from services.janitor.jobs.moments import at_ms
from services.janitor.jobs.removable import (
    ACTIVE,
    DONE,
    EXPIRING,
    FAILED,
    JUDGED,
    PRUNED,
    QUEUES,
    done_ends,
    expired_entries,
    expired_failed,
    expired_messages,
    orphaned_objects,
    overdue_done,
    unreferenced_messages,
)
from services.janitor.jobs.removing import DonePruning, EntryRemoval, MessagePurge
from services.janitor.jobs.standing import read_judged
from services.janitor.jobs.task_bodies import unneeded_bodies
from services.janitor.jobs.work import Work
from services.janitor.orphans import ORPHAN_AGE_MS, store_time_ms
from services.janitor.snapshots import renewed_snapshots
from services.janitor.spark.snapshots import table_of
from slatemq.v1 import purge_pb2

_ONE: Final = "1"


def retention(work: Work) -> Counter[str]:
    """Remove what is past its retention: entries first, so that no queue has what is gone."""
    active, failed = work.of_queues("active", *ACTIVE), work.of_queues("failed", *FAILED)
    queues = work.of_queues("queues", *QUEUES)
    now_ms, grace_ms = work.now_ms, work.grace_ms
    counts = Counter(entries_removed=0, failed_removed=0, messages_purged=0, payload_bytes=0)
    with work.phase("entries"):
        entries = expired_entries(active, queues, now_ms, grace_ms)
        task = EntryRemoval(work.url, failed=False)
        ordered = in_list_order(entries, "priority", "timed")
        counts.update(_removed(work, entries, ordered, task, entries_removed=_ONE))
    with work.phase("dead letters"):
        dead_letters = expired_failed(failed, queues, now_ms, grace_ms)
        task = EntryRemoval(work.url, failed=True)
        ordered = in_list_order(dead_letters)
        counts.update(_removed(work, dead_letters, ordered, task, failed_removed=_ONE))
    with work.phase("messages"):
        if work.options.queue_ids is None:  # a message is in others, too
            logged, few = work.table("messages", *EXPIRING), work.has_few_entries()
            messages = expired_messages(logged, active, failed, now_ms, grace_ms, few=few)
            counts.update(_purged(work, messages, purge_pb2.PURGE_REASON_EXPIRED))
    return counts


def unreferenced(work: Work) -> Counter[str]:
    """Remove the messages and objects that nothing needs any more."""
    counts = Counter(messages_purged=0, payload_bytes=0, objects_removed=0, object_bytes=0)
    with work.phase("messages"):
        # A window of 0 has no end: a new queue may start with the first message.
        if work.options.replay_window_s:
            messages = _unreferenced_messages(work)
            counts.update(_purged(work, messages, purge_pb2.PURGE_REASON_UNREFERENCED))
    with work.phase("objects"):
        counts.update(_remove_orphans(work))
        counts.update(asyncio.run(_remove_old(work)))
        counts.update(_remove_unfinished(work))
    return counts


def done(work: Work) -> Counter[str]:
    counts = Counter(done_removed=0, queues_pruned=0)
    with work.phase("done lists"):
        ends = done_ends(work.of_queues("queues", *PRUNED), work.now_ms, work.grace_ms)
        if work.options.dry_run:
            queues = overdue_done(work.table("done", *DONE), ends).groupBy("queue").count()
            counts.update(totals_by_queue(queues, done_removed="count", queues_pruned=_ONE))
        else:
            counts.update(counted(ends.repartition("queue"), DonePruning(work.url)))
    return counts


def note_store_time(work: Work) -> None:
    """Read the store's clock, before any snapshot is taken."""
    work.store_time_ms = asyncio.run(store_time_ms(work.root.objects))


def _unreferenced_messages(work: Work) -> DataFrame:
    judged = asyncio.run(read_judged(work.root, work.names))
    frame = work.spark.createDataFrame(
        sorted(judged.items()), "ingest_shard int, judged_sequence bigint"
    )
    before_ms = work.now_ms - work.options.replay_window_s * 1000 - work.grace_ms
    return unreferenced_messages(
        work.table("messages", *JUDGED),
        work.table("active", "message_id"),
        work.table("failed", "message_id"),
        frame,
        before_ms,
        few=work.has_few_entries(),
    )


def _remove_orphans(work: Work) -> dict[str, int]:
    before_ms = work.store_time_ms - ORPHAN_AGE_MS
    stored = stored_objects(work.spark, work.url)
    left = stored.where(sf.col("modified_at") < at_ms(before_ms)).persist()
    kept = [left]
    # A push may have moved from an outbox to an ingest since the ingest's snapshot was taken.
    with ExitStack() as stack:
        try:
            for named in _named(work, stack):
                if left.isEmpty():
                    return {}
                left = orphaned_objects(left, named, before_ms).persist()
                kept.append(left)
            sums = {"objects_removed": _ONE, "object_bytes": "size_bytes"}
            return _removed(work, left, left, ObjectRemoval(work.url), **sums)
        finally:
            # The last first, and before the snapshots are released: Spark plans again what rests on
            # a frame that goes, if it has not been computed whole.
            for frame in reversed(kept):
                frame.unpersist()


async def _remove_old(work: Work) -> dict[str, int]:
    """Bodies of tasks, and empty parts of the archive."""
    objects = work.root.objects
    found = await unneeded_bodies(work.root, work.names, work.store_time_ms)
    found += await emptied_parts(objects, work.store_time_ms - ORPHAN_AGE_MS)
    if not work.options.dry_run:
        await objects.delete_all([one.path for one in found])
    size_bytes = sum(one.size_bytes for one in found)
    return {"objects_removed": len(found), "object_bytes": size_bytes}


def _remove_unfinished(work: Work) -> dict[str, int]:
    """The files of killed uploads, on `file://`."""
    before_ms = work.store_time_ms - ORPHAN_AGE_MS
    counts = {"objects_removed": 0, "object_bytes": 0}
    for folder in work.root.folders.values():
        for file in unfinished_files(folder, before_ms):
            if not work.options.dry_run:
                file.path.unlink(missing_ok=True)
            counts["objects_removed"] += 1
            counts["object_bytes"] += file.size_bytes
    return counts


def _named(work: Work, stack: ExitStack) -> Iterator[DataFrame]:
    """The URIs that are named, the cheapest to find first."""
    yield named_by_pushes(work.spark, work.url, work.names)
    later = stack.enter_context(renewed_snapshots(work.url, ("ingest",)))
    since_ms = min(one.taken_at_ms for one in work.taken.all) - work.grace_ms
    sized = ("message_id", "payload_bytes")
    moved = table_of(work.spark, work.url, later.names, "messages", *sized, "received_at").where(
        sf.col("received_at") >= at_ms(since_ms)
    )
    for some in (_large, _sizeless):
        yield named_by_messages(some(moved), work.url, later.names)
        yield named_by_messages(some(work.table("messages", *sized)), work.url, work.names)


def _large(messages: DataFrame) -> DataFrame:
    """Messages whose payload is an object."""
    return messages.where(sf.col("payload_bytes") > INLINE_PAYLOAD_MAX_BYTES).select("message_id")


def _sizeless(messages: DataFrame) -> DataFrame:
    """Messages whose size the log may not have: read only where an object is left."""
    return messages.where("payload_bytes = 0").select("message_id")


def _purged(
    work: Work, messages: DataFrame, reason: purge_pb2.PurgeReason.ValueType
) -> dict[str, int]:
    sums = {"messages_purged": _ONE, "payload_bytes": "payload_bytes"}
    task = MessagePurge(work.url, work.epochs, reason)
    return _removed(work, messages, in_log_order(messages), task, **sums)


def _removed(
    work: Work, frame: DataFrame, ordered: DataFrame, task: Task, **sums: str
) -> dict[str, int]:
    """The owners' counts; in a dry run the sums of what they would be asked to remove."""
    if not work.options.dry_run:
        return dict(counted(ordered, task))
    return totals_by_queue(frame, **sums) if "queue" in frame.columns else totals(frame, **sums)
