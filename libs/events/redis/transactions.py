"""Commands that Redis executes together, also at its limit of memory.

At `maxmemory` Redis refuses all that MULTI has queued, even XDEL, and scripts whose first write may
take memory. After another write a script may go on: so ours begin with one that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from redis import asyncio as aioredis

Command = tuple[bytes | str | int, ...]
"""A command and its arguments."""

BEGIN: Final = "redis.call('PERSIST', KEYS[1])\n"
"""Begins a script that makes room, or that must work without it."""

EXECUTE: Final = f"""{BEGIN}
local at = 1
while at < #ARGV do
    local last = at + ARGV[at]
    redis.call(unpack(ARGV, at + 1, last))
    at = last + 1
end
"""
"""Executes commands, each of which comes with its length before it. An error ends it."""


class Transactions:
    def __init__(self, client: aioredis.Redis) -> None:
        untyped: Any = client
        self._script = untyped.register_script(EXECUTE)

    async def execute(self, key: str, commands: Iterable[Command]) -> None:
        """Execute commands that, taken together, leave less in Redis or hardly more.

        Put first what adds, then what removes: if the first is refused, nothing is lost.
        `key`: one of theirs, without an expiry.
        """
        parts = [part for command in commands for part in (len(command), *command)]
        await self._script(keys=[key], args=parts)
