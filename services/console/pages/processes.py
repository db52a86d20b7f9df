"""Shards and processes, routes and their lag, outboxes, the settings of the instance."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from services.console.rendering import client_of, render
from slatemq._admin.outbox import OutboxLine
from slatemq.client import Client
from slatemq.errors import SlateMQError


async def show_processes(request: Request) -> Response:
    client = await client_of(request)
    # Together: each of them waits for processes that do not answer.
    status, (outboxes, problem), instance = await asyncio.gather(
        client.status(), _outboxes(client), client.get_instance()
    )
    return render(
        request,
        "processes.html",
        status=status,
        outboxes=outboxes,
        problem=problem,
        instance=instance,
    )


async def _outboxes(client: Client) -> tuple[list[OutboxLine], str]:
    """The outboxes of the brokers that answer, and why others are missing."""
    lines: list[OutboxLine] = []
    try:
        async for line in client.outbox_lines():
            lines.append(line)  # noqa: PERF401 - what came before an error counts
    except SlateMQError as error:
        return lines, error.message
    return lines, ""
