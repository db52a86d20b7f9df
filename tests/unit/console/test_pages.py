"""Pages that are put together from several calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import Response

from services.console.live import History, Watch
from services.console.pages import events, messages, overview, processes
from services.console.payloads import DOWNLOADS_MAX, Payloads
from services.console.rendering import fragment
from slatemq._admin.entry_models import Entry, EntryPage, EntryState
from slatemq._admin.instance import Status
from slatemq.errors import DataLoss, SlateMQError, Unauthenticated, Unavailable

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


class UnreadableSettings(SlowInstance):
    """Of which no process can read the record of the settings."""

    async def get_instance(self) -> str:
        await self.status()
        raise DataLoss("it was removed from the store")


async def test_processes_are_shown_although_no_process_can_read_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = UnreadableSettings()

    async def client_of(_: Request) -> SlowInstance:
        return instance

    def render(_: Request, template: str, **values: Any) -> str:
        around = {"path": "/processes", "is_logged_in": False, "notice": ""}
        answers = {"status": Status([], [], [], []), "outboxes": []}
        return fragment(template, **values | around | answers)

    monkeypatch.setattr(processes, "client_of", client_of)
    monkeypatch.setattr(processes, "render", render)

    shown: Any = await asyncio.wait_for(processes.show_processes(REQUEST), WAIT_S)

    assert "No process could read them: it was removed from the store" in shown


@pytest.mark.parametrize("find", ["", "orders"])
@pytest.mark.parametrize(
    ("unlisted", "refusals"), [([0], []), ([], ["queues are not shown: no rule permits it"])]
)
def test_a_queue_that_is_not_shown_is_not_said_to_be_absent(
    find: str, unlisted: list[int], refusals: list[str]
) -> None:
    def shown(status: Status) -> str:
        watch = SimpleNamespace(status=status, totals=History(), queues={})
        return overview._overview(cast("Watch", watch), find)

    incomplete = shown(Status([], [], [], unlisted, refusals=refusals))
    assert "No queue is shown." in incomplete
    assert "no queue yet" not in incomplete
    assert "in its name" not in incomplete

    complete = shown(Status([], [], [], []))
    assert "No queue is shown." not in complete
    assert "how far routing is behind is unknown" in complete


class ClosedInstance:
    """The client of a caller who may see nothing."""

    async def get_entry(self, handle: str, view: object = None) -> None:
        raise Unauthenticated("this call needs a token")


async def test_who_may_not_see_a_message_takes_no_place_of_its_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def client_of(_: Request) -> ClosedInstance:
        return ClosedInstance()

    places = Payloads()
    monkeypatch.setattr(messages, "client_of", client_of)
    monkeypatch.setattr(messages, "console_of", lambda _: SimpleNamespace(payloads=places))
    async with AsyncExitStack() as taken:
        for _ in range(DOWNLOADS_MAX):
            await taken.enter_async_context(places.place_of_download())

        with pytest.raises(Unauthenticated):
            await messages.download_payload(REQUEST)


NO_REDRIVES: dict[str, Any] = {"redrives": [], "problem": "", "goes_on": False}


class Sparse:
    """A queue whose first pages are empty; at each of them another broker does not answer."""

    def __init__(self, empty_count: int) -> None:
        self.empty_count = empty_count

    async def entry_page(self, *_: Any, page_token: str, **__: Any) -> EntryPage:
        at = int(page_token or 0)
        if at == self.empty_count:
            return EntryPage([Entry("h", "q", 1, EntryState.FAILED)], "", {})
        problems: dict[int, SlateMQError] = {at: Unavailable(f"{at} is down")}
        return EntryPage([], str(at + 1), problems)


async def test_a_page_goes_on_behind_pages_without_entries_and_names_their_problems() -> None:
    client: Any = Sparse(3)
    page = await messages.page_of(client, "q", EntryState.FAILED, "")
    assert (len(page.entries), page.next_page_token, [*page.problems]) == (1, "", [0, 1, 2])


async def test_a_page_that_finds_nothing_for_long_ends_where_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "SEARCH_S", 0.0)
    client: Any = Sparse(1_000_000)

    page = await messages.page_of(client, "q", EntryState.FAILED, "7")

    assert (page.entries, page.next_page_token, [*page.problems]) == ([], "8", [7])
    # And the pages that show it lead there, though they have nothing else
    queue: Any = SimpleNamespace(queue_id="q", counts=SimpleNamespace(failed_count=1))
    frame = {"path": "/", "form_token": "", "is_logged_in": False, "notice": ""}
    shown = fragment(
        "dead_letters.html", **frame, queue=queue, page=page, **NO_REDRIVES, request_id=""
    )
    state = EntryState.FAILED
    listed = fragment(
        "messages.html", **frame, queue=queue, page=page, state=state, states=[], counts={}
    )
    for html, path in ((shown, "/dead-letters?"), (listed, "/messages?")):
        assert path in html
        assert "after=8" in html
        assert "7 is down" in html
