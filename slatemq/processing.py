"""Working on the messages of a consumer with several tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slatemq.consumer import Consumer
from slatemq.delivered import Received
from slatemq.errors import SlateMQError
from slatemq.failures import has_failed

log = logging.getLogger(__name__)


async def process_all(
    messages: Consumer, handler: Callable[[Received], Awaitable[object]], concurrency: int
) -> None:
    """Calls the handler for every message, until cancelled or the consumer ends.

    Raises what the consumer raises.
    """

    async def work() -> None:
        async for message in messages:
            try:
                async with message:
                    await handler(message)
            except (Exception, asyncio.CancelledError) as error:
                if not has_failed(error):
                    raise
                log.warning("message %d failed: %r", message.message_id, error)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(work())
    except* SlateMQError as group:
        # Every task met the same end of the consumer.
        first = group.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        problem = first
    else:
        return
    raise problem
