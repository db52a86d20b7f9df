"""What claims and streams share: who asks for how long, and the messages they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from libs.serving.protobytes import number_field, varint
from services.broker.owner import ShardOwner
from services.broker.queue_machine import Queue
from services.broker.tokens import token_texts
from services.broker.waiters import Delivered
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


def tell(shard: int, given: Sequence[Delivered]) -> bytes:
    """The messages of an answer: field 1 of ClaimResponse and of ConsumeResponse, encoded."""
    # Those of one claim differ in little but their tokens.
    ends: dict[tuple[int, int, int, int], bytes] = {}
    parts: list[bytes] = []
    tokens = token_texts(shard, [lease.token for lease, _ in given])
    for (lease, held), token in zip(given, tokens, strict=True):
        key = (lease.deadline_ms, lease.attempts, lease.priority, lease.length_ms)
        end = ends.get(key)
        if end is None:
            end = ends[key] = b"".join(map(number_field, _ENDS, key))
        head = _MESSAGE + varint(len(held.message))
        size = len(head) + len(held.message) + 2 + len(token) + len(end)
        parts += (
            _MESSAGES,
            varint(size),
            head,
            held.message,
            _TOKEN,
            varint(len(token)),
            token,
            end,
        )
    return b"".join(parts)


_MESSAGES: Final = b"\x0a"
_MESSAGE: Final = b"\x0a"
_TOKEN: Final = b"\x12"
_ENDS: Final = (3, 4, 5, 6)
"""Fields of ClaimedMessage: lease_deadline_ms, attempts_count, priority, lease_ms."""


def too_late(owner: ShardOwner, given: Sequence[Delivered]) -> bool:
    """Whether storing a claim took so much of its leases that it had better be undone."""
    now_ms = owner.clock.now_ms()
    return any(now_ms - lease.claimed_at_ms > lease.length_ms // 2 for lease, _ in given[:1])


async def release(owner: ShardOwner, given: Sequence[Delivered]) -> None:
    """Undoes claims of which nobody was told."""
    leases = [lease for lease, _ in given]
    # After a failed commit nobody knows what the disk holds: the restart will tell.
    if leases and owner.commits.failed is None:
        await owner.run(lambda _: owner.shard.release(leases))
