"""Keeps the leases of messages alive: of those fetched ahead, and of those in work.

The broker could do so for what a stream delivered (`keep_leases`). This client does not ask for it:
only who extends learns that a lease is lost and can let go of a message that is held for too long,
and messages outlive their stream here, when it breaks and when their consumer is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from slatemq._consume.finishing import BATCH_MAX, Finisher
from slatemq.errors import FailedPrecondition, NotFound, SlateMQError
from slatemq.v1.consumer_pb2 import ClaimedRun

log = logging.getLogger(__name__)

LOOK_S_MAX = 0.3
"""A lease has 1 s at least, of which a third may be over when it is looked at."""

LOOK_S_MIN = 0.05


class Lease:
    """One lease that is kept.

    Attributes:
        token: Proves the claim.
        held_at_s: Since when, by the monotonic clock.
        buffered: The message was not taken yet: when it is held for too long, it is released.
        lost: It ended: another consumer may have the message.
    """

    __slots__ = ("_length_ms", "_next", "_until", "buffered", "held_at_s", "lost", "token")

    def __init__(self, token: str, length_ms: int, hold_s: float, now: float) -> None:
        self.token = token
        self._length_ms = length_ms
        self.held_at_s = now
        self._next = now + length_ms / 3000
        self._until = now + hold_s
        self.buffered = True
        self.lost = False

    @property
    def ends_at_s(self) -> float:
        """Until when it runs at least, by the monotonic clock."""
        return self._next + self._length_ms / 1500

    def extended(self, ends_at_s: float) -> None:
        """Its owner has extended it until then: sooner the keeper would only shorten it."""
        self._next = ends_at_s - self._length_ms / 1500


def seconds_from_claim(claimed: ClaimedRun, deadline_ms: int) -> float:
    """How long a lease that ends then runs: all by the broker's clock, which is another one."""
    return (deadline_ms - claimed.lease_deadline_ms + claimed.lease_ms) / 1000


class LeaseKeeper:
    """Extends leases at a third of their length, until they are dropped or held for too long."""

    def __init__(self, finisher: Finisher) -> None:
        self._finisher = finisher
        self._held: dict[str, Lease] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def hold(self, token: str, length_ms: int, hold_s: float, now: float | None = None) -> Lease:
        """Keeps a lease of this length alive, for at most `hold_s` seconds; `now` is monotonic."""
        lease = Lease(token, length_ms, hold_s, time.monotonic() if now is None else now)
        self._held[token] = lease
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._keep())
        return lease

    def drop(self, token: str) -> None:
        """The message is finished, or given up."""
        self._held.pop(token, None)

    def drop_all(self, tokens: Iterable[object]) -> None:
        """They are finished, or given up."""
        if self._held:
            # Values that are not tokens are refused by name later.
            for token in (one for one in tokens if isinstance(one, str)):
                self._held.pop(token, None)

    async def close(self) -> None:
        """Stops extending."""
        self._closed = True
        self._held.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _keep(self) -> None:
        try:
            while self._held:
                await self._round(time.monotonic())
                next_at = min((lease._next for lease in self._held.values()), default=0.0)
                pause = next_at - time.monotonic()
                await asyncio.sleep(min(max(pause, LOOK_S_MIN), LOOK_S_MAX))
        finally:
            self._task = None

    async def _round(self, now: float) -> None:
        by_length: dict[int, list[Lease]] = {}
        for lease in [lease for lease in self._held.values() if lease._next <= now]:
            if now < lease._until:
                by_length.setdefault(lease._length_ms, []).append(lease)
            else:
                self._give_up(lease)
        calls = [
            self._extend(leases[start : start + BATCH_MAX], length_ms)
            for length_ms, leases in by_length.items()
            for start in range(0, len(leases), BATCH_MAX)
        ]
        await asyncio.gather(*calls)

    def _give_up(self, lease: Lease) -> None:
        """Stops keeping a lease that was held for too long."""
        self._held.pop(lease.token, None)
        if lease.buffered:
            # It was not taken yet: it must not lose an attempt in a buffer.
            lease.lost = True
            self._finisher.release_soon([lease.token])
        else:
            log.warning("a message is held for longer than `hold`: its lease is left to end")

    async def _extend(self, leases: list[Lease], length_ms: int) -> None:
        try:
            results = await self._finisher.extend_many(
                [lease.token for lease in leases], length_ms, call_s=length_ms / 3000
            )
        except SlateMQError as error:
            # The broker is away: again at the next look; after its restart leases have grace.
            log.debug("%d leases could not be extended now: %s", len(leases), error)
            return
        now = time.monotonic()
        for lease, result in zip(leases, results, strict=True):
            if not isinstance(result, SlateMQError):
                lease._next = max(lease._next, now + length_ms / 3000)
            elif isinstance(result, FailedPrecondition | NotFound) and lease.token in self._held:
                self.drop(lease.token)
                lease.lost = True
