"""One queue: its settings and live counts, what its filter takes, and what is done to all of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.console.live import Watch
from services.console.pages.overview import live_response
from services.console.rendering import (
    client_of,
    console_of,
    done,
    field_of,
    form_of,
    fragment,
    link,
    render,
    session_of,
)
from slatemq._admin.entry_models import StateName
from slatemq._admin.rates import lag_of, lags_of
from slatemq._counts import counted
from slatemq.cli.queue_options import SETTINGS
from slatemq.client import Client
from slatemq.errors import InvalidArgument


async def show_queue(request: Request) -> Response:
    queue_id = field_of(request, "queue")
    client = await client_of(request)
    queue = await client.get_queue(queue_id)
    watch = await console_of(request).watches.of(session_of(request).token)
    settings = [(one.option.replace("-", " "), one.shown(queue)) for one in SETTINGS]
    return render(
        request, "queue.html", queue=queue, settings=settings, live=_live(watch, queue_id)
    )


async def stream_queue(request: Request) -> Response:
    queue_id = field_of(request, "queue")
    return await live_response(request, lambda watch: _live(watch, queue_id))


def _live(watch: Watch, queue_id: str) -> str:
    found = next((one for one in watch.status.queues if one.queue_id == queue_id), None)
    lag = lag_of(found, lags_of(watch.status)) if found else None
    return fragment("_queue.html", queue=found, history=watch.queues.get(queue_id), lag=lag)


async def test_filter(request: Request) -> Response:
    """Explain whether a message with these headers would reach the queue."""
    queue_id = field_of(request, "queue")
    client = await client_of(request)
    (explanation,) = await client.explain(
        headers_of(field_of(request, "headers")),
        payload_bytes=whole_number(request, "payload_bytes"),
        queue_ids=[queue_id],
    )
    return render(request, "_explanation.html", explanation=explanation, problem="")


def headers_of(text: str) -> dict[str, str]:
    """Headers from a JSON object of texts. Raises InvalidArgument."""
    try:
        headers = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("headers", f"is not JSON: {error}") from None
    if not isinstance(headers, dict) or not all(isinstance(one, str) for one in headers.values()):
        raise InvalidArgument("headers", 'must be a JSON object of texts, as {"region": "eu"}')
    return headers


def whole_number(request: Request, name: str) -> int:
    """A field with a whole number; 0 where it is empty. Raises InvalidArgument."""
    text = field_of(request, name).strip()
    if not text.isascii() or not (text or "0").isdigit() or len(text) > 18:
        raise InvalidArgument(name, "must be a whole number")
    return int(text or 0)


# --- What is done to a whole queue ---------------------------------------------


class QueueAction(NamedTuple):
    """An action that a person confirms by typing the name of the queue.

    Attributes:
        text: What it does, before it is done.
        states: Those that the person may choose; empty: it has no choice.
        ends_queue: Whether there is no such queue any more.
    """

    title: str
    text: str
    run: Callable[[Client, str, list[str]], Awaitable[str]]
    is_dangerous: bool = False
    states: tuple[str, ...] = ()
    ends_queue: bool = False


async def _pause(client: Client, queue_id: str, _: list[str]) -> str:
    await client.pause_queue(queue_id)
    return f"{queue_id} is paused: its consumers wait."


async def _resume(client: Client, queue_id: str, _: list[str]) -> str:
    await client.resume_queue(queue_id)
    return f"{queue_id} delivers again."


async def _purge(client: Client, queue_id: str, states: list[str]) -> str:
    if not states:
        raise InvalidArgument("states", "choose at least one")
    count = await client.purge_queue(queue_id, cast("list[StateName]", states))
    return f"Removed {counted(count, 'message')} from {queue_id}."


async def _lift(client: Client, queue_id: str, _: list[str]) -> str:
    await client.lift_quarantine(queue_id)
    return f"{queue_id} is routed again."


async def _delete(client: Client, queue_id: str, _: list[str]) -> str:
    await client.delete_queue(queue_id)
    return f"Queue {queue_id} was deleted."


ACTIONS: Final[Mapping[str, QueueAction]] = {
    "pause": QueueAction(
        "Pause", "Deliveries stop, and consumers wait. Messages still arrive.", _pause
    ),
    "resume": QueueAction("Resume", "Consumers get messages again.", _resume),
    "purge": QueueAction(
        "Purge",
        "Removes all messages in the states that you choose; they cannot be brought back. Other "
        "queues keep their copies. “waiting” is what is available or delayed; “in flight” ends the "
        "leases of consumers.",
        _purge,
        is_dangerous=True,
        states=("available", "in_flight", "done", "failed", "archived"),
    ),
    "lift": QueueAction(
        "Lift the quarantine",
        "Routing judges the messages that waited by the filter and priority as they are. If these "
        "still take too long, the quarantine returns: change them instead, which lifts it, too.",
        _lift,
    ),
    "delete": QueueAction(
        "Delete",
        "Deletes the queue with everything in it; neither can be brought back. Other queues keep "
        "their copies of its messages.",
        _delete,
        is_dangerous=True,
        ends_queue=True,
    ),
}


async def confirm_action(request: Request) -> Response:
    return await _confirm(request, "")


async def run_action(request: Request) -> Response:
    action = _action(request)
    queue_id = field_of(request, "queue")
    if field_of(request, "confirmation").strip() != queue_id:
        return await _confirm(request, "Type the name of the queue exactly as it is shown.")
    client = await client_of(request)
    notice = await action.run(client, queue_id, form_of(request).get("states", []))
    path = "/" if action.ends_queue else link("/queue", queue=queue_id)
    return done(request, path, notice)


async def _confirm(request: Request, problem: str) -> Response:
    client = await client_of(request)
    queue = await client.get_queue(field_of(request, "queue"))
    return render(
        request,
        "confirm.html",
        422 if problem else 200,
        action=_action(request),
        queue=queue,
        chosen=form_of(request).get("states", ["available"]),
        problem=problem,
    )


def _action(request: Request) -> QueueAction:
    action = ACTIONS.get(request.path_params["action"])
    if action is None:
        raise HTTPException(404)
    return action
