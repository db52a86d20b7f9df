"""The bytes of responses in memory, which callers share."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from slatemq._byte_budget import ByteBudget
from slatemq.errors import ResourceExhausted

SMALL_BYTES: Final = 64 << 10
"""What a fetch or an answer has in any case; gRPC takes an answer of this size without a reader."""

WAIT_S: Final = 1.0
"""How long a fetch waits for others to end before the budget counts as stalled, and for answers of
its principal to be read before it is refused."""


class AnswerBudget(ByteBudget):
    """The bytes of responses being read, and of those that gRPC has not sent.

    gRPC keeps an answer until its caller reads it, and a server cannot end such a call. So a share
    of the budget may be held without end. Each fetch and each answer therefore takes a quarter of
    what is free, so that a few callers which do not read leave room for the others. Where that is
    used up, small answers still go out, one for each call: larger messages wait for memory.

    All fetches and answers of one principal together have half of the budget. An empty name is that
    of all callers where there is no policy, and of peers, which are not held to that.
    """

    def __init__(self, bytes_max: int, setting: str) -> None:
        """`setting` names the bound in errors."""
        super().__init__(bytes_max)
        self._setting = setting
        self._beyond = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._halves: dict[str, ByteBudget] = {}
        self._is_stalled = False

    @property
    def share_bytes(self) -> int:
        """The bytes that one fetch or response may take now."""
        return max((self.bytes_max - self.used_bytes) // 4, SMALL_BYTES)

    def share_of(self, principal: str) -> int:
        """The same for a response to this principal, which has what is left of its half."""
        half = self._halves.get(principal)
        if half is None:
            return self.share_bytes
        return max(min(self.share_bytes, half.bytes_max - half.used_bytes), SMALL_BYTES)

    def used_by(self, principal: str) -> int:
        """The bytes that a principal's fetches and unread answers take; for an empty name, 0."""
        half = self._halves.get(principal)
        return 0 if half is None else half.used_bytes

    def is_beyond_half(self, principal: str) -> bool:
        return self.used_by(principal) > self.bytes_max // 2

    def refusal(self, principal: str) -> ResourceExhausted | None:
        """The error of a principal beyond its half."""
        return self._half_unread(principal) if self.is_beyond_half(principal) else None

    def admit(self, principal: str) -> None:
        """Raise ResourceExhausted for a principal beyond its half."""
        if self.is_beyond_half(principal):
            raise self._half_unread(principal)

    def take_for(self, principal: str, size_bytes: int) -> None:
        """Count what is on its way to a principal."""
        self.take(size_bytes)
        if principal and size_bytes:
            self._half_of(principal).take(size_bytes)

    def release_for(self, principal: str, size_bytes: int) -> None:
        if principal and size_bytes:
            self._release_half(principal, size_bytes)
        self.release(size_bytes)

    @property
    def is_exceeded(self) -> bool:
        """Whether only small responses fit."""
        return self.used_bytes > self.bytes_max

    def exceeded(self) -> ResourceExhausted:
        """The error of a call whose messages are too large for the bytes left."""
        return self._unread("answers that callers have not read take all the memory")

    def _half_unread(self, principal: str) -> ResourceExhausted:
        return self._unread(f"answers that {principal!r} has not read take half of the memory")

    def _unread(self, problem: str) -> ResourceExhausted:
        return ResourceExhausted(
            f"{problem} for messages on their way; read or close them, or raise {self._setting}",
            reason="UNREAD_ANSWERS",
            retry_after_ms=1_000,
        )

    def hold(self, size_bytes: int, principal: str = "") -> None:
        """Count a response until it is released. Raises ResourceExhausted where it is too large.

        It may be larger than what was reserved: a single message always is fetched.
        """
        self.admit(principal)
        if size_bytes > SMALL_BYTES and self.is_exceeded:
            raise self.exceeded()
        self.take_for(principal, size_bytes)

    @asynccontextmanager
    async def fetching(
        self, size_bytes: int, turns: str = "", principal: str = ""
    ) -> AsyncIterator[int]:
        """Reserve as much of this as a fetch for this principal may take; returns that.

        Once others have held the budget for a while, fetches with the same `turns` take turns with
        a small one: none of them may wait for long within the block. Raises ResourceExhausted where
        the principal has held its half for a while.
        """
        size_bytes = min(size_bytes, self.share_of(principal))
        if principal:
            await self._reserve_half(principal, size_bytes)
        try:
            async with self._fetching(size_bytes, turns) as reserved_bytes:
                yield reserved_bytes
        finally:
            if principal:
                self._release_half(principal, size_bytes)

    @asynccontextmanager
    async def _fetching(self, size_bytes: int, turns: str) -> AsyncIterator[int]:
        if await self._reserve_soon(size_bytes):
            with self.releasing(size_bytes):
                yield size_bytes
            return
        size_bytes = min(size_bytes, SMALL_BYTES)
        async with self._beyond[turns]:
            self.take(size_bytes)
            with self.releasing(size_bytes):
                yield size_bytes

    @contextmanager
    def releasing(self, size_bytes: int) -> Iterator[None]:
        try:
            yield
        finally:
            self.release(size_bytes)

    async def _reserve_soon(self, size_bytes: int) -> bool:
        if self.try_reserve(size_bytes):
            self._is_stalled = False
            return True
        if self._is_stalled:
            return False
        try:
            async with asyncio.timeout(WAIT_S):
                await self.reserve(size_bytes)
        except TimeoutError:
            self._is_stalled = True
            return False
        return True

    # --- Halves -------------------------------------------------------------

    def _half_of(self, principal: str) -> ByteBudget:
        half = self._halves.get(principal)
        if half is None:
            half = self._halves[principal] = ByteBudget(self.bytes_max // 2)
        return half

    async def _reserve_half(self, principal: str, size_bytes: int) -> None:
        """Reserve from a principal's half once it fits: its other answers may be read soon."""
        self.admit(principal)
        half = self._half_of(principal)
        if half.try_reserve(size_bytes):
            return
        try:
            async with asyncio.timeout(WAIT_S):
                await half.reserve(size_bytes)
        except TimeoutError:
            raise self._half_unread(principal) from None
        finally:
            self._forget_unused(principal)

    def _release_half(self, principal: str, size_bytes: int) -> None:
        self._halves[principal].release(size_bytes)
        self._forget_unused(principal)

    def _forget_unused(self, principal: str) -> None:
        """Drop a half of which nothing is reserved, so that none waits for it either."""
        if not self.used_by(principal):
            self._halves.pop(principal, None)
