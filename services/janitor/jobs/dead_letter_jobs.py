"""The jobs over dead letters: into the archive, and back from it; and their tasks.

A dead letter is durable in the archive before its broker is asked to remove it; what the broker
keeps of it says where it is. Restoring it is one commit of the broker.

Brokers take their snapshots after the ingests, so a message may have come and failed in between:
nothing is known of it yet, and it is left to the next run. Of a message whose ingest was given up
nothing will be known: its dead letter is archived without payload.

A dead letter whose payload is an object that cannot be read stays, too. The object may be restored;
or the message was edited since the snapshot, and has another one, which the next run reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from libs.storage.errors import StorageError
from libs.storage.layout.ids import shard_of
from libs.storage.objects.removed_shards import RemovedShards
from services.janitor.archive_paths import ARCHIVE_FOLDER
from services.janitor.jobs.archive import DEAD_LETTERS, PART_BYTES, DayFolder
from services.janitor.jobs.batches import (
    BATCH_ROWS,
    NAMED,
    counted,
    counts_batch,
    grouped,
    totals_by_queue,
)
from services.janitor.jobs.contents import Contents
from services.janitor.jobs.moments import at_ms, ms_of
from services.janitor.jobs.owners import Owners, owners_of
from services.janitor.jobs.removable import with_queue
from services.janitor.jobs.removing import ENTRY_KEYS, failed_rows, is_gone, remove_entries
from services.janitor.jobs.standing import read_last_ids
from services.janitor.jobs.work import FEW_ENTRIES, Work
from services.janitor.snapshots import SnapshotName
from slatemq._grouping import groups_of
from slatemq.errors import FailedPrecondition, NotFound, Unavailable
from slatemq.v1 import archived_pb2, archived_pb2_grpc, removal_pb2

log = logging.getLogger(__name__)

_IN_DAYS: Final = ("queue", "day", "broker_shard", "created_revision", "failed_at", "message_id")
"""The order in which a task takes dead letters: day by day."""


def dead_letters(work: Work) -> Counter[str]:
    """Archive the dead letters that are old enough."""
    counts = Counter(dead_letters_written=0, dead_letters_archived=0, payload_bytes=0)
    with work.phase("dead letters"):
        before_ms = work.now_ms - work.options.older_than_s * 1000
        due = due_dead_letters(work.of_queues("failed"), work.of_queues("queues"), before_ms)
        bounds = due.selectExpr("min(message_id)", "max(message_id)", "count(*)").first()
        assert bounds is not None, "an aggregate always has a row"
        first_id, last_id, count = bounds
        if not count:
            return counts
        messages, attempts = (
            work.table(name).where(sf.col("message_id").between(first_id, last_id))
            for name in ("messages", "attempts")
        )
        if count <= FEW_ENTRIES:
            wanted = sf.broadcast(due.select("message_id").distinct())
            messages = messages.join(wanted, "message_id", "left_semi")
        dead_letters = with_content(due, messages, attempts)
        if work.options.dry_run:
            found = totals_by_queue(
                dead_letters, dead_letters_archived="1", payload_bytes="payload_bytes"
            )
            return counts + Counter(dead_letters_written=found["dead_letters_archived"], **found)
        names = tuple(name for name in work.names if name.service == "ingest")
        last_ids = asyncio.run(read_last_ids(work.root, names))
        removed = asyncio.run(RemovedShards(work.root.objects).numbers("ingest"))
        task = DeadLetterArchive(work.url, names, last_ids, frozenset(removed), work.run)
        counts.update(count_damaged_once(counted(_in_days(dead_letters), task)))
        work.artifacts.append(ARCHIVE_FOLDER)
    return counts


def restore(work: Work) -> Counter[str]:
    """Push archived dead letters back into queues."""
    options = work.options
    counts = Counter(dead_letters_restored=0)
    with work.phase("archived dead letters"):
        archived = work.of_queues("archived")
        if options.message_ids is not None:
            archived = archived.where(sf.col("message_id").isin(*options.message_ids))
        if options.failed_from_ms is not None:
            archived = archived.where(sf.col("failed_at") >= at_ms(options.failed_from_ms))
        if options.failed_until_ms is not None:
            archived = archived.where(sf.col("failed_at") < at_ms(options.failed_until_ms))
        archived = archived.withColumn("day", sf.to_date("failed_at"))
        rows = with_queue(archived, work.table("queues"), "created_revision")
        if options.dry_run:
            counts.update(totals_by_queue(rows, dead_letters_restored="1"))
        else:
            task = DeadLetterRestore(work.url, options.target_queue_id)
            counts.update(count_damaged_once(counted(_in_days(rows), task)))
    return counts


def due_dead_letters(failed: DataFrame, queues: DataFrame, before_ms: int) -> DataFrame:
    """Dead letters that failed before a time, with the incarnation of their queue."""
    due = failed.where(sf.col("failed_at") < at_ms(before_ms))
    return with_queue(due, queues, "created_revision")


def with_content(dead_letters: DataFrame, messages: DataFrame, attempts: DataFrame) -> DataFrame:
    """The dead letters with their metadata, and their failed attempts in order.

    Metadata of a message that is gone is null.
    """
    known = messages.select(
        "message_id",
        "created_at",
        "received_at",
        "retention_s",
        "payload_bytes",
        "direct_queue",
        "headers",
    )
    entry = ["queue", "broker_shard", "message_id"]
    history = attempts.groupBy(*entry).agg(
        sf.sort_array(
            sf.collect_list(
                sf.struct("attempt", "consumer", "claimed_at", "outcome", "failed_in"),
            )
        ).alias("history")
    )
    with_metadata = dead_letters.join(known, "message_id", "left")
    whole = with_metadata.join(history, entry, "left")
    return whole.withColumn("failed_at_ms", ms_of("failed_at"))


def _in_days(dead_letters: DataFrame) -> DataFrame:
    return dead_letters.repartition("queue", "day").sortWithinPartitions(*_IN_DAYS)


RESTORE_ROWS: Final = 1000
RESTORE_BYTES: Final = 32 << 20
"""Of a request, unless one row alone has more: half of what a broker takes."""

SOUGHT: Final = 50_000
"""Dead letters that are sought in the parts of a day together."""

_DAMAGED: Final = "parts_damaged"


@dataclass(frozen=True)
class DeadLetterArchive:
    """Archives dead letters: rows with DEAD_LETTERS except the payload, and ENTRY_KEYS.

    The rows come in the order of `day` within each queue.

    Attributes:
        names: The snapshots of the ingests, for the payloads.
        last_ids: By ingest shard, the last message that its snapshot can have.
        removed: The ingest shards that were removed: their messages have no payload any more.
        run: The run that the archived entries name.
    """

    root: str
    names: tuple[SnapshotName, ...]
    last_ids: Mapping[int, int]
    removed: frozenset[int]
    run: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts: Counter[str] = Counter()
        with owners_of(self.root) as owners:
            contents = Contents(owners, self.names)
            folder: DayFolder | None = None
            of: tuple[object, ...] = ()
            for table in grouped(batches, (*ENTRY_KEYS, "day"), SOUGHT):
                queue, day = table["queue"][0].as_py(), table["day"][0].as_py()
                if folder is None or of != (queue, day):
                    counts += _added(folder)
                    folder, of = DayFolder(owners, owners.root.objects, queue, day), (queue, day)
                counts += self._archive(owners, contents, folder, table)
            counts += _added(folder)
            contents.close()
        yield counts_batch(counts)

    def _archive(
        self, owners: Owners, contents: Contents, folder: DayFolder, table: pa.Table
    ) -> Counter[str]:
        known = self.can_be_known(table)
        counts = Counter(dead_letters_postponed=table.num_rows - known.num_rows)
        for some in self._with_payloads(contents, folder.missing(known)):
            folder.add(some)
            counts["dead_letters_written"] += some.num_rows
            counts["payload_bytes"] += pc.sum(pc.binary_length(some["payload"])).as_py() or 0
        table = folder.archived(known)
        counts["dead_letters_left"] = known.num_rows - table.num_rows
        for start in range(0, table.num_rows, BATCH_ROWS):
            rows = failed_rows(table.slice(start, BATCH_ROWS))
            archive = removal_pb2.ArchiveRemoval(rows=rows, run=self.run)
            result = remove_entries(owners, table.slice(start, BATCH_ROWS), archive=archive)
            counts["dead_letters_archived"] += result.removed_count
            counts["dead_letters_gone"] += result.gone_count
            counts["dead_letters_refused"] += len(result.refused)
        return counts

    def can_be_known(self, dead_letters: pa.Table) -> pa.Table:
        """The dead letters whose message may be in the snapshots, or is gone with its ingest."""
        ids = dead_letters["message_id"].to_pylist()
        return dead_letters.filter(pa.array(map(self._can_be_known, ids), pa.bool_()))

    def _can_be_known(self, message_id: int) -> bool:
        shard = shard_of(message_id)
        return shard in self.removed or message_id <= self.last_ids.get(shard, 0)

    def _with_payloads(self, contents: Contents, dead_letters: pa.Table) -> Iterator[pa.Table]:
        """Tables as they are archived, each about the size of a part.

        Without the dead letters whose payloads are objects that cannot be read.
        """
        ids = dead_letters["message_id"].to_pylist()
        sizes = [size or 0 for size in dead_letters["payload_bytes"].to_pylist()]
        dead_letters = dead_letters.append_column("run", pa.repeat(self.run, dead_letters.num_rows))
        waiting: list[pa.Table] = []
        start = 0
        for read in contents.payloads(list(zip(ids, sizes, strict=True))):
            piece = dead_letters.slice(start, len(read))
            start += len(read)
            piece = piece.filter(pa.array([not isinstance(one, StorageError) for one in read]))
            payloads = [one for one in read if not isinstance(one, StorageError)]
            if unreadable := [one for one in read if isinstance(one, StorageError)]:
                queue = dead_letters["queue"][0].as_py()
                text = "%d dead letters of %s stay: their payloads cannot be read, such as %s"
                log.error(text, len(unreadable), queue, unreadable[0])
            piece = piece.append_column("payload", pa.array(payloads, pa.binary()))
            waiting.append(piece.select(DEAD_LETTERS.names).cast(DEAD_LETTERS))
            if sum(table.nbytes for table in waiting) >= PART_BYTES:
                yield pa.concat_tables(waiting)
                waiting = []
        if waiting:
            yield pa.concat_tables(waiting)


def _added(folder: DayFolder | None) -> Counter[str]:
    if folder is None:
        return Counter()
    return Counter(parts_written=len(folder.added)) + _damaged(folder)


def _damaged(folder: DayFolder) -> Counter[str]:
    paths = [path.removeprefix(f"{ARCHIVE_FOLDER}/") for path in folder.damaged]
    return Counter([f"{_DAMAGED}/{path}" for path in paths])


def count_damaged_once(counts: Counter[str]) -> Counter[str]:
    """How many parts are damaged, and the paths of the first ones, each once.

    Several tasks may have met the same one.
    """
    paths = sorted(name for name in counts if name.startswith(f"{_DAMAGED}/"))
    rest = {name: count for name, count in counts.items() if name not in paths}
    named = dict.fromkeys(paths[:NAMED], 1)
    return Counter({**rest, **named, **({_DAMAGED: len(paths)} if paths else {})})


@dataclass(frozen=True)
class DeadLetterRestore:
    """Pushes archived dead letters back: rows of ENTRY_KEYS, `day` and the columns of `archived`.

    The rows come in the order of `day` within each queue. `target` is the queue that gets them;
    empty: the one that they failed in. Raises NotFound where there is no such target.
    """

    root: str
    target: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts: Counter[str] = Counter()
        with owners_of(self.root) as owners:
            for table in grouped(batches, (*ENTRY_KEYS, "day"), SOUGHT):
                queue, day = table["queue"][0].as_py(), table["day"][0].as_py()
                folder = DayFolder(owners, owners.root.objects, queue, day)
                found = 0
                for rows in _in_requests(folder, table):
                    found += len(rows)
                    pushable = [row for row in rows if row is not None]
                    counts["dead_letters_without_payload"] += len(rows) - len(pushable)
                    if pushable:
                        counts += self._push(owners, table, pushable)
                counts.update(_damaged(folder))
                counts["dead_letters_missing"] += table.num_rows - found
        yield counts_batch(counts)

    def _push(
        self, owners: Owners, table: pa.Table, rows: list[archived_pb2.ArchivedRow]
    ) -> Counter[str]:
        queue, shard, revision = (table[name][0].as_py() for name in ENTRY_KEYS)
        request = archived_pb2.RedriveArchivedRequest(
            queue_id=queue, created_revision=revision, target_queue_id=self.target, rows=rows
        )
        try:
            response = owners.call(
                "broker",
                shard,
                lambda channel: archived_pb2_grpc.ArchivedServiceStub(channel).RedriveArchived,
                request,
                queue,
            )
        except (NotFound, FailedPrecondition, Unavailable) as error:
            if not is_gone(error, queue):
                raise  # Where it is the target, all others would stay, too.
            return Counter(dead_letters_gone=len(rows))
        return Counter(
            dead_letters_restored=response.redriven_count,
            dead_letters_gone=response.gone_count,
            dead_letters_refused=len(response.expired_rows),
        )


def _in_requests(
    folder: DayFolder, table: pa.Table
) -> Iterator[list[archived_pb2.ArchivedRow | None]]:
    """The rows that the parts of a day have, a request at a time; None for one without payload."""
    columns = ("message_id", "failed_at", "bucket_order", "run")
    wanted = {
        (row["message_id"], row["failed_at"]): row for row in table.select(columns).to_pylist()
    }
    rows = (
        _row(wanted[dead_letter["message_id"], dead_letter["failed_at"]], dead_letter)
        for found in folder.rows_of(table, ("payload", "headers"))
        for dead_letter in found.to_pylist()
    )
    return groups_of(rows, lambda row: row.ByteSize() if row else 0, RESTORE_BYTES, RESTORE_ROWS)


def _row(row: dict[str, Any], dead_letter: dict[str, Any]) -> archived_pb2.ArchivedRow | None:
    if dead_letter["payload"] is None or dead_letter["headers"] is None:
        return None
    return archived_pb2.ArchivedRow(
        message_id=row["message_id"],
        failed_at_ms=round(row["failed_at"].timestamp() * 1000),
        bucket_order=row["bucket_order"],
        run=row["run"],
        payload=dead_letter["payload"],
        headers=dict(dead_letter["headers"]),
    )
