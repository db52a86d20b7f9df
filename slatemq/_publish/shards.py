"""The ingest shard of a request: that of its dedupe keys, or any, in turn, that answers.

Whether a server answers now is asked before it gets what cannot be sent elsewhere afterwards.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio

from slatemq._checks import check_text
from slatemq._publish.wire import Runs
from slatemq._rpc.outages import OutageWatch
from slatemq._rpc.peers import NOT_CONNECTED, Peers, connected
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import InvalidArgument, SlateMQError, Unavailable

FRESH_S: Final = 0.5
"""A server that answered within this time is not asked again."""

PROBE_S: Final = 2.0
"""How long a server has to answer a probe. A live one that is slower loses a request to another
server, and nothing else."""

_HEALTH: Final = "/grpc.health.v1.Health/Check"
_NO_ANSWER: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Liveness:
    """When one server last answered.

    A frozen process keeps its connections open, and the kernel takes what is written to them. A
    request written there may be stored once the process goes on, so no other server may get it.
    """

    def __init__(self) -> None:
        self._answered_s = float("-inf")

    @property
    def is_fresh(self) -> bool:
        """Whether it answered within `FRESH_S`."""
        return time.monotonic() - self._answered_s < FRESH_S

    def answered(self) -> None:
        self._answered_s = time.monotonic()

    async def prove(self, channel: grpc.aio.Channel, timeout_s: float, process: str) -> None:
        """Waits for a connection, and for the answer to a probe unless one came just now.

        Raises Unavailable (NOT_CONNECTED) where none comes in time, which names the process.
        """
        await connected(channel, timeout_s, process)
        if self.is_fresh:
            return
        waited_s = min(timeout_s, PROBE_S)
        probe: Any = channel.unary_unary(_HEALTH)
        try:
            await probe(b"", timeout=waited_s)
        except grpc.RpcError as error:
            call: Any = error
            if call.code() in _NO_ANSWER:
                raise Unavailable(
                    f"{process} did not answer a probe within {waited_s:.1f} s",
                    reason=NOT_CONNECTED,
                ) from None
        self.answered()


AVOIDED_S = 5.0
"""New requests avoid a shard that could not be reached for this long, where there are others."""


class IngestShards:
    """Chooses shards, and remembers which of them answer."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._turn = random.randrange(1 << 14)  # Clients begin at different shards.
        self._avoided_until: dict[int, float] = {}
        self._outages: dict[int, OutageWatch] = {}
        self._liveness = defaultdict[int, Liveness](Liveness)

    # --- By dedupe key --------------------------------------------------------

    async def of_key(self, dedupe_key: str | None) -> int | None:
        """The shard that a message must go to; None without a key: any."""
        if not dedupe_key:
            return None
        check_text("dedupe_key", dedupe_key)

        async def known(_: float) -> list[int]:
            return self._some(await self._peers.ingest_shards())

        return dedupe_shard(dedupe_key, await self._peers.call(known))

    async def places(self, runs: Runs) -> dict[int | None, list[int]]:
        """The places of messages by the shards of their keys, as the topology is now."""
        await self._peers.fresh_topology()
        by_shard: dict[int | None, list[int]] = {}
        for place, key in enumerate(runs.dedupe_keys or [None] * len(runs)):
            by_shard.setdefault(await self.of_key(key), []).append(place)
        return by_shard

    async def of_all(self, runs: Runs) -> int | None:
        """The shard of all keys together. Raises InvalidArgument (MIXED_SHARDS)."""
        chosen: int | None = None
        for place, key in enumerate(runs.dedupe_keys):
            shard = await self.of_key(key)
            if chosen is not None and shard not in (None, chosen):
                raise InvalidArgument(
                    f"messages[{place}].dedupe_key",
                    f"belongs to ingest shard {shard}, a key before it to {chosen}: "
                    "a batch is stored on one shard",
                    reason="MIXED_SHARDS",
                )
            chosen = shard if chosen is None else chosen
        return chosen

    # --- In turn --------------------------------------------------------------

    @property
    def are_several(self) -> bool:
        """Whether a request may go to another shard, as far as is known."""
        return len(self._peers.known_ingests()) > 1

    def in_turn(self) -> Sequence[int]:
        """The known shards without those to avoid; first the one whose turn it is."""
        shards = self._peers.known_ingests()
        if len(shards) < 2:
            return shards
        at = self._turn % len(shards)
        turned = [*shards[at:], *shards[:at]]
        return self._answering(turned)

    async def choose(self, full: set[int]) -> int:
        """The next shard that is not full. Raises Unavailable when none is known."""
        shards = await self._peers.ingest_shards()
        shards = self._answering(self._some([shard for shard in shards if shard not in full]))
        chosen = shards[self._turn % len(shards)]
        self.turn()
        return chosen

    def turn(self) -> None:
        """The next request that may go to any shard goes to another one."""
        self._turn += 1

    def _some(self, shards: list[int]) -> list[int]:
        if not shards:
            self._peers.forget()
            raise Unavailable("no ingest is known", reason="PEER_UNKNOWN")
        return shards

    def _answering(self, shards: list[int]) -> list[int]:
        now = time.monotonic()
        return [one for one in shards if self._avoided_until.get(one, 0.0) < now] or shards

    # --- Which of them answer -------------------------------------------------

    def answered(self, shard: int) -> None:
        """An ingest has stored a request."""
        self._avoided_until.pop(shard, None)
        if self._outages and (watch := self._outages.pop(shard, None)) is not None:
            watch.end()

    def failed(self, shard: int, problem: SlateMQError, began_s: float) -> None:
        """An ingest did not answer a request that was sent at `began_s`, by the monotonic clock."""
        self._avoided_until[shard] = time.monotonic() + AVOIDED_S
        watch = self._outages.get(shard)
        if watch is None:
            watch = self._outages[shard] = OutageWatch(f"ingest shard {shard}")
        watch.begin(problem, began_s)

    def liveness(self, shard: int) -> Liveness:
        return self._liveness[shard]

    def close(self) -> None:
        for watch in self._outages.values():
            watch.close()
        self._outages.clear()
