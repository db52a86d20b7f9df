"""Showing what an edited export of dead letters asks for, and doing it."""

from __future__ import annotations

import asyncio
import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slatemq._admin.entry_models import Entry, EntryState, EntryView
from slatemq._admin.settling import (
    DropDeadLetter,
    RedriveDeadLetter,
    ReplaceDeadLetter,
)
from slatemq._counts import counted
from slatemq.cli.entry_output import one_line, opened
from slatemq.cli.files.queue_files import encryption_problem, notes_of
from slatemq.cli.output import note, write_json
from slatemq.cli.parameters import format_time
from slatemq.cli.repair.dead_letter_plans import PlannedSettlement, with_note
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, SlateMQError

if TYPE_CHECKING:
    from slatemq.client import Client
    from slatemq.encryption import KeyRing

SHOWN_MAX = 200
"""Dead letters shown one by one before the question; all others are counted."""

DIFF_LINES_MAX = 40

BATCH_SETTLEMENTS = 500
BATCH_BYTES = 8 << 20

LOOKS_AT_ONCE = 32

REMEMBERED_MAX = 100_000
"""Dead letters of a file that are remembered, in some 15 MB, to notice repetitions; those of
others the broker notices."""

_TWICE = "it is in the file more than once"


class DeadLetterSettler:
    """Settles dead letters of one queue.

    Attributes:
        counts: By action; also those done already, and those that conflict.
    """

    def __init__(
        self,
        client: Client,
        consumer_id: str,
        *,
        as_json: bool = False,
        ring: KeyRing | None = None,
    ) -> None:
        """`consumer_id` goes into the records of what is dropped or replaced.

        `ring`: the keys that the client encrypts payloads with.
        """
        self.counts: Counter[str] = Counter()
        self._client = client
        self._consumer_id = consumer_id
        self._as_json = as_json
        self._ring = ring
        self._asked: dict[str, int] = {}

    # --- Looking ------------------------------------------------------------

    async def decide_once(self, step: PlannedSettlement) -> PlannedSettlement:
        """Like `decide`; a conflict is also one that had a step in the file, or may not be sent."""
        if step.settlement is None or step.problem:
            return await self.decide(step)
        if self._sends_content(step):
            problem = encryption_problem(step.content, self._ring)
            if problem:
                return replace(step, problem=problem)
        line = self._asked.get(step.content.handle)
        if line is not None:
            return replace(step, problem=f"{_TWICE}: line {line} counts")
        if len(self._asked) < REMEMBERED_MAX:
            self._asked[step.content.handle] = step.line
        return await self.decide(step)

    async def decide(self, step: PlannedSettlement) -> PlannedSettlement:
        """What to do; asks the broker where the dead letter was edited, or has notes."""
        asks = isinstance(step.settlement, ReplaceDeadLetter) or step.notes
        if step.problem or not asks or not step.content.handle:
            return step
        now = await self._look(step, EntryView.FULL)
        if isinstance(now, str):
            if step.settlement is None:
                return step  # without a dead letter, its notes have no place
            return replace(step, problem=now, is_done=not now)
        # Comments that were noted together are one note of its history.
        known = [f"\n{one}\n" for one in notes_of(now)]
        fresh = "\n".join(
            one for one in step.notes if not any(f"\n{one}\n" in note for note in known)
        )
        settlement = with_note(step.settlement, step.content, fresh)
        if isinstance(settlement, ReplaceDeadLetter) and now.etag != step.content.etag:
            why = "the message was edited meanwhile: export it again"
            return replace(step, settlement=settlement, now=now, problem=why)
        return replace(step, settlement=settlement, now=now)

    async def with_message(self, step: PlannedSettlement) -> PlannedSettlement:
        return step

    async def _look(self, step: PlannedSettlement, view: EntryView) -> Entry | str:
        """The dead letter as it is now, or what has become of it."""
        handle = step.content.handle
        try:
            now = await self._client.get_entry(handle, view=view)
        except InvalidArgument as error:
            return f"its handle is damaged: {error.description}"
        except NotFound:
            return "it is no longer in the queue"
        except FailedPrecondition:
            return "it is no longer a dead letter"
        if now.state is EntryState.FAILED and now.handle == handle:
            return now
        return self._became(now, step)

    def _became(self, now: Entry, step: PlannedSettlement) -> str:
        """What has become of a dead letter; empty when that is what was wanted."""
        when = format_time(now.finished_at_ms)
        if now.state is EntryState.FAILED:
            return f"it was redriven meanwhile, and failed again at {when}"
        if now.state is EntryState.DONE:
            finishing = isinstance(step.settlement, DropDeadLetter | ReplaceDeadLetter)
            if finishing and now.consumer_id == self._consumer_id:
                return ""
            return f"it was done meanwhile, by {now.consumer_id or 'a redrive'} at {when}"
        if now.state is EntryState.ARCHIVED:
            return "it was archived meanwhile: edit it with `slatemq failed edit --archived`"
        if isinstance(step.settlement, RedriveDeadLetter):
            return ""
        return f"it was redriven meanwhile, and is {now.state.value.replace('_', ' ')}"

    # --- Doing --------------------------------------------------------------

    async def settle_all(self, steps: Iterable[PlannedSettlement]) -> None:
        """Do what the file asks for, a batch in a commit. Raises SlateMQError."""
        batch: list[PlannedSettlement] = []
        size = 0
        for asked in steps:
            step = await self.decide_once(asked)
            if step.is_done or step.problem:
                self._report(step, step.problem)
                continue
            if step.settlement is None:
                continue
            taken = self._size(step)
            if batch and (len(batch) >= BATCH_SETTLEMENTS or size + taken > BATCH_BYTES):
                await self._settle(batch)
                batch, size = [], 0
            batch.append(step)
            size += taken
        await self._settle(batch)

    def _sends_content(self, step: PlannedSettlement) -> bool:
        """Whether payload and headers are those of the file."""
        return isinstance(step.settlement, ReplaceDeadLetter)

    def _size(self, step: PlannedSettlement) -> int:
        """Bytes of payload that are sent with it."""
        return len(step.content.payload) if self._sends_content(step) else 0

    async def _settle(self, batch: list[PlannedSettlement]) -> None:
        """Settle a batch; what cannot be done is reported, and left out."""
        while batch:
            settlements = [one.settlement for one in batch if one.settlement is not None]
            try:
                await self._client.settle_dead_letters(settlements, consumer_id=self._consumer_id)
            except (NotFound, FailedPrecondition, InvalidArgument) as error:
                place = error.metadata.get("settlement", "")
                if not place.isdigit() or int(place) >= len(batch):
                    raise
                refused = batch.pop(int(place))
                await self._refused(refused, error)
                if error.reason == "ENTRY_UNKNOWN":
                    batch = await self._still_there(batch)
                continue
            for step in batch:
                self._report(step, None)
            return

    async def _refused(self, step: PlannedSettlement, error: SlateMQError) -> None:
        if error.reason != "ENTRY_UNKNOWN":
            # Without the field, which is one of the RPC.
            description = error.description if isinstance(error, InvalidArgument) else error.message
            self._report(step, description)
            return
        now = await self._look(step, EntryView.BASIC)
        twice = f"{_TWICE}: the first one counts"
        self._report(step, now if isinstance(now, str) else twice)

    async def _still_there(self, batch: Sequence[PlannedSettlement]) -> list[PlannedSettlement]:
        """The steps whose dead letters are still as exported; reports the others."""
        looks = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def look(step: PlannedSettlement) -> Entry | str:
            async with looks:
                return await self._look(step, EntryView.BASIC)

        left: list[PlannedSettlement] = []
        for step, now in zip(batch, await asyncio.gather(*map(look, batch)), strict=True):
            if isinstance(now, str):
                self._report(step, now)
            else:
                left.append(step)
        return left

    def _report(self, step: PlannedSettlement, problem: str | None) -> None:
        """Count and print an outcome: done (None), done already (empty), or a conflict."""
        kind = step.action if problem is None else "conflict" if problem else "already"
        self.counts[kind] += 1
        if self._as_json:
            fields = {
                "message_id": str(step.content.message_id),
                "handle": step.content.handle,
                "line": step.line,
                "action": step.action,
                "ok": not problem,
                "already": problem == "",
            }
            write_json(fields | ({"error": problem} if problem else {}))
        elif problem:
            note(f"{step.name}: not done: {problem}")


