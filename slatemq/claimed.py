"""What a claim was answered with, in one form: runs of messages that share most of what they are.

A broker answers in runs; or, where messages have little in common or it is of an earlier version,
with each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slatemq.token_rows import LAST
from slatemq.v1 import consumer_pb2, message_pb2


class Run:
    """What messages of one answer share, and their IDs. Their payloads go with each of them.

    Attributes:
        wire: Attempts, priority and lease of all of them.
        common: What else they share.
        message_ids: In the order of delivery.
        prefix: What all their tokens begin with.
        ends: How the token of each goes on.
    """

    __slots__ = ("common", "ends", "message_ids", "prefix", "wire")

    def __init__(self, wire: consumer_pb2.ClaimedRun) -> None:
        """As it was answered."""
        token = wire.lease_token
        first = int(token[-2:], 16)
        self.wire = wire
        self.common = wire.common
        self.message_ids: Sequence[int] = list(wire.message_ids)
        self.prefix = token[:-2]
        self.ends: Sequence[str] = LAST[first : first + len(self.message_ids)]


class Alone:
    """The same of a message that came for itself."""

    __slots__ = ("wire",)

    ends: Sequence[str] = ("",)

    def __init__(self, wire: consumer_pb2.ClaimedMessage) -> None:
        """As it was answered."""
        self.wire = wire

    @property
    def common(self) -> message_pb2.Message:
        """See Run."""
        return self.wire.message

    @property
    def message_ids(self) -> Sequence[int]:
        """See Run."""
        return (self.wire.message.message_id,)

    @property
    def prefix(self) -> str:
        """See Run."""
        return self.wire.lease_token


class Headers(dict[str, str]):
    """The headers of one message. One that is not there is empty, as in protobuf's own mapping."""

    def __missing__(self, key: str) -> str:
        return ""


class Claimed(NamedTuple):
    """The messages of an answer in the order of delivery, as columns."""

    runs: Sequence[Run | Alone]
    """What each shares with others."""
    places: Sequence[int]
    """Where it stands among those."""
    payloads: Sequence[bytes]


def claimed_of(answer: consumer_pb2.ClaimResponse | consumer_pb2.ConsumeResponse) -> Claimed:
    """The messages of an answer."""
    wires = answer.messages
    runs: list[Run | Alone] = list(map(Alone, wires))
    places = [0] * len(runs)
    payloads = [wire.message.payload for wire in wires]
    for wire in answer.runs:
        run = Run(wire)
        size = len(run.message_ids)
        runs += [run] * size
        places += range(size)
        payloads += wire.payloads
    return Claimed(runs, places, payloads)
