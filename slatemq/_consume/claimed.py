"""The messages of a claim, as columns: of each its run, payload and lease token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slatemq._consume.token_rows import LAST
from slatemq.errors import Internal
from slatemq.v1.consumer_pb2 import ClaimedRun, ClaimResponse, ConsumeResponse


class Claimed(NamedTuple):
    """The messages of a response in the order of delivery, as columns."""

    runs: Sequence[ClaimedRun]
    """What each message shares with its neighbours."""
    places: Sequence[int]
    """The place of each message in its run."""
    lease_tokens: Sequence[str]
    payloads: Sequence[bytes]
    awaited_shards: Sequence[int]
    """Ingest shards that other messages of the queue wait for."""


def claimed_of(response: ClaimResponse | ConsumeResponse) -> Claimed:
    """The messages of a response. Raises Internal for a malformed run: takes no message then."""
    runs = response.runs
    contents = [run.payloads for run in runs]
    if set(map(len, contents)) == {1}:
        # By columns, since a loop over runs of one would take half as long again.
        ones = list(runs)
        if set(map(len, [run.message_ids for run in ones])) != {1}:
            for run in ones:
                _check(run, 1)
        tokens = [run.lease_token for run in ones]
        payloads = [content[0] for content in contents]
        return Claimed(ones, [0] * len(ones), tokens, payloads, response.awaited_ingest_shards)
    each, places, tokens, payloads = list[ClaimedRun](), list[int](), list[str](), list[bytes]()
    for run, content in zip(runs, contents, strict=True):
        tokens += _tokens_of(run)
        size = len(content)
        each += [_without_payloads(run)] * size
        places += range(size)
        payloads += content
    return Claimed(each, places, tokens, payloads, response.awaited_ingest_shards)


def _tokens_of(run: ClaimedRun) -> list[str]:
    """The token of each message, counted up. Raises Internal for a malformed run."""
    token, size = run.lease_token, len(run.payloads)
    try:
        first = int(token[-2:], 16)
    except ValueError:
        raise Internal(f"a broker answered with a bad token: {token!r:.80}") from None
    _check(run, min(size, len(LAST) - first))
    prefix = token[:-2]
    return [prefix + last for last in LAST[first : first + size]]


def _check(run: ClaimedRun, tokens_count: int) -> None:
    """Each message needs an ID, a payload and a token: or acks would reach other messages."""
    ids_count, payloads_count = len(run.message_ids), len(run.payloads)
    if not ids_count == payloads_count == tokens_count > 0:
        raise Internal(
            f"a broker answered with {ids_count} IDs, {payloads_count} payloads, "
            f"and tokens from {run.lease_token!r:.80} on"
        )


def _without_payloads(run: ClaimedRun) -> ClaimedRun:
    """A copy that keeps nothing of the response, which has all payloads once more."""
    return ClaimedRun(
        common=run.common,
        message_ids=run.message_ids,
        lease_deadline_ms=run.lease_deadline_ms,
        attempts_count=run.attempts_count,
        priority=run.priority,
        lease_ms=run.lease_ms,
    )
