"""Shards and processes, routes and their lag, outboxes, the settings of the instance."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from services.console.clients import answered, gathered
from services.console.rendering import client_of, render


async def show_processes(request: Request) -> Response:
    client = await client_of(request)
    # Together: each of them waits for processes that do not answer.
    status, (outboxes, error), (instance, unread) = await asyncio.gather(
        client.status(), gathered(client.outbox_lines()), answered(client.get_instance())
    )
    return render(
        request,
        "processes.html",
        status=status,
        outboxes=outboxes,
        problem=error.message if error is not None else "",
        instance=instance,
        settings_problem=unread.message if unread is not None else "",
    )
