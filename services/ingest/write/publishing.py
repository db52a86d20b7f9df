"""Publishing: from what was accepted to what is durable.

IDs, log sequences and the time of receipt are taken in `drain`, inside the commit loop: a publish
whose blobs take long enters a later commit, and the log's order is the order of the commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from libs.storage.database.blobs import Blobs
from libs.storage.database.clocks import Clock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.pace import Pace
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import SequenceExhausted, StorageError, encoding
from libs.storage.layout.ids import IdAllocator, encode_seq_block, message_id
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.layout.own_keys import ID_BLOCK_KEY, RequestIdsKey
from libs.storage.layout.primitives import RowChange
from libs.storage.records.metadata import encode_log_columns
from libs.storage.records.payload_packs import payload_rows
from libs.storage.records.payloads import encode_uri
from services.ingest.batches import NOT_SET, Accepted, Columns, fingerprint_of
from services.ingest.read.payload_cache import CachedRun, PayloadCache
from services.ingest.read.tailing import MetadataLog, Recent
from services.ingest.write.dedupe_keys import DedupeKeys, Duplicates
from services.ingest.write.id_gaps import IdGaps
from services.ingest.write.line import Place
from services.ingest.write.pushing import Outboxes, Push
from services.ingest.write.request_ids import Answered, RequestIds
from services.ingest.write.uploads import Uploads, are_old
from services.ingest.write.waiting import Waiting
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)


def message_rows(
    first_id: int,
    columns: Columns,
    payloads: Sequence[bytes | None],
    now_ms: int,
    entries: list[Recent],
) -> Iterator[RowChange]:
    """Encodes the rows of messages with IDs in a row; adds each entry to `entries` on the way.

    None stands for a payload that has a row already.
    """
    for offset, part in columns.entries():
        created = part.created_at_ms
        if NOT_SET in created:
            part.created_at_ms = [now_ms if at == NOT_SET else at for at in created]
        sequence = first_id + offset
        with encoding(f"log entry {sequence}"):
            encoded = encode_log_columns(
                sequence,
                now_ms,
                part.created_at_ms,
                part.retention_s,
                part.header_bytes,
                part.payload_bytes,
                part.visible_at_ms,
                part.delay_ms,
                part.direct_queue_id,
            )
        entries.append(Recent(sequence, sequence + len(part) - 1, encoded))
        yield log_key(sequence), encoded
        with encoding(f"payloads from message {sequence} on"):
            yield from payload_rows(sequence, payloads[offset : offset + len(part)])


SHARD_DRAINING: Final = "SHARD_DRAINING"

_RETRY_MS: Final = 200

STEP_BYTES: Final = 32 << 10
"""Messages of more bytes are encoded while their commit is written, in steps."""

TOGETHER_BYTES: Final = 256 << 10
"""The publishes of a commit up to this size are kept in memory as one run: a run costs each read as
much as some dozen of its messages."""

STEP_PUBLISHES: Final = 16
"""Publishes put into a commit in one step of the event loop; others come in between."""


@dataclass(frozen=True)
class PublisherLimits:
    uncommitted_bytes: int
    blob_uploads: int


@dataclass(slots=True)
class _Commit:
    """What a commit gets, and what to apply once it is durable."""

    columns: Columns = field(default_factory=Columns)
    inline: list[bytes | None] = field(default_factory=list)
    request_rows: list[RequestIdsKey] = field(default_factory=list)
    received_at_ms: int = 0
    entries: list[Recent] = field(default_factory=list)
    payloads: list[tuple[int, Accepted]] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    answers: list[tuple[str, Answered]] = field(default_factory=list)
    dedupe_keys: list[tuple[str, int]] = field(default_factory=list)
    size_bytes: int = 0

    def cached_runs(self) -> Iterator[tuple[CachedRun, int]]:
        """Its messages for the cache, with the bytes of each run."""
        if len(self.columns):
            payloads = [one for _, accepted in self.payloads for one in accepted.payloads]
            first_id = self.payloads[0][0]
            yield CachedRun(first_id, self.received_at_ms, payloads, self.columns), self.size_bytes
            return
        for first_id, accepted in self.payloads:
            run = CachedRun(first_id, self.received_at_ms, accepted.payloads, accepted.columns)
            yield run, accepted.size_bytes


class Publisher:
    """Stores publishes: the source of the shard's commit loop, `commits`.

    Attributes:
        is_draining: Whether publishes are refused, from the next commit on. Pushes are stored.
        is_leaving: Whether pushes are refused, too, since the shard is being removed.
    """

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        clock: Clock,
        shard: int,
        ids: IdAllocator,
        gaps: IdGaps,
        requests: RequestIds,
        dedupe_keys: DedupeKeys,
        outboxes: Outboxes,
        log: MetadataLog,
        cache: PayloadCache,
        limits: PublisherLimits,
        pace: Pace,
    ) -> None:
        self.is_draining = self.is_leaving = False
        self.commits = GroupCommit(database, clock, self, pace)
        self.commits.on_durable(self._durable)
        self._blobs = blobs
        self._clock = clock
        self._shard = shard
        self._ids = ids
        self._gaps = gaps
        self.requests = requests
        self._dedupe_keys = dedupe_keys
        self._outboxes = outboxes
        self._log = log
        self._cache = cache
        self._bytes_max = limits.uncommitted_bytes
        self._uploads = Uploads(blobs, clock, limits.blob_uploads)
        self._waiting: list[Waiting] = []
        self._records: list[RowChange] = []
        self._then: list[Callable[[], None]] = []
        self._in_flight: dict[int, _Commit] = {}

    def publish(
        self, accepted: Accepted, complete: Callable[[Columns], None] | None = None
    ) -> Coroutine[Any, Any, Answered]:
        """Store a batch, but for messages whose dedupe keys are taken; durable on return.

        `complete` may add headers that are not part of the content which a repeat must match.

        A repeated request ID gets the first answer. Raises ResourceExhausted, Unavailable, the
        errors of the store, InvalidArgument for a request ID used with other content, and
        FailedPrecondition (SHARD_DRAINING) for what is not stored yet while the shard drains.
        """
        return self.publish_waiting(Waiting(accepted), complete)

    async def publish_waiting(
        self, waiting: Waiting, complete: Callable[[Columns], None] | None = None
    ) -> Answered:
        """Publish what does more when it gets its IDs, or has a place in a line.

        One with a place waits for room, where others get ResourceExhausted. When it raises before
        it was handed over, it still has the place.
        """
        accepted = waiting.accepted
        known = await self._begin(accepted, waiting.place)
        if known is not None:
            return known
        if not accepted.dedupe_keys:
            if self.is_draining:
                # `drain` would refuse it, too, once its large payloads are uploaded.
                self.requests.forget(accepted.request_id)
                raise self._draining()
            return await self._store(waiting, complete)
        duplicates = Duplicates(self._dedupe_keys, accepted.dedupe_keys)
        try:
            self._admit(waiting)
            with self._uploads.counting(accepted.size_bytes):
                await duplicates.hold()
        except BaseException:
            self.requests.forget(accepted.request_id)
            raise
        # Decided now, so that nothing that is stored already is uploaded.
        duplicates.look(self._clock.now_ms())
        waiting.duplicates = duplicates
        return await self._store(waiting, complete)

    def enqueue(self, waiting: Waiting) -> bool:
        """Store a plain batch (`Accepted.is_plain`) with the commit that gathers now.

        It is stored when `commits.newest()` is done, and has its answer or a refusal then. False,
        and nothing done, where the request ID may be known: `publish` finds out. Raises
        ResourceExhausted, and the error of a failed commit.
        """
        self.commits.newest()
        accepted = waiting.accepted
        self.admit(accepted.size_bytes)
        request_id = accepted.request_id
        if request_id and not self.requests.begin_new(request_id, accepted.fingerprint()):
            return False
        self._enqueue(waiting)
        return True

    def give_up(self, waiting: Waiting) -> None:
        """The commit of an enqueued publish failed: it may or may not be stored."""
        self.requests.forget(waiting.accepted.request_id)

    def _enqueue(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)
        self.commits.mark_dirty(waiting.accepted.size_bytes)

    async def repeated(self, accepted: Accepted) -> Answered | None:
        """The first answer, where the request ID is known. Stores nothing; raises as `publish`."""
        known = await self._begin(accepted)
        if known is None:
            self.requests.forget(accepted.request_id)
        return known

    async def _begin(self, accepted: Accepted, place: Place | None = None) -> Answered | None:
        if not accepted.request_id:
            return None
        fingerprint = await fingerprint_of(accepted)
        aside = nullcontext if place is None else place.aside
        known = await self.requests.begin(accepted.request_id, fingerprint, aside)
        return None if known is None else await self._with_receipt(known)

    async def _with_receipt(self, known: Answered) -> Answered:
        """Add the time of receipt to an answer of an earlier process."""
        if known.received_at_ms or len(known.duplicates) == known.message_count:
            return known
        received_at_ms = await self._log.received_at_ms(known.first_message_id)
        return known._replace(received_at_ms=received_at_ms)

    async def _store(
        self, waiting: Waiting, complete: Callable[[Columns], None] | None
    ) -> Answered:
        accepted = waiting.accepted
        try:
            self._admit(waiting)
            if complete is not None:
                complete(accepted.columns)
            if waiting.uris:
                await self._uploads.renew(waiting)
            if accepted.large:
                await self._uploads.all_of(waiting)
            if waiting.place is not None:
                await self._wait_for_turn(waiting, waiting.place)
        except BaseException:
            # Not handed over yet: the request ID is free for the next try.
            self.requests.forget(accepted.request_id)
            if waiting.duplicates is not None:
                waiting.duplicates.release()
            raise
        try:
            self.commits.newest()  # raises where there is no further commit
            self._enqueue(waiting)
            if waiting.place is not None:
                waiting.place.leave()
            await self.commits.durable()
        except StorageError:
            self.requests.forget(accepted.request_id)
            raise
        if waiting.refusal is not None:
            raise waiting.refusal
        return waiting.answered

    async def push(self, push: Push, accepted: Accepted, uris: dict[int, str]) -> int:
        """Store the rows that are not stored yet; returns the last number stored.

        `uris` are the payloads, by offset, that are stored as objects already. Durable on return.
        Raises as `publish` does, and FailedPrecondition for rows behind a gap.
        """
        for at, uri in uris.items():
            if not self._blobs.owns(uri):
                raise InvalidArgument(f"messages[{at}].payload_uri", "is not the URI of a payload")
        waiting = Waiting(accepted, uris, push)
        # For now: `drain` looks again. What is stored is not to be uploaded once more.
        last = self._outboxes.last_number(push.broker_shard)
        waiting.skip(last + 1 - push.first_number)
        if waiting.accepted.payloads or last < push.first_number - 1:
            await self._store(waiting, None)
            return waiting.last_number
        await self.commits.durable()
        return last

    def admit(self, size_bytes: int) -> None:
        """Raise ResourceExhausted above the bound; a batch larger than the bound may go alone."""
        on_their_way = self.commits.uncommitted_bytes + self._uploads.size_bytes
        if self._is_too_much(on_their_way, size_bytes):
            raise ResourceExhausted(
                "too much waits to be stored", reason="UNCOMMITTED_BYTES", retry_after_ms=_RETRY_MS
            )

    def _is_too_much(self, on_their_way: int, size_bytes: int) -> bool:
        return on_their_way > 0 and on_their_way + size_bytes > self._bytes_max

    def _admit(self, waiting: Waiting) -> None:
        if waiting.place is None:
            self.admit(waiting.accepted.size_bytes)

    async def _wait_for_turn(self, waiting: Waiting, place: Place) -> None:
        """Wait until a publish is the next one of its line, and there is room for it."""
        await place.turn()
        size_bytes = waiting.accepted.size_bytes
        while self._is_too_much(self.commits.uncommitted_bytes, size_bytes):
            await self.commits.durable()
        if are_old(waiting, self._clock.now_ms()):
            raise self._late()

    def put(
        self,
        records: Sequence[RowChange],
        then: Callable[[], None] | None = None,
        failed: Callable[[StorageError], None] | None = None,
    ) -> None:
        """Write records of others with the next commit, or the one drained now; None deletes.

        Calls `then` when it is durable, or `failed`. Raises the error of a commit
        that has failed before.
        """
        size_bytes = sum(len(value) for _, value in records if value is not None)
        self.commits.mark_dirty(size_bytes, failed)
        self._records += records
        if then is not None:
            self._then.append(then)

    async def upload(self, payload: bytes) -> str:
        """Store a payload as an object. Returns its URI; raises ResourceExhausted."""
        self.admit(len(payload))
        return await self._uploads.one(payload)

    # --- Commits --------------------------------------------------------------

    async def drain(self, batch: Batch) -> None:
        """Put everything that waits; a part of libs.storage.database.commits.Source."""
        now_ms = self._clock.now_ms()
        commit: _Commit = _Commit(received_at_ms=now_ms)
        # What comes meanwhile goes into the last step, however much: so there is a last one.
        in_steps_count = len(self._waiting) - STEP_PUBLISHES
        for at, publish in enumerate(self._waiting):
            self._drain(batch, commit, publish)
            if at < in_steps_count and at % STEP_PUBLISHES == STEP_PUBLISHES - 1:
                await asyncio.sleep(0)
        self._waiting = []
        if commit.payloads:
            self._put_messages(batch, commit)
        batch.put_all(self._records)
        self._records.clear()
        commit.then, self._then = self._then, []
        commit.request_rows = self.requests.put(batch, commit.answers, now_ms)
        self._dedupe_keys.put(batch, commit.dedupe_keys, now_ms)
        if len(batch):
            self._in_flight[batch.commit] = commit

    def _drain(self, batch: Batch, commit: _Commit, publish: Waiting) -> None:
        now_ms = commit.received_at_ms
        publish.was_drained = True
        if self.is_leaving and publish.push is not None:
            why = f"ingest shard {self._shard} is being removed"
            self._refuse(publish, Unavailable(why, reason="SHARD_LEAVING"))
            return
        if publish.push is not None and not publish.is_next(self._outboxes, batch, now_ms):
            return
        if publish.duplicates is not None:
            publish.leave_out(publish.duplicates, now_ms)
            if not publish.accepted.payloads:
                self._answer(commit, publish, now_ms)
                return
        self._take_ids_of(batch, publish, now_ms)
        if publish.refusal is None:
            commit.inline += self._put_uris(batch, publish)
            publish.note_stored(self._outboxes, batch)
            commit.columns.extend(publish.accepted.columns)
            commit.payloads.append((publish.first_id, publish.accepted))
            self._answer(commit, publish, now_ms)
        elif publish.duplicates is not None:
            publish.duplicates.release()

    def _answer(self, commit: _Commit, publish: Waiting, now_ms: int) -> None:
        """Settle the answer of a publish that has its IDs or needs none, and its request ID."""
        if publish.duplicates is not None:
            commit.dedupe_keys += publish.duplicates.take(publish.first_id, now_ms)
            publish.duplicates.release()
        answered = publish.answer(now_ms)
        if publish.accepted.request_id:
            commit.answers.append((publish.accepted.request_id, answered))

    def _take_ids_of(self, batch: Batch, publish: Waiting, now_ms: int) -> None:
        if self.is_draining and publish.push is None:
            self._refuse(publish, self._draining())
        elif are_old(publish, now_ms):
            self._refuse(publish, self._late())
        else:
            self._take_ids(batch, publish, len(publish.accepted.payloads))

    def _put_uris(self, batch: Batch, publish: Waiting) -> Sequence[bytes | None]:
        """Put the URIs of payloads that are objects. Returns the others, None for these."""
        payloads, uris = publish.accepted.payloads, publish.uris
        if not uris:
            return payloads
        others: list[bytes | None] = list(payloads)
        for at in range(len(payloads)):
            if at in uris:
                one_id = publish.first_id + at
                with encoding(f"payload of message {one_id}"):
                    batch.put(payload_key(one_id), encode_uri(uris[at]))
                others[at] = None
        return others

    def _take_ids(self, batch: Batch, publish: Waiting, count: int) -> None:
        """Give a publish `count` IDs in a row, or set its refusal."""
        try:
            sequence, block = self._ids.allocate(count)
        except SequenceExhausted as error:
            full = ResourceExhausted(
                f"this shard is full: {error}", reason="SHARD_FULL", retry_after_ms=None
            )
            return self._refuse(publish, full)
        if block is not None:
            batch.put(ID_BLOCK_KEY, encode_seq_block(block))
        publish.first_id = message_id(self._shard, sequence)
        return None

    def _draining(self) -> FailedPrecondition:
        return FailedPrecondition(
            SHARD_DRAINING,
            f"ingest shard {self._shard} takes no publishes: it is being drained. Publish to "
            "another shard, or end the drain with `slatemq shard drain --ingest --cancel`",
            subject=f"ingest/{self._shard}",
        )

    def _late(self) -> Unavailable:
        return Unavailable("the upload took over an hour, retry")

    def _refuse(self, publish: Waiting, error: SlateMQError) -> None:
        publish.refusal = error
        self.requests.forget(publish.accepted.request_id)

    def _put_messages(self, batch: Batch, commit: _Commit) -> None:
        first_id, columns, inline = commit.payloads[0][0], commit.columns, commit.inline
        commit.size_bytes = sum([accepted.size_bytes for _, accepted in commit.payloads])
        self._gaps.put(batch, first_id)
        rows = message_rows(first_id, columns, inline, commit.received_at_ms, commit.entries)
        commit.inline = []
        if commit.size_bytes > TOGETHER_BYTES:
            commit.columns = Columns()
        if commit.size_bytes > STEP_BYTES:
            batch.put_later(rows, commit.size_bytes)
        else:
            batch.put_all(list(rows))

    def _durable(self, number: int) -> None:
        commit = self._in_flight.pop(number)
        for run, size_bytes in commit.cached_runs():
            self._cache.add(run, size_bytes)
        for first_id, accepted in commit.payloads:
            if accepted.elsewhere:
                self._cache.forget(first_id + at for at in accepted.elsewhere)
        if commit.entries:
            self._log.append(commit.entries)
        self.requests.settle(commit.request_rows, commit.answers)
        self._dedupe_keys.settle(commit.dedupe_keys)
        for then in commit.then:
            then()

    async def clean_up(self) -> None:
        """Do a little deferred work; to be called several times a second."""
        self.requests.clean_up(self._clock.now_ms())
        if self.requests.has_expired:
            self.commits.mark_dirty()
        if await self._dedupe_keys.find_ended(self._clock.now_ms()):
            self.commits.mark_dirty()
