"""Doing with archived dead letters what an edited export of them asks for.

A dead letter comes back with the content in the file, in the commit that removes it from the
broker's list of archived ones: any later request for it finds it gone. The broker does not remember
it, so the file says what was sent, and what was done: what was sent before the command was killed,
and is gone now, was done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from slatemq._admin.entry_models import Entry, EntryState, EntryView
from slatemq._admin.settling import ArchivedDeadLetter, ArchivedOutcome, DropDeadLetter
from slatemq.cli.files.queue_files import SETTLED, SETTLED_NO, SETTLED_SENT, SETTLED_YES
from slatemq.cli.output import note
from slatemq.cli.repair.dead_letter_plans import PlannedSettlement
from slatemq.cli.repair.dead_letter_settling import DeadLetterSettler
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound
from slatemq.textqueue import TextQueue, TextQueueError

GONE = "it is no longer archived: it was brought back, dropped or purged, by this edit or another"

PROBLEMS = {
    ArchivedOutcome.DONE: None,
    ArchivedOutcome.GONE: GONE,
    ArchivedOutcome.EXPIRED: "it is past its retention: it would not be delivered",
}

_PLACE = re.compile(r"(?:rows|dead_letters)\[(\d+)\]")


class ArchiveSettler(DeadLetterSettler):
    """Settles archived dead letters of one queue: brings them back, or drops them."""

    _is_marking = True

    async def decide(self, step: PlannedSettlement) -> PlannedSettlement:
        """What to do; asks the broker whether the dead letter is still archived."""
        if step.problem:
            return step
        if step.settlement is None:
            return replace(
                step, problem="archived dead letters take no notes" if step.notes else ""
            )
        now = await self._now(step.content.handle)
        if now is GONE and step.content.settled in (SETTLED_SENT, SETTLED_YES):
            return replace(step, is_done=True)
        return replace(step, problem=now) if isinstance(now, str) else replace(step, now=now)

    async def with_message(self, step: PlannedSettlement) -> PlannedSettlement:
        """The step with the archived content, to compare an edited one with."""
        now = step.now
        if now is None or not step.content.is_edited:
            return step
        found = [
            one async for one in self._client.read_archived(now.queue_id, handles=[now.handle])
        ]
        return replace(step, now=found[0]) if found else step

    async def _now(self, handle: str) -> Entry | str:
        """The archived entry, or why there is none."""
        try:
            now = await self._client.get_entry(handle, view=EntryView.BASIC)
        except InvalidArgument as error:
            return f"its handle is damaged: {error.description}"
        except (NotFound, FailedPrecondition):
            return GONE
        if now.state is EntryState.ARCHIVED and now.archived is not None:
            return now
        if now.state is EntryState.FAILED:
            return "it is a dead letter that is not archived: edit it without --archived"
        return GONE

    def _report(self, step: PlannedSettlement, problem: str | None) -> None:
        if step.settlement is not None:  # else it may not be ours, without the variable
            self._note(step, SETTLED_NO if problem else SETTLED_YES)
        super()._report(step, problem)

    def _note(self, step: PlannedSettlement, settled: str) -> None:
        if not self._is_marking:
            return
        try:
            _mark(step, settled)
        except (TextQueueError, OSError) as error:
            self._is_marking = False
            note(f"what was done cannot be noted in {step.file}: {error}")

    def _sends_content(self, step: PlannedSettlement) -> bool:
        return not isinstance(step.settlement, DropDeadLetter)

    async def _settle(self, batch: list[PlannedSettlement]) -> None:
        """Settle a batch in its order; what cannot be done is reported, and left out."""
        for dropped, some in groupby(batch, lambda one: isinstance(one.settlement, DropDeadLetter)):
            if dropped:
                await self._drop(list(some))
            else:
                await self._bring_back(list(some))

    async def _drop(self, batch: Sequence[PlannedSettlement]) -> None:
        entries = [one.now for one in batch if one.now is not None]
        self._sent(batch)
        self._answered(batch, await self._client.drop_archived(entries))

    def _sent(self, batch: Sequence[PlannedSettlement]) -> None:
        for step in batch:
            self._note(step, SETTLED_SENT)

    def _answered(
        self, batch: Sequence[PlannedSettlement], outcomes: Sequence[ArchivedOutcome]
    ) -> None:
        for step, outcome in zip(batch, outcomes, strict=True):
            was_sent = step.content.settled == SETTLED_SENT
            # An earlier run had sent it, and it was done just after this one looked.
            is_ours = outcome is ArchivedOutcome.GONE and was_sent
            self._report(step, "" if is_ours else PROBLEMS[outcome])

    async def _bring_back(self, batch: list[PlannedSettlement]) -> None:
        while batch:
            dead_letters = [
                ArchivedDeadLetter(one.now, one.content.payload, one.content.headers)
                for one in batch
                if one.now is not None
            ]
            self._sent(batch)
            try:
                outcomes = await self._client.redrive_archived(dead_letters)
            except InvalidArgument as error:
                place = _PLACE.match(error.field)
                if place is None or int(place[1]) >= len(batch):
                    raise
                self._report(batch.pop(int(place[1])), error.message)
                continue
            self._answered(batch, outcomes)
            return


def _mark(step: PlannedSettlement, settled: str) -> None:
    """Note it under the dead letter, unless that was done. Raises TextQueueError, OSError."""
    queue = TextQueue(step.file)
    entry = queue.entry(step.offset)
    before = entry.get(SETTLED)
    is_open = before in (SETTLED_NO, SETTLED_SENT)
    if is_open and before != settled and entry.get("handle") == step.content.handle:
        queue.set_variable(entry, SETTLED, settled)
