"""What claims and streams share: who asks for how long, and the messages they are given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from itertools import compress, count, pairwise
from operator import ne
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

from libs.serving.protobytes import field, number_field, packed_varints, varint, varints_of
from services.broker.core.leases.lease_bucket import Claimed, Terms
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from services.broker.delivery.waiters import Given
from services.broker.requests.tokens import token_parts, token_text
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, Unavailable

T = TypeVar("T")

CONSUMER_ID_BYTES_MAX = 255

RUN_MIN = 8
"""Messages of a run, on average, from which on both sides have less work with them than without."""

_ABOUT: Final = (3, 4, 5, 6)
"""Fields of ClaimedMessage: lease_deadline_ms, attempts_count, priority, lease_ms."""

_RUN_ABOUT: Final = (5, 6, 7, 8)
"""The same of ClaimedRun."""


Tell: TypeAlias = Callable[[int, Sequence[Given], bytes], Awaitable[bytes]]
"""Encodes the messages of an answer of this shard, behind its other fields: see `tell`."""


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


async def tell(shard: int, given: Sequence[Given], head: bytes = b"") -> bytes:
    """The messages of an answer: field 1 of ClaimResponse and of ConsumeResponse, encoded.

    Behind `head`, the other fields of the answer: a megabyte is not to be copied for those. What
    was claimed in several turns is encoded in as many, between which others have theirs.
    """
    parts = [head]
    async for one in _in_turns(given):
        parts += _messages(shard, _columns(one))
    return b"".join(parts)


async def tell_runs(shard: int, given: Sequence[Given], head: bytes = b"") -> bytes:
    """The same for callers that read runs: field 3, or field 1 where runs would be short."""
    cut = []
    async for one in _in_turns(given):
        columns = _columns(one)
        cut.append((columns, _cuts(columns)))
    are_long = sum(len(one.held) for one in given) >= RUN_MIN * sum(len(cuts) for _, cuts in cut)
    parts = [head]
    async for columns, cuts in _in_turns(cut):
        parts += _runs(shard, columns, cuts) if are_long else _messages(shard, columns)
    return b"".join(parts)


async def _in_turns(parts: Sequence[T]) -> AsyncIterator[T]:
    """Each part, and the event loop its turn before the next one."""
    for index, one in enumerate(parts):
        if index:
            await asyncio.sleep(0)
        yield one


class _Columns(NamedTuple):
    """What one claim gave: at least one message."""

    claimed: Claimed
    payloads: Sequence[bytes]
    commons: Sequence[bytes]
    message_ids: Sequence[int]
    attempts: Sequence[int]
    priorities: Sequence[int]


def _columns(given: Given) -> _Columns:
    claimed, held, _ = given
    payloads, commons = zip(*held, strict=True)
    message_ids, priorities, _, _, attempts = zip(*claimed.items, strict=True)
    return _Columns(claimed, payloads, commons, message_ids, attempts, priorities)


def _messages(shard: int, columns: _Columns) -> list[bytes]:
    """Of each message: a head, the number of its token, another head, payload, tail, ID."""
    claimed, payloads, commons, message_ids, attempts, priorities = columns
    count = len(payloads)
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


def _cuts(columns: _Columns) -> list[int]:
    """Where messages begin that differ from those before in more than ID, payload and token."""
    claimed, _, commons, _, attempts, priorities = columns
    # What has its leases in one bucket has tokens in a row, of one block (see `InFlight.put`).
    cuts = {first for _, first, _ in claimed.parts}
    for column in (commons, attempts, priorities):
        if not _are_alike(column):
            cuts.update(compress(count(1), map(ne, column[1:], column)))
    return sorted(cuts)


def _runs(shard: int, columns: _Columns, cuts: Sequence[int]) -> list[bytes]:
    """Of each run: what it has once, then each payload behind its head."""
    claimed, payloads, commons, message_ids, attempts, priorities = columns
    sizes = list(map(len, payloads))
    heads = {size: _PAYLOADS + varint(size) for size in set(sizes)}
    about = {
        kind: _about(claimed.terms, *kind, _RUN_ABOUT)
        for kind in {(attempts[first], priorities[first]) for first in cuts}
    }
    parts: list[bytes] = []
    for first, end in pairwise((*cuts, len(payloads))):
        once = (
            field(_COMMON, commons[first])
            + field(_MESSAGE_IDS, packed_varints(message_ids[first:end]))
            + field(_LEASE_TOKEN, token_text(shard, claimed.tokens[first]).encode())
            + about[attempts[first], priorities[first]]
        )
        head = heads[sizes[first]]
        framed = [head, b""] * (end - first)
        framed[1::2] = payloads[first:end]
        size = len(once) + len(head) * (end - first) + sum(sizes[first:end])
        if len(heads) > 1:
            framed[0::2] = map(heads.__getitem__, sizes[first:end])
            size = len(once) + sum(map(len, framed))
        parts += (_RUNS, varint(size), once, *framed)
    return parts


def _are_alike(column: Sequence[object]) -> bool:
    return column.count(column[0]) == len(column)


def _abouts(terms: Terms, attempts: Sequence[int], priorities: Sequence[int]) -> list[bytes]:
    """What an answer tells about the lease of each message, beside its token."""
    if _are_alike(attempts) and _are_alike(priorities):
        return [_about(terms, attempts[0], priorities[0], _ABOUT)] * len(attempts)
    kinds = list(zip(attempts, priorities, strict=True))
    abouts = {kind: _about(terms, *kind, _ABOUT) for kind in set(kinds)}
    return list(map(abouts.__getitem__, kinds))


def _about(terms: Terms, attempts: int, priority: int, fields: Sequence[int]) -> bytes:
    numbers = (terms.deadline_ms, attempts + 1, priority, terms.length_ms)
    return b"".join(map(number_field, fields, numbers))


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
_PAYLOAD: Final = b"\x12"
_MESSAGE_ID: Final = b"\x08"
_RUNS: Final = b"\x1a"
_COMMON, _MESSAGE_IDS, _LEASE_TOKEN = 1, 2, 4
_PAYLOADS: Final = b"\x1a"


def too_late(owner: ShardOwner, given: Sequence[Given]) -> bool:
    """Whether storing a claim took so much of its leases that it had better be undone."""
    now_ms = owner.clock.now_ms()
    return any(
        now_ms - one.claimed.terms.claimed_at_ms > one.claimed.terms.length_ms // 2
        for one in given[:1]
    )


async def release(owner: ShardOwner, given: Sequence[Given]) -> None:
    """Undoes claims of which nobody was told, in as many turns as they were made in."""
    async for one in _in_turns(given):
        # After a failed commit nobody knows what the disk holds: the restart will tell.
        if owner.commits.failed is None:
            await owner.run(partial(_release, owner.shard, one.claimed.tokens))


def _release(shard: Shard, tokens: Sequence[int], _: int) -> None:
    shard.release(tokens)
