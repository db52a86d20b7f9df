"""What may go: what is past its retention, and what no queue needs any more.

An entry that waits goes when its deadline is over by more than the clocks may be apart: it is not
delivered any more. One in flight stays for as long as its lease, since an ack on a valid lease is
still accepted; its broker drops it when the lease ends otherwise, so no job asks for it. A dead
letter stays past the deadline, with its payload: people may still want to see why it failed. It
goes when its queue's failed retention is over, if it has one.

A message goes, payload and metadata, when its deadline is over and no queue has it in flight or
failed. Done entries do not need it: they have all that they show.

A log position counts as judged once every broker has decided whose message it is, and no replay has
it before it. Of what was judged, and received before any new queue may start, those messages go
that are in no list of what waits, is in flight or failed, and are not to be kept for ever
(retention 0). A broker that is not asked could need all of them; so every one must be. Nothing else
has a message in its way: an outbox row and a refused push have their content with them, and a
redrive takes what is failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from services.janitor.jobs.moments import at_ms, ms_of

ENTRY: Final = ("queue", "broker_shard", "created_revision", "message_id", "bucket_order")
"""By which a broker finds an entry, and not one of a later queue of that name."""

_LISTED: Final = ("queue", "broker_shard", "message_id", "bucket_order")
ACTIVE: Final = (*_LISTED, "state", "retention_deadline", "priority", "timed", "bucket_number")
FAILED: Final = (*_LISTED, "failed_at")
QUEUES: Final = ("queue", "broker_shard", "created_revision", "failed_retention_s")
EXPIRING: Final = ("ingest_shard", "message_id", "retention_deadline", "payload_bytes")
"""What is read of the tables: the last is of messages."""


def with_queue(entries: DataFrame, queues: DataFrame, *columns: str) -> DataFrame:
    """Entries with these columns of their queue; without those whose queue is not there.

    Each partition of a queue has a row of its own, and its entries are on the same shard.
    """
    of = ["queue", "broker_shard"]
    return entries.join(sf.broadcast(queues.select(*of, *columns)), of)


def expired_entries(active: DataFrame, queues: DataFrame, now_ms: int, grace_ms: int) -> DataFrame:
    """Entries that wait past their deadline, with the columns of a removal."""
    over = active.where(
        (sf.col("state") == "available")
        & (sf.col("retention_deadline") <= at_ms(now_ms - grace_ms))
    )
    return with_queue(over, queues, "created_revision").select(
        *ENTRY, "priority", "timed", "bucket_number"
    )


def expired_failed(failed: DataFrame, queues: DataFrame, now_ms: int, grace_ms: int) -> DataFrame:
    """Dead letters past the failed retention of their queue, with the columns of a removal.

    A failed retention of 0 keeps them without limit.
    """
    kept = queues.where("failed_retention_s > 0")
    since_ms = ms_of("failed_at") + sf.col("failed_retention_s") * 1000 + grace_ms
    over = with_queue(failed, kept, "created_revision", "failed_retention_s").where(
        since_ms <= now_ms
    )
    return over.select(*ENTRY, ms_of("failed_at").alias("failed_at_ms"))


def expired_messages(
    messages: DataFrame,
    active: DataFrame,
    failed: DataFrame,
    now_ms: int,
    grace_ms: int,
    *,
    few: bool,
) -> DataFrame:
    """Messages past their deadline that no queue needs: ingest_shard, message_id, payload_bytes.

    An entry whose own deadline is later than that of its message needs it as well. `few`: the
    entries are few enough to broadcast.
    """
    until = at_ms(now_ms - grace_ms)
    over = messages.where(sf.col("retention_deadline") <= until)
    later = sf.col("retention_deadline").isNull() | (sf.col("retention_deadline") > until)
    needed = active.where((sf.col("state") == "in-flight") | later).select("message_id")
    held = needed.unionByName(failed.select("message_id"))
    gone = over.join(sf.broadcast(held) if few else held, "message_id", "left_anti")
    return gone.select("ingest_shard", "message_id", "payload_bytes")


DONE: Final = ("queue", "broker_shard", "message_id", "done_at")
PRUNED: Final = ("queue", "broker_shard", "created_revision", "done_retention_s", "done_count")
"""What is read of the tables: the last is of queues."""


def done_ends(queues: DataFrame, now_ms: int, grace_ms: int) -> DataFrame:
    """Until when each queue with done entries and a done retention may lose them.

    Columns: queue, broker_shard, created_revision, done_before_ms.
    """
    kept = queues.where("done_retention_s > 0 AND done_count > 0")
    before_ms = sf.lit(now_ms - grace_ms) - sf.col("done_retention_s") * 1000
    return kept.select(
        "queue", "broker_shard", "created_revision", before_ms.alias("done_before_ms")
    ).where("done_before_ms > 0")


def overdue_done(done: DataFrame, ends: DataFrame) -> DataFrame:
    """The done entries that may go: queue, message_id."""
    over = with_queue(done, ends, "done_before_ms")
    return over.where(ms_of("done_at") < sf.col("done_before_ms")).select("queue", "message_id")


JUDGED: Final = (
    "ingest_shard",
    "message_id",
    "received_at",
    "retention_s",
    "payload_bytes",
)
"""What is read of messages."""


def judged_positions(
    ingest_shards: Iterable[int],
    cursors: Sequence[Mapping[int, int]],
    replays: Iterable[tuple[int, int, int]],
) -> dict[int, int]:
    """Up to which message all brokers have judged each log; 0: none.

    `cursors` are the positions of each broker, by log; `replays` are the ingest shard, cursor and
    end of each part of each replay.
    """
    judged = {
        shard: min((known.get(shard, 0) for known in cursors), default=0) for shard in ingest_shards
    }
    for shard, cursor, end in replays:
        if cursor < end and shard in judged:
            judged[shard] = min(judged[shard], cursor)
    return judged


def unreferenced_messages(
    messages: DataFrame,
    active: DataFrame,
    failed: DataFrame,
    judged: DataFrame,
    before_ms: int,
    *,
    few: bool,
) -> DataFrame:
    """Messages received before a time that no queue needs: ingest_shard, message_id, payload_bytes.

    `judged` has `ingest_shard` and `judged_sequence`, up to where its log was judged. `few`: the
    entries are few enough to broadcast.
    """
    mortal = messages.where(sf.col("retention_s") > 0)
    old = mortal.where(sf.col("received_at") < at_ms(before_ms))
    decided = old.join(sf.broadcast(judged), "ingest_shard").where(
        sf.col("message_id") <= sf.col("judged_sequence")
    )
    needed = active.select("message_id").unionByName(failed.select("message_id"))
    gone = decided.join(sf.broadcast(needed) if few else needed, "message_id", "left_anti")
    return gone.select("ingest_shard", "message_id", "payload_bytes")


def orphaned_objects(objects: DataFrame, named: DataFrame, before_ms: int) -> DataFrame:
    """Payload objects last written before a time whose `uri` is not among those named."""
    old = objects.where(sf.col("modified_at") < at_ms(before_ms))
    return old.join(named.select("uri"), "uri", "left_anti")
