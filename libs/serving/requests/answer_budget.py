"""What answers with messages may hold in memory together, and what each may take of it.

gRPC keeps an answer until its caller reads it, and a server cannot end such a call. So a share of
the budget may be held without end. Each fetch and each answer therefore takes a quarter of what is
free, so that a few callers which do not read leave room for the others. Where that is used up,
small answers still go out, one for each call: messages that are larger wait for memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from libs.serving.requests.budget import ByteBudget
from slatemq.errors import ResourceExhausted

SMALL_BYTES: Final = 64 << 10
"""What a fetch or an answer has in any case; gRPC takes an answer of this size without a reader."""

WAIT_S: Final = 1.0
"""How long a fetch waits for others to end before the budget counts as stalled."""


class AnswerBudget(ByteBudget):
    """The bytes of responses being read, and of those that gRPC has not sent."""

    def __init__(self, bytes_max: int, setting: str) -> None:
        """`setting` names the bound in errors."""
        super().__init__(bytes_max)
        self._setting = setting
        self._beyond = asyncio.Lock()
        self._is_stalled = False

    @property
    def share_bytes(self) -> int:
        """The bytes that one fetch or response may take now."""
        return max((self.bytes_max - self.used_bytes) // 4, SMALL_BYTES)

    @property
    def is_exceeded(self) -> bool:
        """Whether only small responses fit."""
        return self.used_bytes > self.bytes_max

    def exceeded(self) -> ResourceExhausted:
        """The error of a call whose messages are too large for the bytes left."""
        return ResourceExhausted(
            "answers that callers have not read take all the memory for messages on their way; "
            f"read or close them, or raise {self._setting}",
            reason="UNREAD_ANSWERS",
            retry_after_ms=1_000,
        )

    def hold(self, size_bytes: int) -> None:
        """Count a response until it is released. Raises ResourceExhausted where it is too large."""
        if size_bytes > SMALL_BYTES and self.is_exceeded:
            raise self.exceeded()
        self.take(size_bytes)

    @asynccontextmanager
    async def fetching(self, size_bytes: int) -> AsyncIterator[int]:
        """Reserve as much of this as a fetch may take, which it gives.

        Once others have held the budget for a while, fetches take turns with a small one.
        """
        size_bytes = min(size_bytes, self.share_bytes)
        if await self._reserve_soon(size_bytes):
            with self.releasing(size_bytes):
                yield size_bytes
            return
        size_bytes = min(size_bytes, SMALL_BYTES)
        async with self._beyond:
            self.take(size_bytes)
            with self.releasing(size_bytes):
                yield size_bytes

    @contextmanager
    def releasing(self, size_bytes: int) -> Iterator[None]:
        """Release at the end what was reserved."""
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
