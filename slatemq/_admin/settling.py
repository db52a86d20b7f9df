"""Settling single dead letters: redriving, dropping, replacing or annotating each.

Those in the archive of the janitor are read with their content, and redriven or dropped, too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from slatemq._admin.entry_models import Archived, Entry, entry_of
from slatemq._checks import check_kind, check_text, check_whole, iterable, moved, wrong
from slatemq._consume.handles import partition_of_handle, queue_of_handle
from slatemq._requests import message_of
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import Payload, Time, cut_reason, optional_ms, outgoing, sealed, sealer_of
from slatemq.v1 import archived_pb2, entry_pb2, janitor_pb2, removal_pb2
from slatemq.v1.archived_pb2_grpc import ArchivedServiceStub
from slatemq.v1.entry_pb2_grpc import DeadLetterServiceStub
from slatemq.v1.janitor_pb2_grpc import JanitorServiceStub

if TYPE_CHECKING:
    from slatemq.encryption import DataKey, KeyRing

SETTLEMENT = "settlement"
"""The metadata of an error that say which settlement is at fault, from 0."""

SETTLEMENTS_MAX = 1000
"""Settlements that the server takes in one call."""


@dataclass(frozen=True, slots=True)
class RedriveDeadLetter:
    """The dead letter becomes available again, with no attempts counted."""

    handle: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class DropDeadLetter:
    """The dead letter is done: no consumer gets it any more."""

    handle: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReplaceDeadLetter:
    """The dead letter is done, and a new message with this content takes its place."""

    handle: str
    payload: Payload
    headers: Mapping[str, str] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class NoteDeadLetter:
    """The dead letter stays, with a note in its history."""

    handle: str
    note: str


Settlement = RedriveDeadLetter | DropDeadLetter | ReplaceDeadLetter | NoteDeadLetter
"""What to do with a dead letter. Its handle comes from a listing; a note is cut at 1,024 bytes."""


DEAD_LETTERS_MAX = 1000
"""Archived dead letters that the server takes in one call."""


@dataclass(frozen=True, slots=True)
class ArchivedDeadLetter:
    """An archived dead letter to redrive with this content.

    `entry` comes from a listing, `get_entry` or `read_archived`.
    """

    entry: Entry
    payload: Payload
    headers: Mapping[str, str] | None = None


class ArchivedOutcome(StrEnum):
    """GONE: it was not in the archive; EXPIRED: it stays, but its retention is over."""

    DONE = "done"
    GONE = "gone"
    EXPIRED = "expired"


class SettlingCalls(Calls):
    """Settling dead letters, archived ones, too; a part of the client."""

    async def settle_dead_letters(
        self, settlements: Iterable[Settlement], *, request_id: str = "", consumer_id: str = ""
    ) -> None:
        """Settles dead letters of one queue, all or none, in one commit.

        In a partitioned queue all or none of each partition, one partition after another.
        So none is ever duplicated or lost: a replacement reaches the queue exactly once. Those
        dropped or replaced are listed as done, by `consumer_id`. The call is repeated while
        processes are down, under one request ID, which may be your own: for 10 minutes a repeat
        does nothing. Raises NotFound (ENTRY_UNKNOWN: it changed since it was listed),
        FailedPrecondition (DEAD_LETTER_EXPIRED), InvalidArgument, ResourceExhausted. Where one
        settlement is at fault, `metadata["settlement"]` says which, from 0.
        """
        check_text("request_id", request_id)
        check_text("consumer_id", consumer_id)
        each = list(iterable("settlements", "settlements", settlements))
        if not 1 <= len(each) <= SETTLEMENTS_MAX:
            raise InvalidArgument(
                "settlements", f"must be 1 to {SETTLEMENTS_MAX:,}, not {len(each):,}"
            )
        replacing = (one.payload for one in each if isinstance(one, ReplaceDeadLetter))
        sealer = sealer_of(self._encryption, request_id, replacing)
        wires = [_wire(place, one, sealer) for place, one in enumerate(each)]
        request_id = request_id or str(uuid4())
        for partition, places in _by_partition(each).items():
            request = message_of(
                entry_pb2.SettleDeadLettersRequest,
                request_id=request_id,
                settlements=[wires[place] for place in places],
                consumer_id=consumer_id,
            )
            try:
                await self._locations.ask(
                    queue_of_handle(each[0].handle),
                    lambda channel: DeadLetterServiceStub(channel).SettleDeadLetters,
                    request,
                    partition=partition,
                )
            except SlateMQError as error:
                if (place := error.metadata.get(SETTLEMENT, "")).isdecimal():
                    error.metadata[SETTLEMENT] = str(places[int(place)])
                raise

    async def read_archived(
        self,
        queue_id: str,
        *,
        handles: Iterable[str] = (),
        archived_from: Time | None = None,
        archived_until: Time | None = None,
        newest_first: bool = False,
        limit: int = 0,
    ) -> AsyncGenerator[Entry, None]:
        """Reads archived dead letters with reason, attempts and message, through a janitor.

        All of the queue, in the order of the archive within some thousands at a time; with
        `handles` (at most 1,000) those of them that are archived. An entry without a message has
        lost its content. Raises NotFound, InvalidArgument, Unavailable.
        """
        check_whole("limit", limit, 0)
        request = message_of(
            janitor_pb2.ReadArchivedRequest,
            queue_id=queue_id,
            handles=iterable("handles", "handles", handles),
            archived_from_ms=optional_ms(archived_from, "archived_from") or 0,
            archived_until_ms=optional_ms(archived_until, "archived_until") or 0,
            newest_first=newest_first,
            max_entries=limit,
        )
        call = JanitorServiceStub(await self._peers.janitor()).ReadArchived(request)
        async with self._peers.answers(call) as answers:
            async for answer in answers:
                yield entry_of(answer.entry, self._encryption)

    async def redrive_archived(
        self, dead_letters: Iterable[ArchivedDeadLetter], *, into: str = ""
    ) -> list[ArchivedOutcome]:
        """Pushes archived dead letters of one queue back, or into another, as new messages.

        The commit that pushes one removes its archived entry, so that none comes back twice. One
        past its retention stays. The call is repeated while processes are down; what a try without
        a response redrove is GONE then. Raises NotFound, InvalidArgument, Unavailable.
        """
        check_text("into", into)
        each = _checked("dead_letters", dead_letters, ArchivedDeadLetter)
        rows = []
        for place, dead_letter in enumerate(each):
            archived = _archived_of(f"dead_letters[{place}].entry", dead_letter.entry)
            try:
                content = sealed(
                    outgoing(dead_letter.payload, dead_letter.headers), self._encryption
                )
                rows.append(
                    message_of(
                        archived_pb2.ArchivedRow,
                        message_id=dead_letter.entry.message_id,
                        failed_at_ms=dead_letter.entry.finished_at_ms,
                        bucket_order=archived.bucket_order,
                        run=archived.run,
                        payload=content.payload,
                        headers=content.headers,
                    )
                )
            except InvalidArgument as error:
                raise moved(error, f"dead_letters[{place}].{error.field}") from None
        entries = [dead_letter.entry for dead_letter in each]
        queue_id = _queue_of("dead_letters", entries)
        outcomes = [ArchivedOutcome.DONE] * len(rows)
        for partition, places in _by_partition(entries).items():
            request = message_of(
                archived_pb2.RedriveArchivedRequest,
                queue_id=queue_id,
                target_queue_id=into,
                rows=[rows[place] for place in places],
            )
            response = await self._locations.ask(
                queue_id,
                lambda channel: ArchivedServiceStub(channel).RedriveArchived,
                request,
                partition=partition,
            )
            _note(outcomes, places, response.gone_rows, response.expired_rows)
        return outcomes

    async def drop_archived(self, entries: Iterable[Entry]) -> list[ArchivedOutcome]:
        """Drops archived dead letters of one queue: they cannot be redriven any more.

        The files of the archive stay. Raises NotFound, InvalidArgument, Unavailable.
        """
        each = _checked("entries", entries, Entry)
        rows = [
            removal_pb2.FailedRow(
                message_id=entry.message_id,
                failed_at_ms=entry.finished_at_ms,
                bucket_order=_archived_of(f"entries[{place}]", entry).bucket_order,
            )
            for place, entry in enumerate(each)
        ]
        queue_id = _queue_of("entries", each)
        outcomes = [ArchivedOutcome.DONE] * len(rows)
        for partition, places in _by_partition(each).items():
            request = archived_pb2.DropArchivedRequest(
                queue_id=queue_id, rows=[rows[place] for place in places]
            )
            response = await self._locations.ask(
                queue_id,
                lambda channel: ArchivedServiceStub(channel).DropArchived,
                request,
                partition=partition,
            )
            _note(outcomes, places, response.gone_rows)
        return outcomes


def _wire(
    place: int, one: Settlement, sealer: KeyRing | DataKey | None
) -> entry_pb2.DeadLetterSettlement:
    if not isinstance(one, Settlement):
        raise wrong(f"settlements[{place}]", "a settlement, such as DropDeadLetter", one)
    try:
        wire = message_of(
            entry_pb2.DeadLetterSettlement, handle=one.handle, note=cut_reason(one.note, "note")
        )
        queue_of_handle(one.handle)
        if isinstance(one, RedriveDeadLetter):
            wire.redrive.SetInParent()
        elif isinstance(one, DropDeadLetter):
            wire.drop.SetInParent()
        elif isinstance(one, ReplaceDeadLetter):
            content = sealed(outgoing(one.payload, one.headers), sealer)
            result = message_of(
                entry_pb2.ReplaceDeadLetter, payload=content.payload, headers=content.headers
            )
            wire.replace.CopyFrom(result)
    except InvalidArgument as error:
        raise moved(error, f"settlements[{place}].{error.field}") from None
    return wire


T = TypeVar("T")


def _checked(field: str, given: Iterable[T], kind: type[T]) -> list[T]:
    each = list(iterable(field, f"{kind.__name__} values", given))
    if not 1 <= len(each) <= DEAD_LETTERS_MAX:
        raise InvalidArgument(field, f"must be 1 to {DEAD_LETTERS_MAX:,}, not {len(each):,}")
    for place, one in enumerate(each):
        if not isinstance(one, kind):
            raise wrong(f"{field}[{place}]", f"an {kind.__name__}", one)
    return each


def _archived_of(field: str, entry: Entry) -> Archived:
    check_kind(field, entry, Entry, "an Entry")
    if entry.archived is None:
        raise InvalidArgument(field, "is not an archived dead letter")
    return entry.archived


def _queue_of(field: str, entries: Sequence[Entry]) -> str:
    queues = {entry.queue_id for entry in entries}
    if len(queues) > 1:
        raise InvalidArgument(field, "must all be of one queue")
    return queues.pop()


def _by_partition(each: Sequence[Settlement | Entry]) -> dict[int, list[int]]:
    """The places of those of each partition; all are of one queue."""
    places: dict[int, list[int]] = {}
    for place, one in enumerate(each):
        places.setdefault(partition_of_handle(one.handle) or 0, []).append(place)
    return places


def _note(
    outcomes: list[ArchivedOutcome],
    places: Sequence[int],
    gone_rows: Iterable[int],
    expired_rows: Iterable[int] = (),
) -> None:
    """Notes what became of those at these places, of which a response names some."""
    for row in gone_rows:
        outcomes[places[row]] = ArchivedOutcome.GONE
    for row in expired_rows:
        outcomes[places[row]] = ArchivedOutcome.EXPIRED
