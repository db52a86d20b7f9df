"""Creating a queue and changing its settings, beside a tester of the filter that is being typed.

::

    texts of the form ─► settings, or what is wrong with each ─► the broker ─► the queue's page
                              └───────────────── beside its field ◄─┘
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import click
from starlette.requests import Request
from starlette.responses import Response

from services.console.pages.queues import headers_of, whole_number
from services.console.rendering import client_of, done, field_of, link, render
from slatemq._admin.queue_models import Queue, QueueDraft
from slatemq.cli.parameters import START, WORDS, Number
from slatemq.cli.queue_options import DEFAULT_PRIORITY, SETTINGS, Setting
from slatemq.errors import Aborted, AlreadyExists, InvalidArgument, NotFound

GROUPS: Final = (
    ("Which messages", ("filter", "priority", "fallback_priority")),
    (
        "Delivery",
        ("lease", "max_lease", "max_total_lease", "max_attempts", "backoff", "default_delay",
         "max_in_flight"),
    ),
    ("How long it keeps them", ("done_retention", "failed_retention")),
)  # fmt: skip
"""The settings as the form has them, by the names that the client's calls have."""

EXPRESSIONS: Final = ("filter", "priority")

BY_NAME: Final[Mapping[str, Setting]] = {one.keyword: one for one in SETTINGS}

PLACED: Final[Mapping[str, click.ParamType[Any]]] = {
    "queue_id": WORDS,
    "start_from": START,
    "with_queue": WORDS,
    "shard": Number(min=0),
    "partitions": Number(min=1),
    "ordering_header": WORDS,
}
"""What only a new queue has."""

_TYPES: Final = {**{name: one.type for name, one in BY_NAME.items()}, **PLACED}

_FIELD: Final = re.compile(r"(?:queue\.partition\.|queue\.|draft\.)?([a-z_]+?)(?:_ms|_s)?(?:\..*)?")

_NAMES: Final = {"with_queue_id": "with_queue", "count": "partitions"}
"""Where that of the form is another than a broker's."""

_UNITS: Final = {"_ms": ", in milliseconds", "_s": ", in seconds"}
"""In which a broker names the bounds of a field."""

_CHANGED: Final = (
    "Someone has changed this queue since you opened the form, and nothing was saved. Your values "
    "are below: open the form again to see theirs."
)


class Typed(NamedTuple):
    """What was typed, and what is wrong with it; `problems` has an empty name for the whole."""

    values: dict[str, str]
    problems: dict[str, str]


async def show_new(request: Request) -> Response:
    return _form(request, None, Typed({"start_from": "now"}, {}))


async def create(request: Request) -> Response:
    values = {name: field_of(request, name).strip() for name in _TYPES}
    given, problems = _parsed({name: text for name, text in values.items() if text})
    if problems:
        return _form(request, None, Typed(values, problems))
    client = await client_of(request)
    try:
        queue = await client.create_queue(**{"queue_id": "", **given})
    except AlreadyExists:
        problems["queue_id"] = "A queue of this name exists already: choose another one."
    except NotFound as error:
        name = "with_queue" if error.resource_type == "queue" else "shard"
        problems[name] = f"There is no such {error.resource_type}."
    except InvalidArgument as error:
        problems |= _problem_of(error)
    else:
        return done(
            request, link("/queue", queue=queue.queue_id), f"Queue {queue.queue_id} was created."
        )
    return _form(request, None, Typed(values, problems))


async def show_settings(request: Request) -> Response:
    client = await client_of(request)
    queue = await client.get_queue(field_of(request, "queue"))
    return _form(request, queue, Typed({**_shown(queue), "etag": queue.etag}, {}))


async def change(request: Request) -> Response:
    """Change what differs, unless the queue was changed since the form was shown."""
    client = await client_of(request)
    queue = await client.get_queue(field_of(request, "queue"))
    names = (*BY_NAME, "etag")
    values = {name: field_of(request, name).strip().replace("\r\n", "\n") for name in names}
    now = {name: text.strip() for name, text in _shown(queue).items()}
    settings, problems = _parsed({name: values[name] for name in BY_NAME if values[name]})
    changes = {name: settings.get(name) for name in BY_NAME if values[name] != now[name]}
    if not changes and not problems:
        return done(request, link("/queue", queue=queue.queue_id), "Nothing was changed.")
    if not problems:
        try:
            await client.update_queue(queue.queue_id, etag=values["etag"], **changes)
        except Aborted:
            problems[""] = _CHANGED
        except InvalidArgument as error:
            problems |= _problem_of(error)
    if problems:
        return _form(request, queue, Typed(values, problems))
    changed = ", ".join(BY_NAME[name].option.replace("-", " ") for name in changes)
    notice = f"{queue.queue_id} has its new settings: {changed}."
    return done(request, link("/queue", queue=queue.queue_id), notice)


async def try_draft(request: Request) -> Response:
    """Explain what the filter and priority that are being typed would do with a message."""
    client = await client_of(request)
    settings, problems = _parsed(
        {"fallback_priority": field_of(request, "fallback_priority").strip() or DEFAULT_PRIORITY}
    )
    draft = QueueDraft(
        filter=field_of(request, "filter").strip() or None,
        priority=field_of(request, "priority").strip() or None,
        fallback_priority=settings.get("fallback_priority"),
        queue_id=field_of(request, "queue_id").strip() or field_of(request, "queue"),
    )
    explanation = None
    try:
        (explanation,) = await client.explain(
            headers_of(field_of(request, "headers")),
            payload_bytes=whole_number(request, "payload_bytes"),
            draft=draft,
        )
    except InvalidArgument as error:
        problems |= _problem_of(error)
    problem = next((f"{name}: {text}" if name else text for name, text in problems.items()), "")
    return render(request, "_explanation.html", explanation=explanation, problem=problem)


def _form(request: Request, queue: Queue | None, typed: Typed) -> Response:
    groups = [(title, [BY_NAME[name] for name in names]) for title, names in GROUPS]
    return render(
        request,
        "queue_form.html",
        422 if typed.problems else 200,
        queue=queue,
        groups=groups,
        expressions=EXPRESSIONS,
        values=typed.values,
        problems=typed.problems,
    )


def _shown(queue: Queue) -> dict[str, str]:
    """The settings of a queue as the form takes them."""
    return {name: one.shown(queue) for name, one in BY_NAME.items()}


def _parsed(texts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that these texts state, and what is wrong with the others."""
    settings, problems = {}, {}
    for name, text in texts.items():
        value, problem = _converted(_TYPES[name], text)
        if problem:
            problems[name] = problem
        else:
            settings[name] = value
    return settings, problems


def _converted(kind: click.ParamType[Any], text: str) -> tuple[Any, str]:
    """The value as the command line reads it, and what is wrong with it."""
    try:
        return kind.convert(text, None, None), ""
    except click.BadParameter as error:
        return None, error.message


def _problem_of(error: InvalidArgument) -> dict[str, str]:
    """What a broker or router says of a field, by the name that the form has for it."""
    found = _FIELD.fullmatch(error.field)
    name = _NAMES.get(found[1], found[1]) if found else ""
    if name in PLACED:
        return {name: error.description}
    if name in BY_NAME:
        unit = next((text for end, text in _UNITS.items() if error.field.endswith(end)), "")
        return {name: error.description + unit}
    return {"": error.message}
