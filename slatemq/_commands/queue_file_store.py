"""A queue in a queue file, for views: a part of its own, since most clients load no queue files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar

from slatemq._checks import check_kind, check_text, iterable, wrong
from slatemq._commands.ref_set import RefSet, RefToken, Slot
from slatemq.codecs import Codec
from slatemq.textqueue import Busy, Claim, State, TextQueue

T = TypeVar("T")
R = TypeVar("R")

RETRY_S = 0.01
"""Between two tries to lock a file that another holds."""


class ClaimedText(Slot[T]):
    """A message of a queue file that was claimed, whose text is decoded when it is wanted."""

    def __init__(self, claim: Claim, codec: Codec[T]) -> None:
        super().__init__(claim.token, lambda: codec.decode(claim.text.encode()))
        self.claim = claim


class TextQueueStore(Generic[T]):
    """A queue file: what is popped is claimed, and its text put into the set.

    A text that its codec cannot decode raises when the item is used, with its token there to fail
    it.

    The file is read and changed in a thread, so that the event loop goes on meanwhile. Each call
    waits for others that hold the file's lock, and raises Busy when that takes longer than
    `timeout`.
    """

    def __init__(
        self,
        queue: TextQueue,
        refs: RefSet[T],
        codec: Codec[T],
        lease: timedelta = timedelta(minutes=1),
        *,
        timeout: timedelta = timedelta(seconds=2),
    ) -> None:
        """Claim from `queue` for `lease`; the texts are items of `codec`.

        `timeout` is how long a call waits for another's lock.
        """
        check_kind("queue", queue, TextQueue)
        check_kind("refs", refs, RefSet)
        check_kind("codec", codec, Codec, "a codec, such as codecs.JSON")
        check_kind("lease", lease, timedelta)
        check_kind("timeout", timeout, timedelta)
        self._queue = queue
        self._refs = refs
        self._codec = codec
        self._lease = lease
        self._timeout = timeout

    async def pop(self) -> str | None:
        """Claims the first message that is queued and free; returns its claim's token.

        Raises TextQueueError (Busy). When this is cancelled, the message is free again.
        """
        claims: list[Claim] = []

        def claim_first() -> None:
            if (claim := self._queue.claim(self._lease)) is not None:
                claims.append(claim)

        try:
            await self._locked(claim_first)
        except BaseException:
            for claim in claims:
                await self._locked(claim.release)
            raise
        if not claims:
            return None
        (claim,) = claims
        self._refs._add(ClaimedText(claim, self._codec))
        return claim.token

    async def len(self) -> int:
        """How many messages are queued and free; reads the file. Raises TextQueueError (Busy)."""
        return await self._locked(self._count)

    async def _locked(self, use: Callable[[], R]) -> R:
        """The result of `use` under the file's lock, tried until the timeout. Raises Busy, OSError.

        When this is cancelled, `use` has either run to its end or has not begun.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout.total_seconds()

        def attempt() -> tuple[R] | Busy:
            os.stat(self._queue.path)  # locking would make the file
            with ExitStack() as stack:
                try:
                    stack.enter_context(self._queue.lock(wait=False))
                except Busy as busy:
                    return busy
                return (use(),)

        while True:
            result = await _to_its_end(attempt)
            if not isinstance(result, Busy):
                return result[0]
            if loop.time() >= deadline:
                raise result
            await asyncio.sleep(RETRY_S)

    def _count(self) -> int:
        claimed = self._queue.claimed_offsets()
        queued = self._queue.entries(State.QUEUED)
        return sum(entry.offset not in claimed for entry in queued)

    async def complete(self, tokens: Iterable[RefToken[T]]) -> None:
        """Marks the messages of these tokens as processed, in order.

        Raises TextQueueError (ClaimLost, Busy).
        """
        await self._finish(tokens, Claim.done)

    async def fail(self, tokens: Iterable[RefToken[T]], code: str = "") -> None:
        r"""Marks the messages of these tokens as errors, in order; the code goes into `\error=`.

        Raises TextQueueError (ClaimLost, DoesNotFit, Busy).
        """
        check_text("code", code)
        await self._finish(tokens, lambda claim: claim.fail(code))

    async def release(self, tokens: Iterable[RefToken[T]]) -> None:
        """Gives the messages of these tokens back, in order.

        Raises TextQueueError (ClaimLost, Busy).
        """
        await self._finish(tokens, Claim.release)

    async def _finish(self, tokens: Iterable[RefToken[T]], finish: Callable[[Claim], None]) -> None:
        for place, token in enumerate(iterable("tokens", "RefTokens", tokens)):
            check_kind(f"tokens[{place}]", token, RefToken)
            token.check()
            slot = token._slot
            if not isinstance(slot, ClaimedText) or slot.claim.queue is not self._queue:
                raise wrong(f"tokens[{place}]", "a token of this queue", token)
            claim = slot.claim
            try:
                await self._locked(partial(finish, claim))
            finally:
                if claim.finished:
                    token.settled()


async def _to_its_end(call: Callable[[], R]) -> R:
    """The result of `call` in a thread. A cancelled caller still waits for its end."""
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
