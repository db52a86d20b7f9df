"""The queue names that a shell completes: asked from the server, in bounded time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from slatemq.errors import SlateMQError

ANSWER_S = 1.0
"""How long a shell waits; without an answer nothing is completed."""

NAMES_MAX = 200
"""Names shown at once."""


def queue_names(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """The queues whose name begins so; none where no server answers in time."""
    import asyncio

    session: Any = ctx.find_root().obj
    found: list[str] = []
    with suppress(SlateMQError, TimeoutError, click.UsageError):
        asyncio.run(_collect(session, incomplete, found))
    return [CompletionItem(name) for name in found]


async def _collect(session: Any, prefix: str, found: list[str]) -> None:
    import asyncio

    async with asyncio.timeout(ANSWER_S), session.connect() as client:
        async for queue in client.list_queues(prefix):
            found.append(queue.queue_id)
            if len(found) == NAMES_MAX:
                return
