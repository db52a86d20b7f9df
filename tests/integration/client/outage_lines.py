"""What the client logs of outages, as tests see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from slatemq._rpc import outages


class Lines(logging.Handler):
    """What was logged at WARNING of outages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.more.set()

    async def first(self, text: str) -> str:
        async with asyncio.timeout(60):
            while True:
                found = [line for line in self.lines if text in line]
                if found:
                    return found[0]
                self.more.clear()
                await self.more.wait()


@pytest.fixture
def lines() -> Iterator[Lines]:
    kept = Lines()
    outages.log.addHandler(kept)
    yield kept
    outages.log.removeHandler(kept)
