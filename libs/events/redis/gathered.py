"""Commands of several callers in one pipeline: what comes while one is under way shares the next.

Redis answers all that one turn of its loop has written after one sync, so callers wait no longer
than they would on connections of their own, and a command costs a fraction of a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from libs.events.redis.dead_letters import Pipeline

COMMANDS_MAX: Final = 256

BYTES_MAX: Final = 1 << 20
"""Of one pipeline, unless one command alone has more."""


class _Waiting(NamedTuple):
    add: Callable[[Pipeline], object]
    size_bytes: int
    done: asyncio.Future[None]


class GatheredCommands:
    """One pipeline after the other; with `transaction` each takes effect as a whole."""

    def __init__(self, client: Any, *, transaction: bool) -> None:
        """Nothing is sent yet."""
        self._client = client
        self._transaction = transaction
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def execute(self, add: Callable[[Pipeline], object], size_bytes: int = 0) -> None:
        """Send the commands that `add` adds to a pipeline. Raises redis-py's errors.

        Once it is called, the commands may take effect, also where the caller is cancelled.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(add, size_bytes, done))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        await done

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send(self._take())
        finally:
            self._sending = None
            while self._waiting:  # cancelled: the loop ends
                self._waiting.popleft().done.cancel()

    def _take(self) -> list[_Waiting]:
        taken = [self._waiting.popleft()]
        size_bytes = taken[0].size_bytes
        while self._waiting and len(taken) < COMMANDS_MAX:
            size_bytes += self._waiting[0].size_bytes
            if size_bytes > BYTES_MAX:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def _send(self, taken: list[_Waiting]) -> None:
        try:
            async with self._client.pipeline(transaction=self._transaction) as pipeline:
                ends = []
                for one in taken:
                    one.add(pipeline)
                    ends.append(len(pipeline))
                results = await pipeline.execute(raise_on_error=False)
        except asyncio.CancelledError:
            for one in taken:
                one.done.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for one in taken:
                _fail(one.done, error)
            return
        begin = 0
        for one, end in zip(taken, ends, strict=True):
            refusal = next((r for r in results[begin:end] if isinstance(r, Exception)), None)
            begin = end
            if refusal is not None:
                _fail(one.done, refusal)
            elif not one.done.done():
                one.done.set_result(None)


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():  # its caller may be gone
        done.set_exception(error)
