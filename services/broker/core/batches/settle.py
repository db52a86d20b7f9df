"""Decisions about single dead letters: they take effect in one commit, or not at all.

Pure: no I/O, no clock, no asyncio. Rows are passed as they are stored; meanwhile the caller lets no
others change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from libs.storage.records.queues import (
    AvailableMessage,
    DoneMessage,
    FailedAttempt,
    FailedMessage,
)
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound

NOTED = "note: "
"""The beginning of the outcome that stands for a note in a message's history."""


class Action(Enum):
    """What becomes of a dead letter."""

    STAYS = 1
    COMES_BACK = 2
    IS_DROPPED = 3
    IS_REPLACED = 4


LIVING_ON = frozenset({Action.COMES_BACK, Action.IS_REPLACED})
"""The actions after which a consumer gets the message again, or its replacement."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What was decided about one dead letter, which is in the row `order`."""

    message_id: int
    order: int
    action: Action
    note: str = ""


@dataclass(frozen=True, slots=True)
class Settlements:
    """What was decided about dead letters of one queue.

    Attributes:
        rows: The rows that have them, as they are stored, by order.
        pushes: The outbox rows of what replaces dead letters, by the place of the settlement.
        ingest_shard: Where these go.
        consumer_id: The person or program that decided.
        request_id: Makes repeating safe; empty = none.
        fingerprint: Of the content, to recognize a repeat.
    """

    each: Sequence[Settlement]
    rows: Mapping[int, Sequence[FailedMessage]]
    pushes: Mapping[int, bytes]
    ingest_shard: int
    consumer_id: str
    request_id: str = ""
    fingerprint: bytes = b""


def was_done(shard: Shard, request_id: str, fingerprint: bytes) -> bool:
    """Whether this is a repeat. Raises InvalidArgument when other content had the request ID."""
    known = shard.executed.fingerprint(request_id) if request_id else None
    if known not in (None, fingerprint):
        raise InvalidArgument(
            "request_id", "was used before with other content", reason="REQUEST_ID_REUSED"
        )
    return known is not None


def settle(shard: Shard, queue: Queue, wanted: Settlements, now_ms: int) -> None:
    """Applies them. Raises Needs, and the errors of the proto, when nothing has changed."""
    places = check(queue, wanted, now_ms)
    if wanted.pushes:
        shard.outbox.check_capacity(len(wanted.pushes), sum(map(len, wanted.pushes.values())))
    if wanted.request_id:
        shard.executed.check_capacity()
    noted = [attempts_at(queue, one.message_id) for one in wanted.each if one.note]
    shard.attempts.require(noted)

    for number, (one, place) in enumerate(zip(wanted.each, places, strict=True)):
        dead_letter = wanted.rows[one.order][place]
        if one.note:
            attempt = FailedAttempt(wanted.consumer_id, now_ms, NOTED + one.note)
            shard.attempts.add(attempts_at(queue, one.message_id), attempt)
        if one.action is Action.COMES_BACK:
            queue.waiting.enqueue(_back(dead_letter), now_ms)
        elif one.action is Action.IS_REPLACED:
            shard.outbox.push(wanted.ingest_shard, wanted.pushes[number], now_ms)
        if one.action in (Action.IS_DROPPED, Action.IS_REPLACED):
            into = queue.queue_id if one.action is Action.IS_REPLACED else ""
            done = DoneMessage(
                dead_letter.message_id,
                now_ms,
                dead_letter.attempts,
                wanted.consumer_id,
                transferred_to=into,
            )
            queue.done.add((done,))
    _remove(shard, queue, wanted, places)
    back = (one.message_id for one in wanted.each if one.action in LIVING_ON)
    shard.events.redriven(queue, queue.queue_id, back, now_ms, wanted.request_id)
    if wanted.request_id:
        shard.executed.add(wanted.request_id, wanted.fingerprint)


def check(queue: Queue, wanted: Settlements, now_ms: int) -> list[int]:
    """The place of each dead letter in its row. Errors name the settlement."""
    used: set[tuple[int, int]] = set()
    places: list[int] = []
    for number, one in enumerate(wanted.each):
        place = _place(queue, wanted, one, number, used)
        used.add((one.order, place))
        dead_letter = wanted.rows[one.order][place]
        if one.action in LIVING_ON and queue.waiting.is_over(_back(dead_letter), now_ms):
            raise FailedPrecondition(
                "DEAD_LETTER_EXPIRED",
                f"message {one.message_id} is past its retention: no consumer would get it",
                subject=str(one.message_id),
                metadata=_at(number),
            )
        places.append(place)
    return places


def _place(
    queue: Queue, wanted: Settlements, one: Settlement, number: int, used: Set[tuple[int, int]]
) -> int:
    # A purge since the rows were read has left them as garbage.
    if 0 < queue.failed.oldest_order <= one.order:
        for place, dead_letter in enumerate(wanted.rows[one.order]):
            # A transfer may have brought the same message twice.
            if dead_letter.message_id == one.message_id and (one.order, place) not in used:
                return place
    raise NotFound(
        "entry",
        f"{queue.queue_id}/{one.message_id:x}",
        f"message {one.message_id} is no longer the dead letter that was listed: list again",
        reason="ENTRY_UNKNOWN",
        metadata=_at(number),
    )


def _at(number: int) -> dict[str, str]:
    return {"settlement": str(number)}


def _back(dead_letter: FailedMessage) -> AvailableMessage:
    return AvailableMessage(
        dead_letter.message_id, dead_letter.priority, 0, dead_letter.retention_deadline_ms, 0
    )


def _remove(shard: Shard, queue: Queue, wanted: Settlements, places: Sequence[int]) -> None:
    taken: dict[int, set[int]] = {}
    for one, place in zip(wanted.each, places, strict=True):
        if one.action is not Action.STAYS:
            taken.setdefault(one.order, set()).add(place)
    for order, gone in taken.items():
        left = [dead_letter for n, dead_letter in enumerate(wanted.rows[order]) if n not in gone]
        shard.write_rows([queue.failed.rewrite(order, left, len(gone))])
    shard.redrives.note_removed(queue.queue_id, taken)
