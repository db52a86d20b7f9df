"""Templates, and errors as pages that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from services.console import formats
from services.console.charts import sparkline
from services.console.clients import Clients, OpenInstance
from services.console.config import ConsoleConfig
from services.console.guard import cookie_of, session_cookie
from services.console.live import Watches, depth
from services.console.measures import Measures
from services.console.payloads import Payloads
from services.console.sessions import NOTICE_S, Session, SessionSeal
from slatemq._counts import counted
from slatemq.cli.parameters import format_time
from slatemq.client import Client
from slatemq.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SlateMQError,
    Unauthenticated,
    Unavailable,
)

NOTICE_COOKIE: Final = "slatemq-notice"

POLLING_ENDS: Final = 286
"""The status by which htmx asks no more; after any other, and without an answer, it goes on."""

CHART_SLOTS: Final = 15
"""Samples that fill a chart; more of them lie closer."""

MENU: Final = (
    ("/", "Overview"),
    ("/processes", "Processes"),
    ("/janitor", "Janitor"),
    ("/events", "Events"),
)
"""The pages that concern no queue."""

Form = Mapping[str, list[str]]


class Console(NamedTuple):
    """What pages work with.

    Attributes:
        clients: By token.
        watches: The history that each person sees.
        payloads: The places for them.
        measures: What the console counts of itself.
    """

    config: ConsoleConfig
    seal: SessionSeal
    clients: Clients
    watches: Watches
    payloads: Payloads
    measures: Measures


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        ago=formats.ago,
        counted=counted,
        depth=depth,
        marked=marked,
        number=lambda count: f"{count:,}",
        rate=formats.rate,
        setting=formats.setting,
        size=formats.size,
        span=formats.span,
        time=format_time,
    )
    made.globals.update(CHART_SLOTS=CHART_SLOTS, link=link, menu=MENU, sparkline=sparkline)
    return made


def marked(text: str) -> Markup:
    """Text for people, in which what stands between backticks is code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(text.split("`"))
    )


def link(path: str, **parameters: object) -> str:
    """A path with its parameters; those that are None or empty are left out."""
    given = {name: str(value) for name, value in parameters.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, quote_via=quote)}" if given else path


_TEMPLATES: Final = _environment()


def console_of(request: Request) -> Console:
    return cast("Console", request.app.state.console)


def session_of(request: Request) -> Session:
    return cast("Session", request.state.session)


async def client_of(request: Request) -> Client:
    """The client with the rights of the person who asks, which is kept until the answer is sent."""
    clients, token = console_of(request).clients, session_of(request).token
    request.state.place.enter_context(clients.kept(token))
    return await clients.of(token)


def form_of(request: Request) -> Form:
    return cast("Form", request.state.form)


def field_of(request: Request, name: str) -> str:
    """A field of a form, or a parameter of the address; empty where there is none."""
    values = form_of(request).get(name)
    return values[0] if values else request.query_params.get(name, "")


def fragment(name: str, **values: Any) -> str:
    return _TEMPLATES.get_template(name).render(values)


def render(request: Request, name: str, code: int = 200, **values: Any) -> Response:
    session, seal = session_of(request), console_of(request).seal
    notice = request.cookies.get(NOTICE_COOKIE)
    html = fragment(
        name,
        path=request.url.path,
        form_token=request.state.form_token,
        is_logged_in=bool(session.token),
        notice=seal.open_notice(notice) if notice else "",
        **values,
    )
    response = HTMLResponse(html, code)
    if notice and not is_part(request):
        response.delete_cookie(NOTICE_COOKIE)
    return response


def is_part(request: Request) -> bool:
    """Whether the page on display asks for a part of itself."""
    return request.headers.get("hx-request") == "true"


def progress_code(*, goes_on: bool) -> int:
    """The status of a part for which the page asks again and again, until none is to come."""
    return 200 if goes_on else POLLING_ENDS


def done(request: Request, path: str, notice: str) -> Response:
    """After an action: show a page again, with what has happened."""
    response = RedirectResponse(path, 303)
    cookie = cookie_of(NOTICE_COOKIE, console_of(request).seal.seal_notice(notice), NOTICE_S)
    response.headers.append("set-cookie", cookie)
    return response


def with_session(request: Request, response: Response, session: Session) -> Response:
    """Begin a session: of someone who has logged in, or out."""
    seal = console_of(request).seal
    name = session_cookie(is_tls=request.url.scheme == "https")
    response.headers.append("set-cookie", cookie_of(name, seal.seal(session), seal.session_s))
    return response


class Problem(NamedTuple):
    status: int
    title: str
    advice: str


_PROBLEMS: Final[Mapping[type[SlateMQError], Problem]] = {
    InvalidArgument: Problem(400, "That cannot be done", "Go back, and change what is named."),
    PermissionDenied: Problem(
        403,
        "You may not do that",
        "Ask the person who keeps the policy: `slatemq access check` says which rule is missing.",
    ),
    NotFound: Problem(
        404, "Not found", "It may have been removed meanwhile, or its address is wrong."
    ),
    AlreadyExists: Problem(409, "It exists already", "Use it, or choose another name."),
    FailedPrecondition: Problem(409, "Not in this state", "Load the page again to see its state."),
    Aborted: Problem(409, "It was changed meanwhile", "Load the page again, then retry."),
    ResourceExhausted: Problem(429, "Too much at once", "Wait a moment, then retry."),
    Unavailable: Problem(
        503,
        "A service is down",
        "Retry in a moment. The page Processes and `slatemq status` say which one it is, and why.",
    ),
    DeadlineExceeded: Problem(
        504, "No answer in time", "It may have happened all the same: look before you repeat it."
    ),
    DataLoss: Problem(500, "Stored bytes are damaged", "The log of the service says more."),
}
_OTHER: Final = Problem(500, "Something is wrong with SlateMQ", "Report it with the service's log.")

_OPEN: Final = (
    "Other machines can reach this console, and the instance behind it has no policy: everyone "
    "would be its operator."
)


async def show_error(request: Request, error: Exception) -> Response:
    """The page of what a call met."""
    if isinstance(error, OpenInstance):
        problem = Problem(
            403,
            "Nothing is shown here",
            "Give the services a policy (docs/how-to/secure.md), or have the console listen on "
            "127.0.0.1.",
        )
        return render(request, "error.html", problem.status, problem=problem, message=_OPEN)
    assert isinstance(error, SlateMQError)
    if isinstance(error, Unauthenticated):
        return _to_login(request)
    problem = _PROBLEMS.get(type(error), _OTHER)
    name = "_part_error.html" if is_part(request) else "error.html"
    return render(request, name, problem.status, problem=problem, message=error.message)


def _to_login(request: Request) -> Response:
    if is_part(request):
        page = request.headers.get("hx-current-url", "").partition("://")[2].partition("/")[2]
        return Response(headers={"HX-Redirect": link("/login", back=f"/{page}")})
    path = request.url.path
    back = f"{path}?{request.url.query}" if request.url.query else path
    return RedirectResponse(link("/login", back=back if request.method == "GET" else ""), 303)
