"""Settling single dead letters: redriving, dropping, replacing or annotating each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from slatemq._checks import iterable, message_of, wrong
from slatemq._consume.handles import queue_of_handle
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import InvalidArgument
from slatemq.models import cut_reason, outgoing
from slatemq.v1 import entry_pb2
from slatemq.v1.entry_pb2_grpc import DeadLetterServiceStub

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
    payload: bytes | str
    headers: Mapping[str, str] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class NoteDeadLetter:
    """The dead letter stays, with a note in its history."""

    handle: str
    note: str


Settlement = RedriveDeadLetter | DropDeadLetter | ReplaceDeadLetter | NoteDeadLetter
"""What to do with a dead letter. Its handle comes from a listing; a note is cut at 1,024 bytes."""


class SettlingCalls(Calls):
    """Settling dead letters; a part of the client."""

    async def settle_dead_letters(
        self, settlements: Iterable[Settlement], *, request_id: str = "", consumer_id: str = ""
    ) -> None:
        """Settles dead letters of one queue, all or none, in one commit.

        So none is ever duplicated or lost: a replacement reaches the queue exactly once. Those
        dropped or replaced are listed as done, by `consumer_id`. The call is repeated while
        processes are down, under one request ID, which may be your own: for 10 minutes a repeat
        does nothing. Raises NotFound (ENTRY_UNKNOWN: it changed since it was listed),
        FailedPrecondition (DEAD_LETTER_EXPIRED), InvalidArgument, ResourceExhausted. Where one
        settlement is at fault, `metadata["settlement"]` says which, from 0.
        """
        each = list(iterable("settlements", "settlements", settlements))
        if not 1 <= len(each) <= SETTLEMENTS_MAX:
            raise InvalidArgument(
                "settlements", f"must be 1 to {SETTLEMENTS_MAX:,}, not {len(each):,}"
            )
        request = message_of(
            entry_pb2.SettleDeadLettersRequest,
            request_id=request_id or str(uuid4()),
            settlements=[_wire(place, one) for place, one in enumerate(each)],
            consumer_id=consumer_id,
        )
        await self._locations.ask(
            queue_of_handle(each[0].handle),
            lambda channel: DeadLetterServiceStub(channel).SettleDeadLetters,
            request,
        )


def _wire(place: int, one: Settlement) -> entry_pb2.DeadLetterSettlement:
    if not isinstance(one, Settlement):
        raise wrong(f"settlements[{place}]", "a settlement, such as DropDeadLetter", one)
    try:
        wire = message_of(
            entry_pb2.DeadLetterSettlement, handle=one.handle, note=cut_reason(one.note)
        )
        queue_of_handle(one.handle)
        if isinstance(one, RedriveDeadLetter):
            wire.redrive.SetInParent()
        elif isinstance(one, DropDeadLetter):
            wire.drop.SetInParent()
        elif isinstance(one, ReplaceDeadLetter):
            content = outgoing(one.payload, one.headers)
            result = message_of(
                entry_pb2.ReplaceDeadLetter, payload=content.payload, headers=content.headers
            )
            wire.replace.CopyFrom(result)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"settlements[{place}].{error.field}", error.description, reason=error.reason
        ) from None
    return wire
