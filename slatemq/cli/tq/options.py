"""Options and arguments that several commands of queue files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slatemq.cli.session import Session, pass_session
from slatemq.cli.tq.input import ALL, STDIN
from slatemq.textqueue import State

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """Add --json, which goes into the session; the session's other options have no meaning."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_keep_json,
        help="Print one JSON object per line, for programs.",
    )(function)


def with_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add FILE and --json, and pass the session first."""
    argument = click.argument("file", type=click.Path(), callback=_no_stream)
    return argument(json_option(pass_session(function)))


def with_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `with_file`, where FILE may be stdin."""
    return click.argument("file", type=click.Path())(json_option(pass_session(function)))


def _no_stream(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value == STDIN:
        raise click.BadParameter("stdin cannot be changed: give a file (./- for one named -)")
    return value


def _keep_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().ensure_object(Session).json = True


fsync_option = click.option(
    "--fsync", is_flag=True, help="Write changes to the disk before returning."
)


def states_option(text: str) -> Callable[[F], F]:
    return click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([*(state.value for state in State), ALL]),
        help=f"{text} in this state; repeatable.  [default: queued]",
    )
