"""Waiting for what comes about by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

WAIT_SECONDS: Final = 120.0
"""Far above what anything takes, on a machine with much else to do, too: what hangs fails then."""


LOOK_SECONDS: Final = 0.002
LOOK_SECONDS_MAX: Final = 0.05
"""Looks at what takes seconds become rarer: some are calls."""


async def hang(*_: object, **__: object) -> NoReturn:
    """In place of what is not to come about."""
    await asyncio.Event().wait()
    raise AssertionError


async def eventually(come_about: Callable[[], object]) -> None:
    look_s = LOOK_SECONDS
    async with asyncio.timeout(WAIT_SECONDS):
        while not come_about():
            await asyncio.sleep(look_s)
            look_s = min(1.1 * look_s, LOOK_SECONDS_MAX)
