"""Settling single dead letters, as somebody decided who looked at them: a part of the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from slatemq._checks import iterable, message_of, wrong
from slatemq._consume.handles import queue_of_handle
from slatemq._rpc.bounds import cut_reason
from slatemq._rpc.peers import Peers
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import InvalidArgument
from slatemq.models import outgoing
from slatemq.v1 import entry_pb2, entry_pb2_grpc

SETTLEMENTS_MAX = 1000
"""Settlements that the server takes in one call."""


@dataclass(frozen=True, slots=True)
class RedriveDeadLetter:
    """The dead letter becomes available again, with no attempts counted."""

    handle: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class DropDeadLetter:
    """The dead letter is done: nobody gets it any more."""

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
"""What to do with a dead letter; its handle is that of a listing, a note has 1,024 bytes at most
(what is longer is cut)."""


class SettlingCalls:
    """Settling dead letters; a part of the client."""

    _peers: Peers
    _locations: QueueLocations

    async def settle_dead_letters(
        self, settlements: Iterable[Settlement], *, request_id: str = "", consumer_id: str = ""
    ) -> None:
        """Does all of this with dead letters of one queue, or nothing, in one commit.

        So no letter is ever there twice, or lost: what replaces one reaches the queue exactly once.
        What is dropped or replaced is listed as done, by `consumer_id`. It is repeated while
        processes are away, under one request ID, which may be your own: for 10 minutes a repeat
        does nothing. Raises NotFound (ENTRY_UNKNOWN: it is not the dead letter any more that was
        listed), FailedPrecondition (DEAD_LETTER_EXPIRED), InvalidArgument, ResourceExhausted. Where
        one is at fault, `metadata["settlement"]` says which, from 0.
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
        queue_id = queue_of_handle(each[0].handle)

        async def attempt(shard: int, timeout: float) -> None:
            stub: Any = entry_pb2_grpc.DeadLetterServiceStub(await self._peers.broker(shard))
            await stub.SettleDeadLetters(request, timeout=timeout)

        await self._locations.call(queue_id, attempt)


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
