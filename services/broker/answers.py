"""What claims and streams share: who asks for how long, and the messages they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from libs.serving.protobytes import number_field, varint, varints_of
from services.broker.lease_buckets import Terms
from services.broker.owner import ShardOwner
from services.broker.queue_machine import Queue
from services.broker.tokens import token_parts
from services.broker.waiters import Given
from slatemq.errors import InvalidArgument, Unavailable

CONSUMER_ID_BYTES_MAX = 255


def lease_length(asked_ms: int, queue: Queue) -> int:
    """How long a claim's leases run."""
    return min(asked_ms or queue.settings.lease_ms, queue.settings.max_lease_ms)


def consumer_id(asked: str, field: str = "consumer_id") -> str:
    """The consumer's ID, or one made up."""
    if len(asked.encode()) > CONSUMER_ID_BYTES_MAX:
        raise InvalidArgument(field, f"has more than {CONSUMER_ID_BYTES_MAX} bytes")
    return asked or f"consumer-{uuid4().hex[:12]}"


def stopping() -> Unavailable:
    """What those hear who wait while the process drains."""
    return Unavailable("the broker is stopping", reason="DRAINING")


def tell(shard: int, given: Sequence[Given], head: bytes = b"") -> bytes:
    """The messages of an answer: field 1 of ClaimResponse and of ConsumeResponse, encoded.

    Behind `head`, the other fields of the answer: a megabyte is not to be copied for those.
    """
    parts = [head]
    for one in given:
        parts += _parts(shard, one)
    return b"".join(parts)


def _parts(shard: int, given: Given) -> list[bytes]:
    """Of each message: a head, the number of its token, another head, payload, tail, ID."""
    claimed, held = given
    count = len(held)
    if not count:
        return []
    payloads, commons = zip(*held, strict=True)
    message_ids, priorities, _, _, attempts = zip(*claimed.items, strict=True)
    ids, sizes = varints_of(message_ids), list(map(len, payloads))
    prefix, numbers = token_parts(shard, claimed.tokens)
    token = _TOKEN + varint(len(prefix) + len(numbers[0])) + prefix
    tails = [commons[0] + _MESSAGE_ID] * count
    if not _are_alike(commons):
        tails = [common + _MESSAGE_ID for common in commons]
    # Messages of one claim differ in little but their IDs, payloads and tokens: heads repeat.
    others: tuple[Sequence[Any], ...] = (
        _abouts(claimed.terms, attempts, priorities),
        list(map(len, ids)),
        list(map(len, tails)),
    )
    if all(map(_are_alike, others)):
        one = next(zip(*others, strict=True))
        kinds: list[Any] = sizes
        heads = {size: _heads(token, len(numbers[0]), size, *one) for size in set(sizes)}
    else:
        kinds = list(zip(sizes, *others, strict=True))
        heads = {kind: _heads(token, len(numbers[0]), *kind) for kind in set(kinds)}
    before, between = heads[kinds[0]]
    parts = [before, b"", between, b"", tails[0], b""] * count
    if len(heads) > 1:
        parts[0::6], parts[2::6] = zip(*map(heads.__getitem__, kinds), strict=True)
    parts[1::6], parts[3::6], parts[4::6], parts[5::6] = numbers, payloads, tails, ids
    return parts


def _are_alike(column: Sequence[object]) -> bool:
    return column.count(column[0]) == len(column)


def _abouts(terms: Terms, attempts: Sequence[int], priorities: Sequence[int]) -> list[bytes]:
    """What an answer tells about the lease of each message, beside its token."""
    if _are_alike(attempts) and _are_alike(priorities):
        return [_about(terms, attempts[0], priorities[0])] * len(attempts)
    kinds = list(zip(attempts, priorities, strict=True))
    abouts = {kind: _about(terms, *kind) for kind in set(kinds)}
    return list(map(abouts.__getitem__, kinds))


def _about(terms: Terms, attempts: int, priority: int) -> bytes:
    numbers = (terms.deadline_ms, attempts + 1, priority, terms.length_ms)
    return b"".join(map(number_field, _ABOUT, numbers))


def _heads(
    token: bytes, number_size: int, payload_size: int, about: bytes, id_size: int, tail_size: int
) -> tuple[bytes, bytes]:
    """What stands before the number of a message's token, and between that and its payload."""
    head = _PAYLOAD + varint(payload_size)
    message_size = len(head) + payload_size + tail_size + id_size
    between = _MESSAGE + varint(message_size) + head
    size = len(about) + len(token) + number_size + len(between) - len(head) + message_size
    return _MESSAGES + varint(size) + about + token, between


_MESSAGES: Final = b"\x0a"
_MESSAGE: Final = b"\x0a"
_TOKEN: Final = b"\x12"
_ABOUT: Final = (3, 4, 5, 6)
"""Fields of ClaimedMessage: lease_deadline_ms, attempts_count, priority, lease_ms."""
_PAYLOAD: Final = b"\x12"
_MESSAGE_ID: Final = b"\x08"


def too_late(owner: ShardOwner, given: Sequence[Given]) -> bool:
    """Whether storing a claim took so much of its leases that it had better be undone."""
    now_ms = owner.clock.now_ms()
    return any(
        now_ms - one.claimed.terms.claimed_at_ms > one.claimed.terms.length_ms // 2
        for one in given[:1]
    )


async def release(owner: ShardOwner, given: Sequence[Given]) -> None:
    """Undoes claims of which nobody was told."""
    tokens = [token for one in given for token in one.claimed.tokens]
    # After a failed commit nobody knows what the disk holds: the restart will tell.
    if tokens and owner.commits.failed is None:
        await owner.run(lambda _: owner.shard.release(tokens))
