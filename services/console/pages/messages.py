"""The messages of a queue by state; one message, its payload and its attempts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from services.console import formats
from services.console.payloads import Download
from services.console.rendering import client_of, console_of, done, field_of, link, render
from slatemq._admin.entry_models import Entry, EntryPage, EntryState, EntryView
from slatemq.client import Client
from slatemq.encryption import KEY_HEADER
from slatemq.errors import InvalidArgument, NotFound, SlateMQError

PAGE_SIZE: Final = 50

SEARCH_S: Final = 3.0
"""How long a page looks for the next entries: there may be many partitions without any, and brokers
that do not answer."""

NEWEST_FIRST: Final = (EntryState.DONE, EntryState.FAILED)
"""States that are listed by the time of their end."""


async def list_messages(request: Request) -> Response:
    """A page of messages in one state, with their headers and without payloads."""
    queue_id = field_of(request, "queue")
    state = _state(field_of(request, "state") or "available")
    client = await client_of(request)
    queue = await client.get_queue(queue_id)
    page = await page_of(client, queue_id, state, field_of(request, "after"))
    counts = {one: getattr(queue.counts, f"{one}_count") for one in EntryState}
    return render(
        request,
        "_entries.html" if request.headers.get("hx-request") else "messages.html",
        queue=queue,
        state=state,
        states=list(EntryState),
        counts=counts,
        page=page,
    )


async def page_of(client: Client, queue_id: str, state: EntryState, token: str) -> EntryPage:
    """The next page that has entries, with headers, and the problems of those before it.

    Empty, with the token to go on with, where none is found in `SEARCH_S`.
    """
    until = time.monotonic() + SEARCH_S
    problems: dict[int, SlateMQError] = {}
    while True:
        page = await client.entry_page(
            queue_id,
            state,
            page_size=PAGE_SIZE,
            page_token=token,
            view=EntryView.HEADERS,
            newest_first=state in NEWEST_FIRST,
        )
        problems |= page.problems
        token = page.next_page_token
        if page.entries or not token or time.monotonic() >= until:
            return page._replace(problems=problems)


async def show_message(request: Request) -> Response:
    """One message in one queue: its state, headers, attempts, and payload."""
    form = field_of(request, "form")
    async with full_entry(request) as entry:
        payload = entry.message.payload if entry.message is not None else b""
        chosen = form if form in formats.FORMS else formats.best_form(payload)
        text, note = formats.shown(payload, chosen)
        name = "_payload.html" if request.headers.get("hx-request") else "message.html"
        return render(
            request,
            name,
            entry=entry,
            payload=payload,
            form=chosen,
            forms=formats.FORMS,
            text=text,
            note=note,
            is_encrypted=is_encrypted(entry),
        )


async def download_payload(request: Request) -> Response:
    found = await found_entry(request)
    async with AsyncExitStack() as place:
        await place.enter_async_context(console_of(request).payloads.place_of_download())
        async with _with_content(request, found) as entry:
            if entry.message is None:
                raise NotFound(
                    "message", str(entry.message_id), "the message is not stored any more"
                )
            filename = f"{entry.queue_id}-{entry.message_id}.bin"
            return Download(entry.message.payload, filename, place.pop_all())


async def cancel_message(request: Request) -> Response:
    """Remove a waiting message from its queue."""
    handle, queue_id = field_of(request, "handle"), field_of(request, "queue")
    client = await client_of(request)
    await client.cancel_entry(handle)
    return done(request, link("/messages", queue=queue_id), "The message was removed.")


async def deliver_now(request: Request) -> Response:
    """Make a delayed message available."""
    client = await client_of(request)
    entry = await client.reschedule_entry(field_of(request, "handle"))
    return done(request, link("/message", handle=entry.handle), "The message is available now.")


@asynccontextmanager
async def full_entry(request: Request) -> AsyncIterator[Entry]:
    """The entry whose handle the request names, with its content; of an archived one, too."""
    async with _with_content(request, await found_entry(request)) as entry:
        yield entry


async def found_entry(request: Request) -> Entry:
    """The entry whose handle the request names, for those alone who may see it.

    Places are taken after that: they are few.
    """
    client = await client_of(request)
    return await client.get_entry(field_of(request, "handle"), view=EntryView.HEADERS)


@asynccontextmanager
async def _with_content(request: Request, entry: Entry) -> AsyncIterator[Entry]:
    handle = field_of(request, "handle")
    client = await client_of(request)
    async with console_of(request).payloads.place_to_read():
        if entry.archived is None:
            yield await client.get_entry(handle)
            return
        async for archived in client.read_archived(entry.queue_id, handles=[handle]):
            entry = archived
        yield entry


def is_encrypted(entry: Entry) -> bool:
    return entry.message is not None and KEY_HEADER in entry.message.headers


def _state(text: str) -> EntryState:
    try:
        return EntryState(text)
    except ValueError:
        raise InvalidArgument("state", f"must be one of {', '.join(EntryState)}") from None
