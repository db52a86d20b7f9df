"""What no queue needs any more, and may go: messages of old, and objects that nothing names.

A log position counts as judged once every broker has decided whose message it is, and no replay has
it before it. Of what was judged, and received before any new queue may start, those messages go
that are in no list of what waits, is in flight or failed, and are not to be kept for ever
(retention 0). A broker that is not asked could need all of them; so every one must be.

Nothing else has a message in its way: an outbox row and a refused push have their content with
them, and a redrive takes what is failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from services.janitor.jobs.moments import at_ms

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
    few: bool = False,
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
