"""Waiting for what comes about by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

WAIT_SECONDS: Final = 120.0
"""Far above what anything takes, on a machine with much else to do, too: what hangs fails then."""


async def eventually(come_about: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not come_about():
            await asyncio.sleep(0.002)
