"""A publish or a push on its way to its commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.ingest.batches import Accepted
from services.ingest.duplicates import Duplicates
from services.ingest.pushing import Push
from services.ingest.request_ids import Answered
from slatemq.errors import SlateMQError

__all__ = ["Waiting"]

_NOTHING: Final = Answered(0, 0)


@dataclass(slots=True, eq=False)
class Waiting:
    """A publish on its way, or a push.

    Attributes:
        accepted: What is to be stored.
        uris: The blobs of payloads, by offset.
        push: Which rows of an outbox these are; None for a publish.
        last_number: How far the outbox was stored when the rows of a push were looked at.
        duplicates: For a publish with dedupe keys.
        began_ms: When the first of the blobs was begun.
        first_id: The first of the messages' IDs, once they are taken.
        answered: What it gets once its commit is durable.
        refusal: Or this.
    """

    accepted: Accepted
    uris: dict[int, str] = field(default_factory=dict)
    push: Push | None = None
    last_number: int = 0
    duplicates: Duplicates | None = None
    began_ms: int = 0
    first_id: int = 0
    answered: Answered = _NOTHING
    refusal: SlateMQError | None = None

    def pass_over(self, count: int) -> None:
        """Leave out the first rows of a push."""
        if self.push is not None and count > 0:
            self._keep(range(count, len(self.accepted.payloads)))
            shard, first = self.push
            self.push = Push(shard, first + count)

    def leave_out(self, duplicates: Duplicates, now_ms: int) -> None:
        """Leave out the messages of a publish that are stored already."""
        duplicates.look(now_ms)
        if duplicates.found:
            places = range(len(self.accepted.payloads))
            self._keep([at for at in places if at not in duplicates.found])

    def _keep(self, places: Sequence[int]) -> None:
        self.accepted = self.accepted.only(places)
        self.uris = {to: self.uris[at] for to, at in enumerate(places) if at in self.uris}

    def answer(self, now_ms: int) -> Answered:
        """Settle what it gets: IDs in a row from the first one on, but for duplicates."""
        count = len(self.accepted.payloads)
        if self.duplicates is None:
            self.answered = Answered(self.first_id, count, received_at_ms=now_ms)
        else:
            found = self.duplicates.in_order()
            receipt = now_ms if count else 0
            self.answered = Answered(self.first_id, count + len(found), found, receipt)
        return self.answered
