"""Archived dead letters: reading them with their content, redriving and dropping them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from slatemq._admin.entry_models import Archived, Entry, entry_of
from slatemq._checks import iterable, message_of, wrong
from slatemq._rpc.peers import errors_translated
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import InvalidArgument
from slatemq.models import Time, optional_ms, outgoing
from slatemq.v1 import janitor_pb2, removal_pb2
from slatemq.v1.janitor_pb2_grpc import JanitorServiceStub
from slatemq.v1.removal_pb2_grpc import RemovalServiceStub

T = TypeVar("T")

DEAD_LETTERS_MAX = 1000
"""Archived dead letters that the server takes in one call."""


@dataclass(frozen=True, slots=True)
class ArchivedDeadLetter:
    """An archived dead letter to redrive with this content.

    `entry` comes from a listing, `get_entry` or `read_archived`.
    """

    entry: Entry
    payload: bytes | str
    headers: Mapping[str, str] | None = None


class ArchivedOutcome(StrEnum):
    """GONE: it was not in the archive; EXPIRED: it stays, but its retention is over."""

    DONE = "done"
    GONE = "gone"
    EXPIRED = "expired"


class ArchivedCalls(Calls):
    """Reading and settling archived dead letters; a part of the client."""

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
        request = message_of(
            janitor_pb2.ReadArchivedRequest,
            queue_id=queue_id,
            handles=iterable("handles", "handles", handles),
            archived_from_ms=optional_ms(archived_from, "archived_from"),
            archived_until_ms=optional_ms(archived_until, "archived_until"),
            newest_first=newest_first,
            max_entries=limit,
        )
        call = JanitorServiceStub(await self._peers.janitor()).ReadArchived(request)
        answers = aiter(call)
        try:
            with errors_translated():
                while (answer := await self._peers.unless_closed(anext(answers, None))) is not None:
                    yield entry_of(answer.entry)
        finally:
            call.cancel()

    async def redrive_archived(
        self, dead_letters: Iterable[ArchivedDeadLetter], *, into: str = ""
    ) -> list[ArchivedOutcome]:
        """Pushes archived dead letters of one queue back, or into another, as new messages.

        The commit that pushes one removes its archived entry, so that none comes back twice. One
        past its retention stays. The call is repeated while processes are down; what a try without
        a response redrove is GONE then. Raises NotFound, InvalidArgument, Unavailable.
        """
        each = _checked("dead_letters", dead_letters, ArchivedDeadLetter)
        rows = []
        for place, dead_letter in enumerate(each):
            archived = _archived_of(f"dead_letters[{place}].entry", dead_letter.entry)
            try:
                content = outgoing(dead_letter.payload, dead_letter.headers)
                rows.append(
                    message_of(
                        removal_pb2.ArchivedRow,
                        message_id=dead_letter.entry.message_id,
                        failed_at_ms=dead_letter.entry.finished_at_ms,
                        bucket_order=archived.bucket_order,
                        run=archived.run,
                        payload=content.payload,
                        headers=content.headers,
                    )
                )
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"dead_letters[{place}].{error.field}", error.description, reason=error.reason
                ) from None
        queue_id = _queue_of("dead_letters", [dead_letter.entry for dead_letter in each])
        request = message_of(
            removal_pb2.RedriveArchivedRequest, queue_id=queue_id, target_queue_id=into, rows=rows
        )
        response = await self._locations.ask(
            queue_id, lambda channel: RemovalServiceStub(channel).RedriveArchived, request
        )
        return _outcomes(len(rows), response)

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
        request = removal_pb2.RemoveEntriesRequest(
            queue_id=queue_id, archived=removal_pb2.ArchivedRemoval(rows=rows)
        )
        response = await self._locations.ask(
            queue_id, lambda channel: RemovalServiceStub(channel).RemoveEntries, request
        )
        return _outcomes(len(rows), response)


def _checked(field: str, given: Iterable[T], kind: type[T]) -> list[T]:
    each = list(iterable(field, f"{kind.__name__} values", given))
    if not 1 <= len(each) <= DEAD_LETTERS_MAX:
        raise InvalidArgument(field, f"must be 1 to {DEAD_LETTERS_MAX:,}, not {len(each):,}")
    for place, one in enumerate(each):
        if not isinstance(one, kind):
            raise wrong(f"{field}[{place}]", f"an {kind.__name__}", one)
    return each


def _archived_of(field: str, entry: Entry) -> Archived:
    if entry.archived is None:
        raise InvalidArgument(field, "is not an archived dead letter")
    return entry.archived


def _queue_of(field: str, entries: Sequence[Entry]) -> str:
    queues = {entry.queue_id for entry in entries}
    if len(queues) > 1:
        raise InvalidArgument(field, "must all be of one queue")
    return queues.pop()


def _outcomes(count: int, response: Any) -> list[ArchivedOutcome]:
    outcomes = [ArchivedOutcome.DONE] * count
    for row in response.gone_rows:
        outcomes[row] = ArchivedOutcome.GONE
    for refused in response.refused:
        outcomes[refused.row] = ArchivedOutcome.EXPIRED
    return outcomes
