"""What a claim was answered with: runs of messages that share most of what they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final, NamedTuple

from slatemq._consume.token_rows import LAST
from slatemq.errors import Internal
from slatemq.v1 import consumer_pb2, message_pb2

_ONE: Final = ("",)
"""How the token of a run of one goes on."""


class Run:
    """What the messages of a ClaimedRun share, and their IDs. Their payloads go with each of them.

    Attributes:
        message_ids: In the order of delivery.
        prefix: What all their tokens begin with.
        ends: How the token of each goes on.
    """

    __slots__ = ("_shared", "ends", "message_ids", "prefix")

    def __init__(
        self,
        shared: consumer_pb2.ClaimedRun,
        message_ids: Sequence[int],
        prefix: str,
        ends: Sequence[str],
    ) -> None:
        """Made by `claimed_of`, for each message where they have little in common."""
        self._shared = shared
        self.message_ids = message_ids
        self.prefix = prefix
        self.ends = ends

    @property
    def common(self) -> message_pb2.Message:
        """What they share since they were published."""
        return self._shared.common

    @property
    def lease_deadline_ms(self) -> int:
        """As in ClaimedRun, like the following ones."""
        return self._shared.lease_deadline_ms

    @property
    def attempts_count(self) -> int:
        """How often each has been claimed."""
        return self._shared.attempts_count

    @property
    def priority(self) -> int:
        """Their priority in the queue."""
        return self._shared.priority

    @property
    def lease_ms(self) -> int:
        """How long the leases run from the claim."""
        return self._shared.lease_ms


class Claimed(NamedTuple):
    """The messages of an answer in the order of delivery, as columns."""

    runs: Sequence[Run]
    """What each shares with others."""
    places: Sequence[int]
    """Where it stands among those."""
    payloads: Sequence[bytes]
    awaited_shards: Sequence[int]
    """Ingest shards that other messages of the queue wait for."""


def claimed_of(answer: consumer_pb2.ClaimResponse | consumer_pb2.ConsumeResponse) -> Claimed:
    """The messages of an answer. Raises Internal for a malformed run: nothing of it is taken."""
    wires = answer.runs
    ids = [wire.message_ids for wire in wires]
    contents = [wire.payloads for wire in wires]
    if set(map(len, ids)) == {1} == set(map(len, contents)):
        # By columns, since a loop over runs of one would take half as long again.
        tokens = [wire.lease_token for wire in wires]
        runs = list(map(Run, wires, ids, tokens, repeat(_ONE)))
        payloads = [content[0] for content in contents]
        return Claimed(runs, [0] * len(runs), payloads, answer.awaited_ingest_shards)
    runs, places, payloads = [], list[int](), []
    for wire, content in zip(wires, contents, strict=True):
        run = _run_of(wire)
        size = len(run.message_ids)
        runs += [run] * size
        places += range(size)
        payloads += content
    return Claimed(runs, places, payloads, answer.awaited_ingest_shards)


def _run_of(wire: consumer_pb2.ClaimedRun) -> Run:
    """A run whose messages each have a payload and a token: or acks would reach other messages.

    It keeps nothing of the answer, which has all payloads once more.
    """
    token = wire.lease_token
    try:
        first = int(token[-2:], 16)
    except ValueError:
        raise Internal(f"a broker answered with a bad token: {token!r:.80}") from None
    message_ids = list(wire.message_ids)
    ends = LAST[first : first + len(message_ids)]
    if not len(message_ids) == len(ends) == len(wire.payloads) > 0:
        raise Internal(
            f"a broker answered with {len(message_ids)} IDs, {len(wire.payloads)} payloads, "
            f"and tokens from {token!r:.80} on"
        )
    shared = consumer_pb2.ClaimedRun(
        common=wire.common,
        lease_deadline_ms=wire.lease_deadline_ms,
        attempts_count=wire.attempts_count,
        priority=wire.priority,
        lease_ms=wire.lease_ms,
    )
    return Run(shared, message_ids, token[:-2], ends)
