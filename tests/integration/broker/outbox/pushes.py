"""An ingest for pushes, in memory: it keeps the number of the last one, as the proto says."""

from __future__ import annotations

import asyncio

from libs.serving.peers.calls import PeerFailed, PeerUnstorable
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from slatemq.v1.ingest_pb2 import PushedMessage, PushRequest


class Pushes:
    """Implements `services.broker.outbox.targets.OutboxTarget`, for brokers that come and go.

    Attributes:
        down: Every call fails.
        unstorable: Every call ends the ingest over a record.
        ends_over: Calls with this payload end the ingest.
        lose_answers: How many of the next calls are done, and lose their answers.
        slow: While it is not set, calls wait before anything happens.
        numbers: The last number of each broker shard and ingest shard.
        stored: What came, by ingest shard.
        calls: How many messages each call had.
        limit: The largest payload, as it is known.
        ingest_shard: The one for pushes that are made now.
        removed: Ingest shards that were removed; calls of them fail.
    """

    def __init__(self, ingest_shard: int = 0) -> None:
        self.down = False
        self.unstorable = False
        self.ends_over: bytes | None = None
        self.limit: int | None = None
        self.lose_answers = 0
        self.slow = asyncio.Event()
        self.slow.set()
        self.numbers: dict[tuple[int, int], int] = {}
        self.stored: dict[int, list[PushedMessage]] = {}
        self.calls: list[int] = []
        self.ingest_shard = ingest_shard
        self.removed: set[int] = set()

    def __call__(self, channels: Channels, directory: TopologyDirectory, shard: int) -> Pushes:
        return self

    async def is_removed(self, ingest_shard: int) -> bool:
        return ingest_shard in self.removed

    async def choose(self) -> int:
        return self.ingest_shard

    def payload_bytes_max(self, ingest_shard: int) -> int | None:
        return self.limit

    async def push(self, ingest_shard: int, request: PushRequest) -> int:
        await self.slow.wait()
        if self.down or ingest_shard in self.removed:
            raise PeerFailed("down")
        if self.unstorable:
            raise PeerUnstorable("UNSTORABLE_RECORD: log entry 7")
        self.calls.append(len(request.messages))
        if any(one.payload == self.ends_over for one in request.messages):
            raise PeerUnstorable("UNSTORABLE_RECORD: log entry 7")
        place = (request.broker_shard, ingest_shard)
        last = self.numbers.get(place, 0)
        if request.first_number > last + 1:
            raise AssertionError(f"a gap: {request.first_number} after {last}")
        fresh = request.messages[last + 1 - request.first_number :]
        self.stored.setdefault(ingest_shard, []).extend(fresh)
        self.numbers[place] = last + len(fresh)
        if self.lose_answers:
            self.lose_answers -= 1
            raise PeerFailed("the answer got lost")
        return self.numbers[place]

    def payloads(self, ingest_shard: int = 0) -> list[bytes]:
        return [one.payload for one in self.stored.get(ingest_shard, ())]
