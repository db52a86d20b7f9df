"""A queue in a queue file, for views: a part of its own, since most clients load no queue files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

from slatemq._checks import wrong
from slatemq._commands.ref_set import RefSet, RefToken
from slatemq.codecs import Codec
from slatemq.textqueue import Busy, Claim, State, TextQueue

__all__ = ["TextQueueStore"]

T = TypeVar("T")
R = TypeVar("R")

RETRY_S = 0.01
"""Between two tries to lock a file that another holds."""


class TextQueueStore(Generic[T]):
    """A queue file: what is popped is claimed, and its text put into the set.

    Changes of the file by others are waited for: each takes some milliseconds. The event loop
    goes on meanwhile; one that holds the lock for longer than `timeout` is told of by Busy.
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

        `timeout` is how long `pop` and `len` wait for another's lock.
        """
        self._queue = queue
        self._refs = refs
        self._codec = codec
        self._lease = lease
        self._timeout = timeout
        self._claims: dict[Hashable, Claim] = {}

    async def pop(self) -> Hashable | None:
        """Claims the first message that is queued and free; gives its claim's token.

        Raises TextQueueError (Busy), and what the codec raises: then the message is free again.
        """
        claim = await self._locked(lambda: self._queue.claim(self._lease))
        if claim is None:
            return None
        try:
            self._refs.add(claim.token, self._codec.decode(claim.text.encode()))
        except BaseException:
            claim.release()
            raise
        self._claims[claim.token] = claim
        return claim.token

    async def len(self) -> int:
        """How many messages are queued and free; reads the file. Raises TextQueueError (Busy)."""
        return await self._locked(self._count)

    async def _locked(self, use: Callable[[], R]) -> R:
        """What `use` gives under the file's lock, tried until the timeout. Raises Busy, OSError."""
        loop = asyncio.get_running_loop()
        os.stat(self._queue.path)  # locking would make the file
        deadline = loop.time() + self._timeout.total_seconds()
        while True:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self._queue.lock(wait=False))
                except Busy:
                    if loop.time() >= deadline:
                        raise
                else:
                    return use()
            await asyncio.sleep(RETRY_S)

    def _count(self) -> int:
        claimed = self._queue.claimed_offsets()
        queued = self._queue.entries(State.QUEUED)
        return sum(entry.offset not in claimed for entry in queued)

    def complete(self, tokens: Iterable[RefToken[T]]) -> None:
        """Marks the messages of these tokens as processed. Raises TextQueueError (ClaimLost)."""
        self._finish(tokens, Claim.done)

    def release(self, tokens: Iterable[RefToken[T]]) -> None:
        """Gives the messages of these tokens back. Raises TextQueueError (ClaimLost)."""
        self._finish(tokens, Claim.release)

    def _finish(self, tokens: Iterable[RefToken[T]], finish: _Finish) -> None:
        for place, token in enumerate(tokens):
            if not isinstance(token, RefToken):
                raise wrong(f"tokens[{place}]", "a RefToken", token)
            token.check()
            if token.item_id not in self._claims:
                raise wrong(f"tokens[{place}]", "a token of this queue", token)
            finish(self._claims[token.item_id])
            del self._claims[token.item_id]
            token.settled()


class _Finish(Protocol):
    def __call__(self, claim: Claim, /) -> None: ...
