"""Whether long work leaves others their turns of the event loop."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager


class Turns(AbstractContextManager["Turns"]):
    """Another task, which does nothing but count its turns within the block.

    Attributes:
        count: How many it has had: what sees the same number twice was one step.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Turns:
        self._other = asyncio.create_task(self._take())
        return self

    def __exit__(self, *_: object) -> None:
        self._other.cancel()

    async def _take(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)
