"""What claims and streams share: the consumer's ID, the lease, and the messages delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import compress, count, pairwise
from operator import ne
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

from services.broker.core.leases import Claimed, Terms
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from services.broker.delivery.waiters import ClaimBatch
from services.broker.requests.limits import within_bytes
from services.broker.requests.tokens import token_parts, token_text
from services.broker.shard.owner import ShardOwner
from slatemq._rpc.wire_format import (
    framed,
    number_field,
    packed_varints,
    tag_of,
    varint,
    varints_of,
)
from slatemq.errors import Unavailable
from slatemq.v1.consumer_pb2 import ClaimedRun, ClaimResponse, ConsumeResponse

T = TypeVar("T")

CONSUMER_ID_BYTES_MAX = 255

RUN_MIN = 8
"""Messages of a run, on average, from which on both sides have less work than with runs of one."""

_RUNS: Final = tag_of(ClaimResponse, "runs")
_COMMON: Final = tag_of(ClaimedRun, "common")
_MESSAGE_IDS: Final = tag_of(ClaimedRun, "message_ids")
_PAYLOADS: Final = tag_of(ClaimedRun, "payloads")
_LEASE_TOKEN: Final = tag_of(ClaimedRun, "lease_token")
_ABOUT: Final = [
    tag_of(ClaimedRun, name)
    for name in ("lease_deadline_ms", "attempts_count", "priority", "lease_ms")
]
assert tag_of(ConsumeResponse, "runs") == _RUNS, "streams and claims share the encoder"


def lease_length(asked_ms: int, queue: Queue) -> int:
    return min(asked_ms or queue.settings.lease_ms, queue.settings.max_lease_ms)


def consumer_id(asked: str, field: str = "consumer_id") -> str:
    """The consumer's ID, or one made up."""
    return within_bytes(field, asked, CONSUMER_ID_BYTES_MAX) or f"consumer-{uuid4().hex[:12]}"


def stopping() -> Unavailable:
    """The error sent to waiters when the broker drains."""
    return Unavailable("the broker is stopping", reason="DRAINING")


async def encode_messages(shard: int, batches: Sequence[ClaimBatch], head: bytes = b"") -> bytes:
    """The messages of an answer: `runs` of ClaimResponse and of ConsumeResponse, encoded.

    Behind `head`, the other fields of the answer: a megabyte is not to be copied for those. What
    was claimed in several turns is encoded in as many, between which others have theirs.
    """
    cut = []
    async for one in _in_turns(batches):
        columns = _columns(one)
        cut.append((columns, _cuts(columns)))
    are_long = sum(len(one.held) for one in batches) >= RUN_MIN * sum(len(cuts) for _, cuts in cut)
    parts = [head]
    async for columns, cuts in _in_turns(cut):
        parts += _runs(shard, columns, cuts) if are_long else _runs_of_one(shard, columns)
    return b"".join(parts)


async def _in_turns(parts: Sequence[T]) -> AsyncIterator[T]:
    """Each part, and the event loop its turn before the next one."""
    for index, one in enumerate(parts):
        if index:
            await asyncio.sleep(0)
        yield one


class _Columns(NamedTuple):
    """The result of one claim: at least one message."""

    claimed: Claimed
    payloads: Sequence[bytes]
    commons: Sequence[bytes]
    message_ids: Sequence[int]
    attempts: Sequence[int]
    priorities: Sequence[int]


def _columns(batch: ClaimBatch) -> _Columns:
    claimed, held, _ = batch
    payloads, commons = zip(*held, strict=True)
    message_ids, priorities, _, _, attempts = zip(*claimed.items, strict=True)
    return _Columns(claimed, payloads, commons, message_ids, attempts, priorities)


def _runs_of_one(shard: int, columns: _Columns) -> list[bytes]:
    """Of each message its token's number, common part, payload and ID, each behind a head.

    By columns: a call for each run would take four times as long.
    """
    claimed, payloads, commons, message_ids, attempts, priorities = columns
    ids = varints_of(message_ids)
    prefix, numbers = token_parts(shard, claimed.tokens)
    token = _LEASE_TOKEN + varint(len(prefix) + len(numbers[0])) + prefix
    sizes, common_sizes, id_sizes = (list(map(len, one)) for one in (payloads, commons, ids))
    # Messages of one claim differ in little but their IDs, payloads and tokens: heads repeat.
    others: tuple[Sequence[Any], ...] = (
        _abouts(claimed.terms, attempts, priorities),
        common_sizes,
        id_sizes,
    )
    if all(map(_are_equal, others)):
        one = next(zip(*others, strict=True))
        kinds: list[Any] = sizes
        heads = {size: _heads(token, len(numbers[0]), size, *one) for size in set(sizes)}
    else:
        kinds = list(zip(sizes, *others, strict=True))
        heads = {kind: _heads(token, len(numbers[0]), *kind) for kind in set(kinds)}
    of_token, of_payload = heads[kinds[0]]
    commons_of = {size: _COMMON + varint(size) for size in set(common_sizes)}
    ids_of = {size: _MESSAGE_IDS + varint(size) for size in set(id_sizes)}
    of_common, of_id = commons_of[common_sizes[0]], ids_of[id_sizes[0]]
    parts = [of_token, b"", of_common, b"", of_payload, b"", of_id, b""] * len(kinds)
    if len(heads) > 1:
        parts[0::8], parts[4::8] = zip(*map(heads.__getitem__, kinds), strict=True)
    if len(commons_of) > 1:
        parts[2::8] = map(commons_of.__getitem__, common_sizes)
    if len(ids_of) > 1:
        parts[6::8] = map(ids_of.__getitem__, id_sizes)
    parts[1::8], parts[3::8], parts[5::8], parts[7::8] = numbers, commons, payloads, ids
    return parts


