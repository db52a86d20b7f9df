"""What a claim was answered with, in one form: runs of messages that share most of what they are.

A broker answers in runs; or, where messages have little in common or it is of an earlier version,
with each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slatemq._consume.token_rows import LAST
from slatemq.errors import Internal
from slatemq.v1 import consumer_pb2, message_pb2


class Run:
    """What messages of one answer share, and their IDs. Their payloads go with each of them.

    Nothing of the answer itself: that has all payloads once more, and would stay in memory with it.

    Attributes:
        common: What they share since they were published.
        message_ids: In the order of delivery.
        prefix: What all their tokens begin with.
        ends: How the token of each goes on.
        lease_deadline_ms: As in ClaimedRun, like the following ones.
        attempts_count: See there.
        priority: See there.
        lease_ms: See there.
    """

    __slots__ = (
        "attempts_count",
        "common",
        "ends",
        "lease_deadline_ms",
        "lease_ms",
        "message_ids",
        "prefix",
        "priority",
    )

    def __init__(self, wire: consumer_pb2.ClaimedRun) -> None:
        """As it was answered."""
        token = wire.lease_token
        first = int(token[-2:], 16)
        self.common = message_pb2.Message()
        self.common.CopyFrom(wire.common)
        self.message_ids: Sequence[int] = list(wire.message_ids)
        self.prefix = token[:-2]
        self.ends: Sequence[str] = LAST[first : first + len(self.message_ids)]
        self.lease_deadline_ms = wire.lease_deadline_ms
        self.attempts_count = wire.attempts_count
        self.priority = wire.priority
        self.lease_ms = wire.lease_ms


class Alone:
    """The same of a message that came for itself."""

    __slots__ = ("_wire",)

    ends: Sequence[str] = ("",)

    def __init__(self, wire: consumer_pb2.ClaimedMessage) -> None:
        """As it was answered; each has little more than this."""
        self._wire = wire

    @property
    def common(self) -> message_pb2.Message:
        """See Run."""
        return self._wire.message

    @property
    def message_ids(self) -> Sequence[int]:
        """See Run."""
        return (self._wire.message.message_id,)

    @property
    def prefix(self) -> str:
        """See Run."""
        return self._wire.lease_token

    @property
    def lease_deadline_ms(self) -> int:
        """See Run."""
        return self._wire.lease_deadline_ms

    @property
    def attempts_count(self) -> int:
        """See Run."""
        return self._wire.attempts_count

    @property
    def priority(self) -> int:
        """See Run."""
        return self._wire.priority

    @property
    def lease_ms(self) -> int:
        """See Run."""
        return self._wire.lease_ms


class Claimed(NamedTuple):
    """The messages of an answer in the order of delivery, as columns."""

    runs: Sequence[Run | Alone]
    """What each shares with others."""
    places: Sequence[int]
    """Where it stands among those."""
    payloads: Sequence[bytes]
    awaited_shards: Sequence[int]
    """Ingest shards that other messages of the queue wait for."""


def claimed_of(answer: consumer_pb2.ClaimResponse | consumer_pb2.ConsumeResponse) -> Claimed:
    """The messages of an answer. Raises Internal for one that is none: nothing of it is taken."""
    wires = answer.messages
    runs: list[Run | Alone] = list(map(Alone, wires))
    places = [0] * len(runs)
    payloads = [wire.message.payload for wire in wires]
    for wire in answer.runs:
        run = _run_of(wire)
        size = len(run.message_ids)
        payloads += wire.payloads
        runs += [run] * size
        places += range(size)
    return Claimed(runs, places, payloads, answer.awaited_ingest_shards)


def _run_of(wire: consumer_pb2.ClaimedRun) -> Run:
    """A run whose messages each have a payload and a token: or acks would reach other messages."""
    try:
        run = Run(wire)
    except ValueError:
        raise Internal(f"a broker answered with a bad token: {wire.lease_token!r:.80}") from None
    if not len(run.message_ids) == len(run.ends) == len(wire.payloads):
        raise Internal(
            f"a broker answered with {len(run.message_ids)} IDs, {len(wire.payloads)} payloads, "
            f"and tokens from {wire.lease_token!r:.80} on"
        )
    return run
