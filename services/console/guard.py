"""What every request passes before a page sees it, and what every answer carries.

::

    request ─► its host ─► its session ─► of a POST: size, time, origin, form token ─► page
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from typing import Final
from urllib.parse import parse_qsl

from opentelemetry import trace
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.serving.process.logs import AUDIT_LOGGER
from services.console.sessions import Session, SessionSeal

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 4 << 20
"""Of a form: the largest payload that is edited in a page, as hex, and its headers."""

BODY_S: Final = 20.0
"""How long the body of a form may take to arrive."""

LARGE_BYTES: Final = 16 << 10
"""Of a form: from here on its body takes one of few places. So slow ones hold up no login."""

BODIES_MAX: Final = 16
"""Large forms at once of those who are logged in, from where they are read to their answers."""

UNKNOWN_BODIES_MAX: Final = 2
"""And of those who are not, where there may be an instance without logins. Elsewhere none is read:
no form of theirs is larger than a login's."""

FIELDS_MAX: Final = 2_000

FORM_TOKEN: Final = "form_token"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)

HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}

STRICT_TRANSPORT: Final = "max-age=31536000"

_HOST: Final = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", re.ASCII)


class Refusal(Exception):
    """A request that no page answers."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Guard:
    """An ASGI middleware. Pages find `session`, `form` and `form_token` in the request's state.

    What they add to its `place`, an exit stack, they hold until the answer is sent.
    """

    def __init__(
        self, app: ASGIApp, seal: SessionSeal, hosts: frozenset[str], *, needs_login: bool = False
    ) -> None:
        """`hosts`: the names that a request may be for; empty: any.

        `needs_login`: nothing is shown without a login.
        """
        self._app = app
        self._seal = seal
        self._hosts = hosts
        self._needs_login = needs_login
        self._bodies = asyncio.Semaphore(BODIES_MAX)
        self._unknown_bodies = asyncio.Semaphore(UNKNOWN_BODIES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_tls = scope["scheme"] == "https"
        name = session_cookie(is_tls=is_tls)
        found = self._seal.open(Request(scope).cookies.get(name, ""))
        session = found or Session()

        has_begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                answer = MutableHeaders(scope=message)
                for key, value in HEADERS.items():
                    answer.setdefault(key, value)
                if is_tls:
                    answer.setdefault("Strict-Transport-Security", STRICT_TRANSPORT)
                cookies = answer.getlist("set-cookie")
                is_set = any(cookie.startswith(f"{name}=") for cookie in cookies)
                if found is None and not is_set and _may_begin_session(scope):
                    sealed = self._seal.seal(session)
                    answer.append("set-cookie", cookie_of(name, sealed, self._seal.session_s))
            await send(message)

        async with AsyncExitStack() as place:
            try:
                self._check_host(headers)
                scope.setdefault("state", {}).update(
                    session=session,
                    form={},
                    form_token=self._seal.form_token(session),
                    place=place,
                )
                if scope["method"] == "POST":
                    request = Request(scope, receive)
                    bodies = self._bodies if session.token else self._unknown_bodies
                    take_place = partial(place.enter_async_context, bodies)
                    scope["state"]["form"] = await self._form(request, session, take_place)
                is_act = scope["method"] == "POST" and bool(session.token)
                with _trace_of_act(scope) if is_act else nullcontext():
                    await self._app(scope, receive, send_guarded)
            except Refusal as refusal:
                response = PlainTextResponse(str(refusal), refusal.status, {"Connection": "close"})
                await response(scope, receive, send_guarded)
            except Exception:
                if has_begun:
                    raise
                log.exception("%s %s failed", scope["method"], scope["path"])
                text = "The console failed to make this page: its log says why."
                await PlainTextResponse(text, 500)(scope, receive, send_guarded)

    async def _form(
        self, request: Request, session: Session, take_place: Callable[[], Awaitable[object]]
    ) -> dict[str, list[str]]:
        is_small = self._needs_login and not session.token
        form = await _form(request, take_place, LARGE_BYTES if is_small else BODY_BYTES_MAX)
        if not self._seal.is_form_token(session, form.get(FORM_TOKEN, [""])[0]):
            raise Refusal(403, "This form is too old. Go back, load the page again, retry.")
        return form

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if host and not _HOST.fullmatch(host):
            raise Refusal(400, "The name in this request's Host header is not valid.")
        if self._hosts and host_name(host) not in self._hosts:
            raise Refusal(
                421,
                "This console listens on loopback, and answers for localhost alone. Open it under "
                "that name, or name this one in SLATEMQ_CONSOLE_HOSTS.",
            )


@contextmanager
def _trace_of_act(scope: Scope) -> Iterator[None]:
    """Log who sent a form, with the trace ID that the services' audit has of what comes of it.

    To the services, all acts come from the console's own address.
    """
    context = trace.get_current_span().get_span_context()  # Of the request, where it is traced.
    if not context.is_valid:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        ids = secrets.randbits(128), secrets.randbits(64)
        context = trace.SpanContext(*ids, is_remote=False, trace_flags=flags)
    host, port = scope.get("client") or ("", 0)
    request_id = trace.format_trace_id(context.trace_id)
    facts = {"path": scope["path"], "peer": f"{host}:{port}", "request_id": request_id}
    logging.getLogger(AUDIT_LOGGER).info("act", extra=facts)
    with trace.use_span(trace.NonRecordingSpan(context)):
        yield


def session_cookie(*, is_tls: bool) -> str:
    """Its name. With TLS the browser itself holds that only this very host has set it."""
    return "__Host-slatemq" if is_tls else "slatemq"


def cookie_of(name: str, value: str, age_s: int) -> str:
    """A Set-Cookie header that scripts cannot use, and other sites only to link to a page.

    Strict would hold it back with a link, and the page would begin a session in its place.
    """
    secure = "; Secure" if name.startswith("__Host-") else ""
    return f"{name}={value}; Max-Age={age_s}; Path=/; HttpOnly; SameSite=Lax{secure}"


def _may_begin_session(scope: Scope) -> bool:
    """Whether this request would carry the session if the browser had one.

    A form that another site sends carries none: its answer must not end the one that there is.
    """
    return scope["method"] != "POST" and not scope["path"].startswith("/static/")


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return f"{host.lower().partition(']')[0]}]"
    return host.lower().partition(":")[0]


async def _form(
    request: Request, take_place: Callable[[], Awaitable[object]], bytes_max: int
) -> dict[str, list[str]]:
    """The fields of a form. Raises Refusal for a form that is not ours, or too large or slow.

    `take_place` waits for the place of a large one.
    """
    headers = request.headers
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refusal(403, "Forms are sent from the console's own pages alone.")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise Refusal(403, "Forms are sent from the console's own pages alone.")
    kind = headers.get("content-type", "").partition(";")[0]
    if kind != "application/x-www-form-urlencoded":
        raise Refusal(415, "A form is application/x-www-form-urlencoded.")
    return _fields(await _body(request, take_place, bytes_max))


async def _body(
    request: Request, take_place: Callable[[], Awaitable[object]], bytes_max: int
) -> bytes:
    body = b""
    is_large = False
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    raise Refusal(413, f"A form has at most {bytes_max >> 10:,} KiB.")
                if len(body) > LARGE_BYTES and not is_large:
                    is_large = True
                    await take_place()
    except TimeoutError:
        raise Refusal(408, "The form did not arrive in time.") from None
    except ClientDisconnect:  # Anyone can do that: it is no fault to log.
        raise Refusal(400, "The form did not arrive whole.") from None
    return body


def _fields(body: bytes) -> dict[str, list[str]]:
    form: dict[str, list[str]] = {}
    try:
        fields = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="strict"
        )
    except (ValueError, UnicodeDecodeError):
        raise Refusal(400, "The form cannot be read: send UTF-8, percent-encoded.") from None
    for key, value in fields:
        form.setdefault(key, []).append(value)
    return form