def _cuts(columns: _Columns) -> list[int]:
    """Where messages begin that differ from those before in more than ID, payload and token."""
    claimed, _, commons, _, attempts, priorities = columns
    # What has its leases in one bucket has tokens in a row, of one block (see `InFlight.put`).
    cuts = {first for _, first, _ in claimed.parts}
    for column in (commons, attempts, priorities):
        if not _are_equal(column):
            cuts.update(compress(count(1), map(ne, column[1:], column)))
    return sorted(cuts)


def _runs(shard: int, columns: _Columns, cuts: Sequence[int]) -> list[bytes]:
    """Of each run: what it has once, then each payload behind its head."""
    claimed, payloads, commons, message_ids, attempts, priorities = columns
    sizes = list(map(len, payloads))
    heads = {size: _PAYLOADS + varint(size) for size in set(sizes)}
    about = {
        kind: _about(claimed.terms, *kind)
        for kind in {(attempts[first], priorities[first]) for first in cuts}
    }
    parts: list[bytes] = []
    for first, end in pairwise((*cuts, len(payloads))):
        once = (
            framed(_COMMON, commons[first])
            + framed(_MESSAGE_IDS, packed_varints(message_ids[first:end]))
            + framed(_LEASE_TOKEN, token_text(shard, claimed.tokens[first]).encode())
            + about[attempts[first], priorities[first]]
        )
        head = heads[sizes[first]]
        content = [head, b""] * (end - first)
        content[1::2] = payloads[first:end]
        size = len(once) + len(head) * (end - first) + sum(sizes[first:end])
        if len(heads) > 1:
            content[0::2] = map(heads.__getitem__, sizes[first:end])
            size = len(once) + sum(map(len, content))
        parts += (_RUNS, varint(size), once, *content)
    return parts


def _are_equal(column: Sequence[object]) -> bool:
    return column.count(column[0]) == len(column)


def _abouts(terms: Terms, attempts: Sequence[int], priorities: Sequence[int]) -> list[bytes]:
    """The lease of each message, without its token."""
    if _are_equal(attempts) and _are_equal(priorities):
        return [_about(terms, attempts[0], priorities[0])] * len(attempts)
    kinds = list(zip(attempts, priorities, strict=True))
    abouts = {kind: _about(terms, *kind) for kind in set(kinds)}
    return list(map(abouts.__getitem__, kinds))


def _about(terms: Terms, attempts: int, priority: int) -> bytes:
    numbers = (terms.deadline_ms, attempts + 1, priority, terms.length_ms)
    return b"".join(map(number_field, _ABOUT, numbers))


def _heads(
    token: bytes, number_size: int, payload_size: int, about: bytes, common_size: int, id_size: int
) -> tuple[bytes, bytes]:
    """What stands before the number of a run's token, and before its payload."""
    of_payload = _PAYLOADS + varint(payload_size)
    size = len(about) + len(token) + number_size + len(of_payload) + payload_size
    size += len(_COMMON) + len(varint(common_size)) + common_size
    size += len(_MESSAGE_IDS) + len(varint(id_size)) + id_size
    return _RUNS + varint(size) + about + token, of_payload


def too_late(owner: ShardOwner, batches: Sequence[ClaimBatch]) -> bool:
    """Whether storing a claim used up over half of its leases: then it is undone."""
    now_ms = owner.clock.now_ms()
    return any(
        now_ms - one.claimed.terms.claimed_at_ms > one.claimed.terms.length_ms // 2
        for one in batches[:1]
    )


async def release(owner: ShardOwner, batches: Sequence[ClaimBatch]) -> None:
    """Undoes claims whose responses were not sent, a turn's messages at a time."""
    async for one in _in_turns(batches):
        # After a failed commit it is unknown what the disk holds: the restart reads it.
        if owner.commits.failed is None:
            await owner.run(partial(_release, owner.shard, one.claimed.tokens))


def _release(shard: Shard, tokens: Sequence[int], _: int) -> None:
    shard.leases.release(tokens)
