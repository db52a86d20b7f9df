"""What claims and streams share: who asks for how long, and the messages they are given."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final
from uuid import uuid4

from libs.serving.protobytes import number_field, varint
from services.broker.lease_buckets import Claimed
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
    claimed, held = given
    if not held:
        return []
    messages = list(map(_MESSAGE_BYTES, held))
    prefix, numbers = token_parts(shard, claimed.tokens)
    token_size = len(prefix) + len(numbers[0])
    sizes = list(map(len, messages))
    ends = _ends(claimed)
    # Messages of one claim differ in little but their bytes and tokens: heads repeat as ends do.
    heads = {
        (size, end): _head(size, len(end), token_size)
        for size, end in set(zip(sizes, ends, strict=True))
    }
    parts = [_TOKEN + varint(token_size) + prefix] * (5 * len(messages))
    if len(heads) == 1:
        parts[0::5] = list(heads.values()) * len(messages)
    else:
        parts[0::5] = map(heads.__getitem__, zip(sizes, ends, strict=True))
    parts[1::5] = messages
    parts[3::5] = numbers
    parts[4::5] = ends
    return parts


def _head(message_size: int, end_size: int, token_size: int) -> bytes:
    """What stands before a message in an answer."""
    head = _MESSAGE + varint(message_size)
    size = len(head) + message_size + 2 + token_size + end_size
    return _MESSAGES + varint(size) + head


def _ends(claimed: Claimed) -> list[bytes]:
    """What stands behind the token of each message."""
    terms = claimed.terms
    keys = list(map(_DIFFERING, claimed.items))
    ends = {
        (attempts, priority): b"".join(
            map(number_field, _ENDS, (terms.deadline_ms, attempts + 1, priority, terms.length_ms))
        )
        for attempts, priority in set(keys)
    }
    if len(ends) == 1:
        return list(ends.values()) * len(keys)
    return list(map(ends.__getitem__, keys))


_MESSAGES: Final = b"\x0a"
_MESSAGE: Final = b"\x0a"
_TOKEN: Final = b"\x12"
_MESSAGE_BYTES: Final = attrgetter("message")
_DIFFERING: Final = attrgetter("attempts", "priority")
_ENDS: Final = (3, 4, 5, 6)
"""Fields of ClaimedMessage: lease_deadline_ms, attempts_count, priority, lease_ms."""


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
