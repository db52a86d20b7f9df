"""Pages that are put together from several calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from services.console.pages import events, processes

PARTS = 3
WAIT_S = 60.0

REQUEST = Request({"type": "http", "query_string": b"", "headers": [], "state": {"form": {}}})


class SlowInstance:
    """The client of an instance of which nothing answers before all that a page needs is asked."""

    def __init__(self) -> None:
        self._all_asked = asyncio.Barrier(PARTS)

    async def status(self) -> str:
        await self._all_asked.wait()
        return "status"

    events_status = get_instance = status

    async def outbox_lines(self) -> AsyncIterator[str]:
        await self._all_asked.wait()
        yield "line"

    async def failed_tasks(self, limit: int) -> AsyncIterator[str]:
        await self._all_asked.wait()
        yield f"one of {limit}"

    pending_tasks = failed_tasks


@pytest.mark.parametrize(
    ("module", "show"),
    [(processes, processes.show_processes), (events, events.show_events)],
    ids=["processes", "events"],
)
async def test_a_page_asks_for_all_of_its_parts_at_once(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    show: Callable[[Request], Awaitable[Response]],
) -> None:
    instance = SlowInstance()

    async def client_of(_: Request) -> SlowInstance:
        return instance

    def render(_: Request, template: str, **values: Any) -> dict[str, Any]:
        return values

    monkeypatch.setattr(module, "client_of", client_of)
    monkeypatch.setattr(module, "render", render)

    values: Any = await asyncio.wait_for(show(REQUEST), WAIT_S)

    assert "status" in values.values()
    assert not values["problem"]
