"""Dead letters: editing, redriving and dropping them; redrives and their progress."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from services.console.clients import gathered
from services.console.pages.messages import full_entry, is_encrypted, page_of
from services.console.pages.queues import headers_of, whole_number
from services.console.rendering import (
    client_of,
    done,
    field_of,
    form_of,
    link,
    progress_code,
    render,
)
from slatemq._admin.entry_models import EntryState
from slatemq._admin.redrives import Redrive, RedriveState
from slatemq._admin.settling import DropDeadLetter, RedriveDeadLetter, ReplaceDeadLetter
from slatemq._counts import counted
from slatemq.encryption import KEY_HEADER
from slatemq.errors import INCOMPLETE, InvalidArgument

REDRIVES_SHOWN: Final = 10
EDITED_BYTES_MAX: Final = 1 << 20
"""A larger payload is edited with the command: `slatemq failed edit`."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that no text field keeps."""

CONSUMER: Final = "console"
"""Who drops and replaces, in the list of what is done."""


async def list_dead_letters(request: Request) -> Response:
    queue_id = field_of(request, "queue")
    client = await client_of(request)
    queue = await client.get_queue(queue_id)
    page = await page_of(client, queue_id, EntryState.FAILED, field_of(request, "after"))
    shown = await _redrives(request, queue_id)
    return render(
        request,
        "dead_letters.html",
        queue=queue,
        page=page,
        **shown._asdict(),
        request_id=str(uuid4()),
    )


async def settle(request: Request) -> Response:
    """Redrive those that are chosen, or drop them once the name of the queue is typed."""
    queue_id, action = field_of(request, "queue"), field_of(request, "action")
    handles = form_of(request).get("handles", [])
    if not handles:
        raise InvalidArgument("handles", "choose at least one dead letter")
    if action == "drop" and field_of(request, "confirmation").strip() != queue_id:
        return render(
            request,
            "drop.html",
            queue_id=queue_id,
            handles=handles,
            request_id=field_of(request, "request_id"),
            problem="Type the name of the queue exactly as it is shown."
            if "confirmation" in form_of(request)
            else "",
        )
    if action not in ("drop", "redrive"):
        raise InvalidArgument("action", "must be redrive or drop")
    kind = RedriveDeadLetter if action == "redrive" else DropDeadLetter
    client = await client_of(request)
    await client.settle_dead_letters(
        [kind(handle) for handle in handles],
        request_id=field_of(request, "request_id"),
        consumer_id=CONSUMER,
    )
    what = "Redrove" if action == "redrive" else "Dropped"
    notice = f"{what} {counted(len(handles), 'dead letter')}."
    return done(request, link("/dead-letters", queue=queue_id), notice)


async def show_editor(request: Request) -> Response:
    async with full_entry(request) as entry:
        payload = entry.message.payload if entry.message is not None else b""
        is_too_large = len(payload) > EDITED_BYTES_MAX
        form, text = ("", "") if is_too_large else _editable(payload)
        headers = dict(entry.message.headers) if entry.message is not None else {}
        return render(
            request,
            "dead_letter.html",
            entry=entry,
            payload=payload,
            is_encrypted=is_encrypted(entry),
            is_too_large=is_too_large,
            form=form,
            text=text,
            headers=json.dumps(headers, indent=2, ensure_ascii=False),
            request_id=str(uuid4()),
        )


async def replace(request: Request) -> Response:
    """Put a new message in the place of a dead letter."""
    queue_id, headers = field_of(request, "queue"), headers_of(field_of(request, "headers"))
    if KEY_HEADER in headers:
        raise InvalidArgument(
            f"headers[{KEY_HEADER!r}]",
            "says that the payload is encrypted, but the console has no keys: edit it with "
            "`slatemq failed edit`",
        )
    client = await client_of(request)
    replacement = ReplaceDeadLetter(
        field_of(request, "handle"),
        _payload_of(field_of(request, "payload"), field_of(request, "form")),
        headers,
    )
    await client.settle_dead_letters(
        [replacement], request_id=field_of(request, "request_id"), consumer_id=CONSUMER
    )
    notice = "A new message with this content is in the queue."
    return done(request, link("/dead-letters", queue=queue_id), notice)


def _editable(payload: bytes) -> tuple[str, str]:
    """The form in which a payload comes back from a browser unchanged, and its text.

    Browsers send each line break as CR and LF, whatever it was: so a text has one kind of them, or
    is edited as hex.
    """
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return "hex", payload.hex(" ")
    breaks = {"\n": "lf", "\r\n": "crlf", "": "lf"}
    kinds = set(re.findall("\r\n|\r|\n", text))
    if len(kinds) > 1 or not kinds <= breaks.keys() or _CONTROL.search(text):
        return "hex", payload.hex(" ")
    return breaks["".join(kinds)], text


def _payload_of(text: str, form: str) -> bytes:
    if form != "hex":
        return (text if form == "crlf" else text.replace("\r\n", "\n")).encode()
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidArgument("payload", f"is not hex: {error}") from None


# --- Redrives ---------------------------------------------------------------


async def start_redrive(request: Request) -> Response:
    queue_id = field_of(request, "queue")
    client = await client_of(request)
    redrive = await client.start_redrive(
        queue_id,
        into=field_of(request, "into").strip(),
        filter=field_of(request, "filter").strip(),
        rate=whole_number(request, "rate"),
        request_id=field_of(request, "request_id"),
    )
    notice = f"Redrive {redrive.redrive_id} has begun."
    return done(request, link("/dead-letters", queue=queue_id), notice)


async def show_redrives(request: Request) -> Response:
    """The table of redrives, for which the page asks again while one runs."""
    queue_id = field_of(request, "queue")
    await (await client_of(request)).get_queue(queue_id)  # raises, where it is gone
    shown = await _redrives(request, queue_id)
    code = progress_code(goes_on=shown.goes_on)
    return render(request, "_redrives.html", code, queue_id=queue_id, **shown._asdict())


async def steer_redrive(request: Request) -> Response:
    """Cancel a redrive, or resume it."""
    queue_id, redrive_id = field_of(request, "queue"), field_of(request, "redrive")
    client = await client_of(request)
    if field_of(request, "action") == "cancel":
        await client.cancel_redrive(redrive_id)
        notice = f"Redrive {redrive_id} is cancelled; it can be resumed."
    else:
        await client.resume_redrive(redrive_id)
        notice = f"Redrive {redrive_id} runs again."
    return done(request, link("/dead-letters", queue=queue_id), notice)


class Redrives(NamedTuple):
    """What a page shows of them.

    Attributes:
        redrives: Those that run, and the newest of the others.
        problem: Why some are missing; empty: none is.
        goes_on: Whether they may soon be others.
    """

    redrives: list[Redrive]
    problem: str
    goes_on: bool


async def _redrives(request: Request, queue_id: str) -> Redrives:
    client = await client_of(request)
    found, error = await gathered(client.list_redrives(queue_id))
    if error is not None and error.reason != INCOMPLETE:
        raise error
    found.sort(key=lambda one: (one.state is not RedriveState.RUNNING, -one.created_at_ms))
    problem = error.message if error is not None else ""
    goes_on = bool(problem) or any(one.state is RedriveState.RUNNING for one in found)
    return Redrives(found[:REDRIVES_SHOWN], problem, goes_on)
