"""Logging in with a token, and out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from services.console.measures import REFUSED
from services.console.rendering import console_of, field_of, render, session_of, with_session
from services.console.sessions import TOKEN_LENGTH_MAX, Session
from slatemq.errors import InvalidArgument, Unauthenticated


async def show_login(request: Request) -> Response:
    return render(request, "login.html", back=field_of(request, "back"), problem="")


async def log_in(request: Request) -> Response:
    """Check the token, and begin a session with it."""
    token, back = field_of(request, "token").strip(), field_of(request, "back")
    problem = ""
    if not token:
        problem = "Enter a token: `slatemq access token NAME` makes one."
    elif len(token) > TOKEN_LENGTH_MAX:
        problem = f"The console takes tokens of up to {TOKEN_LENGTH_MAX:,} characters."
    else:
        try:
            await console_of(request).clients.check(token)
        except (InvalidArgument, Unauthenticated) as error:
            problem = error.message
        console_of(request).measures.logins.add(1, {REFUSED: bool(problem)})
    if problem:
        return render(request, "login.html", 401, back=back, problem=problem)
    response = RedirectResponse(_own_path(back), 303)
    return with_session(request, response, Session(token))


async def log_out(request: Request) -> Response:
    session = session_of(request)
    if session.token:  # Anyone can begin a session without.
        console_of(request).seal.end(session)
    return with_session(request, RedirectResponse("/login", 303), Session())


def _own_path(back: str) -> str:
    """Where to go after a login: a page of ours, never another site."""
    is_own = back.startswith("/") and not back.startswith("//") and "\\" not in back
    return back if is_own and back.isprintable() else "/"
