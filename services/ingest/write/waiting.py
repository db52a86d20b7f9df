"""A publish or a push on its way to its commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.serving.limits import RETENTION_S_MAX
from libs.storage.database.slate import Batch
from services.ingest.batches import Accepted
from services.ingest.write.dedupe_keys import Duplicates
from services.ingest.write.line import Place
from services.ingest.write.pushing import Outboxes, Push
from services.ingest.write.request_ids import Answered
from slatemq.errors import FailedPrecondition, SlateMQError

_NOTHING: Final = Answered(0, 0)


@dataclass(slots=True, eq=False)
class Waiting:
    """A publish on its way, or a push.

    Attributes:
        accepted: What is to be stored.
        uris: The blobs of payloads, by offset.
        place: Of a publish that keeps an order: it waits for its turn, and for room.
        push: Which rows of an outbox these are; None for a publish.
        over_count: How many rows of a push are left out since their deadline is over.
        last_number: How far the outbox was stored when the rows of a push were looked at.
        duplicates: For a publish with dedupe keys.
        began_ms: When the first of the blobs was begun.
        first_id: The first of the messages' IDs, once they are taken.
        answered: What it gets once its commit is durable.
        refusal: Or this.
        was_drained: Whether a commit has begun with it: where one fails, it may be why.
    """

    accepted: Accepted
    uris: dict[int, str] = field(default_factory=dict)
    push: Push | None = None
    place: Place | None = None
    over_count: int = 0
    last_number: int = 0
    duplicates: Duplicates | None = None
    began_ms: int = 0
    first_id: int = 0
    answered: Answered = _NOTHING
    refusal: SlateMQError | None = None
    was_drained: bool = False

    def skip(self, count: int) -> None:
        if self.push is not None and count > 0:
            self._keep(range(count, len(self.accepted.payloads)))
            shard, first, _ = self.push
            self.push = Push(shard, first + count)

    def is_next(self, outboxes: Outboxes, batch: Batch, now_ms: int) -> bool:
        """Whether anything of a push is to be stored now: leaves out what is not, sets a refusal.

        Rows whose deadline is over, or that were set aside, count as stored; nothing is stored.
        """
        assert self.push is not None
        try:
            stored_count = outboxes.stored_count(self.push)
        except FailedPrecondition as gap:
            self.refusal = gap
            return False
        self.skip(stored_count)
        self.last_number = outboxes.last_number(self.push.broker_shard)
        if not self.accepted.payloads and stored_count >= 0:
            return False
        self._settle_deadlines(now_ms)
        if not self.accepted.payloads:
            self.note_stored(outboxes, batch)
        return bool(self.accepted.payloads)

    def note_stored(self, outboxes: Outboxes, batch: Batch) -> None:
        """Add to the batch of a push's messages that they are stored."""
        if self.push is not None:
            outboxes.put(batch, self.push, len(self.accepted.payloads) + self.over_count)
            self.last_number = outboxes.last_number(self.push.broker_shard)

    def _settle_deadlines(self, now_ms: int) -> None:
        """Turn the deadlines of pushed rows into retentions; drop rows whose deadline is over."""
        columns = self.accepted.columns
        over: set[int] = set()
        for at, deadline_ms in columns.deadline_ms.items():
            left_s = min((deadline_ms - now_ms) // 1000, RETENTION_S_MAX)
            columns.retention_s[at] = left_s
            if left_s <= 0:  # 0 would be for ever
                over.add(at)
        if over:
            places = range(len(self.accepted.payloads))
            self._keep([at for at in places if at not in over])
            self.over_count = len(over)

    def leave_out(self, duplicates: Duplicates, now_ms: int) -> None:
        """Drop the messages of a publish that are stored already."""
        duplicates.look(now_ms)
        if duplicates.found:
            places = range(len(self.accepted.payloads))
            self._keep([at for at in places if at not in duplicates.found])

    def _keep(self, places: Sequence[int]) -> None:
        self.accepted = self.accepted.only(places)
        self.uris = {to: self.uris[at] for to, at in enumerate(places) if at in self.uris}

    def answer(self, now_ms: int) -> Answered:
        """Resolve it with IDs in a row from the first one on, except for duplicates."""
        count = len(self.accepted.payloads)
        if self.duplicates is None:
            self.answered = Answered(self.first_id, count, received_at_ms=now_ms)
        else:
            found = self.duplicates.in_order()
            receipt = now_ms if count else 0
            self.answered = Answered(self.first_id, count + len(found), found, receipt)
        return self.answered
