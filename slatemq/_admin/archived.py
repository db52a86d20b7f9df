"""Archived dead letters: read with their content, brought back, dropped; a part of the client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slatemq._admin.entry_models import Archived, Entry, entry_of
from slatemq._checks import iterable, message_of, wrong
from slatemq._rpc.peers import Peers, errors_translated
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import InvalidArgument
from slatemq.models import Time, outgoing, time_ms
from slatemq.v1 import janitor_pb2, janitor_pb2_grpc, removal_pb2, removal_pb2_grpc

LETTERS_MAX = 1000
"""Archived letters that the server brings back, drops or finds by their handles in one call."""


@dataclass(frozen=True, slots=True)
class ArchivedDeadLetter:
    """An archived dead letter that is to come back with this content.

    `entry` is that of a listing, of `get_entry` or of `read_archived`.
    """

    entry: Entry
    payload: bytes | str
    headers: Mapping[str, str] | None = None


class ArchivedOutcome(StrEnum):
    """What became of an archived letter: DONE; GONE: it was not there; EXPIRED: it stays."""

    DONE = "done"
    GONE = "gone"
    EXPIRED = "expired"


class ArchivedCalls:
    """Reading and settling archived dead letters; a part of the client."""

    _peers: Peers
    _locations: QueueLocations

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
        """Archived dead letters with reason, attempts and message, by way of a janitor.

        Those that the broker lists, some thousands at a time, each of these as it lies in the
        archive; with `handles` (at most 1,000) those of them that are archived. An entry without a
        message has no content any more. Raises NotFound, InvalidArgument, Unavailable.
        """
        request = message_of(
            janitor_pb2.ReadArchivedRequest,
            queue_id=queue_id,
            handles=iterable("handles", "handles", handles),
            archived_from_ms=0
            if archived_from is None
            else time_ms(archived_from, "archived_from"),
            archived_until_ms=0
            if archived_until is None
            else time_ms(archived_until, "archived_until"),
            newest_first=newest_first,
            max_entries=limit,
        )
        stub: Any = janitor_pb2_grpc.JanitorServiceStub(await self._peers.janitor())
        call = stub.ReadArchived(request)
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
        """Pushes archived letters of one queue back, or into another, as new messages.

        The commit that pushes one removes the archived entry: nothing comes back twice. One that is
        past its retention stays. The call is repeated while processes are away; what an attempt
        without an answer brought back is then GONE. Raises NotFound, InvalidArgument, Unavailable.
        """
        each = _checked(
            "letters", list(iterable("letters", "letters", dead_letters)), ArchivedDeadLetter
        )
        rows = []
        for place, dead_letter in enumerate(each):
            archived = _archived_of(f"letters[{place}].entry", dead_letter.entry)
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
                    f"letters[{place}].{error.field}", error.description, reason=error.reason
                ) from None
        queue_id = _queue_of("letters", [dead_letter.entry for dead_letter in each])
        request = message_of(
            removal_pb2.RedriveArchivedRequest, queue_id=queue_id, target_queue_id=into, rows=rows
        )
        return _outcomes(len(rows), await self._ask_removal(queue_id, "RedriveArchived", request))

    async def drop_archived(self, entries: Iterable[Entry]) -> list[ArchivedOutcome]:
        """Drops archived letters of one queue: nobody gets them any more.

        The files of the archive stay. Raises NotFound, InvalidArgument, Unavailable.
        """
        each = _checked("entries", list(iterable("entries", "entries", entries)), Entry)
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
        return _outcomes(len(rows), await self._ask_removal(queue_id, "RemoveEntries", request))

    async def _ask_removal(self, queue_id: str, method: str, request: Any) -> Any:
        async def attempt(shard: int, timeout: float) -> Any:
            stub = removal_pb2_grpc.RemovalServiceStub(await self._peers.broker(shard))
            return await getattr(stub, method)(request, timeout=timeout)

        return await self._locations.call(queue_id, attempt)


def _checked(field: str, given: list[Any], kind: type) -> list[Any]:
    if not 1 <= len(given) <= LETTERS_MAX:
        raise InvalidArgument(field, f"must be 1 to {LETTERS_MAX:,}, not {len(given):,}")
    for place, one in enumerate(given):
        if not isinstance(one, kind):
            raise wrong(f"{field}[{place}]", f"an {kind.__name__}", one)
    return given


def _archived_of(field: str, entry: Entry) -> Archived:
    if entry.archived is None:
        raise InvalidArgument(field, "is no archived dead letter")
    return entry.archived


def _queue_of(field: str, entries: Sequence[Entry]) -> str:
    queues = {entry.queue_id for entry in entries}
    if len(queues) > 1:
        raise InvalidArgument(field, "are of several queues")
    return queues.pop()


def _outcomes(count: int, value: Any) -> list[ArchivedOutcome]:
    outcomes = [ArchivedOutcome.DONE] * count
    for row in value.gone_rows:
        outcomes[row] = ArchivedOutcome.GONE
    for refused in value.refused:
        outcomes[refused.row] = ArchivedOutcome.EXPIRED
    return outcomes