# --- What people see --------------------------------------------------------


async def review(
    settler: DeadLetterSettler, steps: Iterable[PlannedSettlement], show: Callable[[str], None]
) -> Counter[str]:
    """Show what the file asks for; return the counts by action, of conflicts and of no action."""
    counts: Counter[str] = Counter()
    shown = 0
    for asked in steps:
        step = await settler.decide_once(asked)
        if step.is_done or (step.settlement is None and not step.problem):
            counts["already" if step.is_done else "none"] += 1
            continue
        counts["conflict" if step.problem else step.action] += 1
        shown += 1
        if shown <= SHOWN_MAX:
            for line in _lines(await settler.with_message(step)):
                show(line)
    if shown > SHOWN_MAX:
        show(f"… and {shown - SHOWN_MAX} more")
    return counts


def _lines(step: PlannedSettlement) -> Iterator[str]:
    if step.problem:
        yield f"NOT      {step.name}: {step.problem}"
        return
    yield f"{step.action:8} {step.name}"
    settlement, now = step.settlement, step.now
    if isinstance(settlement, ReplaceDeadLetter) and now is not None and now.message is not None:
        payload = settlement.payload
        assert isinstance(payload, bytes), "as content_of made it"
        yield from _diff(opened(now.message).payload, payload)
        yield from _headers(now.message.headers, settlement.headers or {})
    if settlement is not None and settlement.note:
        yield f"  note: {one_line(settlement.note)}"


def _diff(before: bytes, after: bytes) -> Iterator[str]:
    if before == after:
        return
    try:
        old, new = (text.decode().split("\n") for text in (before, after))
    except UnicodeDecodeError:
        yield f"  payload: {counted(len(before), 'byte')} before, {counted(len(after), 'byte')} now"
        return
    lines = [
        line
        for line in difflib.unified_diff(old, new, lineterm="", n=1)
        if not line.startswith(("---", "+++", "@@"))
    ]
    yield from (f"  {line}" for line in lines[:DIFF_LINES_MAX])
    if len(lines) > DIFF_LINES_MAX:
        yield f"  … {counted(len(lines) - DIFF_LINES_MAX, 'more line')}"


def _headers(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is not None:
            yield f"  -header {one_line(f'{name}={old}')}"
        if new is not None:
            yield f"  +header {one_line(f'{name}={new}')}"
