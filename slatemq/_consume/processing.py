"""Working on the messages of a consumer with several tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slatemq._consume.consumer import Consumer
from slatemq._consume.delivered import Received
from slatemq._rpc.failures import has_failed
from slatemq.errors import SlateMQError

log = logging.getLogger(__name__)


async def process_all(
    messages: Consumer, handler: Callable[[Received], Awaitable[object]], concurrency: int
) -> None:
    """Calls the handler for every message, until cancelled or the consumer ends.

    Raises what the consumer raises, once the handlers that run have returned.
    """
    problems: list[SlateMQError] = []

    async def work() -> None:
        try:
            async for message in messages:
                await _handle(message, handler)
        except SlateMQError as error:
            problems.append(error)  # Every task meets the same end of the consumer.

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
    if problems:
        raise problems[0]


async def _handle(message: Received, handler: Callable[[Received], Awaitable[object]]) -> None:
    try:
        async with message:
            await handler(message)
    except (Exception, asyncio.CancelledError) as error:
        if not has_failed(error):
            raise
        log.warning(
            "message %d of queue %r failed, attempt %d",
            message.message_id,
            message.queue_id,
            message.attempts_count,
            exc_info=error,
        )
