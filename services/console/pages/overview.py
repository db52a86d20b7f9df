"""The whole instance at a glance, live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.console.live import Watch, Watches, depth, event
from services.console.rendering import console_of, field_of, fragment, render, session_of
from slatemq._admin.queue_models import sum_of_counts
from slatemq._admin.rates import lags_of, whole_lag
from slatemq.errors import Unauthenticated

QUEUES_SHOWN: Final = 200
"""The queues with the most messages; the filter finds the others."""


async def show_overview(request: Request) -> Response:
    watch = await console_of(request).watches.of(session_of(request).token)
    find = field_of(request, "find")
    return render(request, "overview.html", find=find, live=_overview(watch, find))


async def stream_overview(request: Request) -> Response:
    find = field_of(request, "find")
    return await live_response(request, lambda watch: _overview(watch, find))


async def live_response(request: Request, draw: Callable[[Watch], str]) -> Response:
    """An event stream of what is drawn of each sample; at the end of the session it ends, too."""
    console, session = console_of(request), session_of(request)
    try:
        watch = await console.watches.of(session.token)
    except Unauthenticated as error:
        # The reader of a stream cannot be sent to the login, but loads its page again.
        return Response(event("gone", error.message), media_type="text/event-stream")

    def draw_in_session(seen: Watch) -> str:
        if console.seal.has_ended(session):
            raise Unauthenticated("the session has ended")
        return draw(seen)

    return _LiveResponse(console.watches, watch, draw_in_session)


class _LiveResponse(StreamingResponse):
    """Holds a place while it is sent; without one, it says so."""

    def __init__(self, watches: Watches, watch: Watch, draw: Callable[[Watch], str]) -> None:
        super().__init__(watches.stream(watch, draw), media_type="text/event-stream")
        self._place = watches.place(watch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place as has_place:
            if has_place:
                await super().__call__(scope, receive, send)
            else:
                refusal = PlainTextResponse("Too many pages are open.", 429)
                await refusal(scope, receive, send)


def _overview(watch: Watch, find: str) -> str:
    status = watch.status
    found = [queue for queue in status.queues if find.lower() in queue.queue_id.lower()]
    found.sort(key=lambda queue: (-depth(queue.counts), queue.queue_id))
    return fragment(
        "_overview.html",
        status=status,
        down=[one for one in status.services if not one.serving],
        totals=sum_of_counts(queue.counts for queue in status.queues),
        history=watch.totals,
        histories=watch.queues,
        lag=whole_lag(lags_of(status)),
        queues=found[:QUEUES_SHOWN],
        found_count=len(found),
        find=find,
    )
