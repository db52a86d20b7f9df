"""Options and arguments that several commands of queue files have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slatemq.cli.session import Session
from slatemq.cli.tq.input import ALL, STDIN
from slatemq.textqueue import State

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """Adds --json, which ends up in the session; the other options of the session mean nothing."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_keep_json,
        help="One JSON object per line, for programs.",
    )(function)


def options(function: F) -> F:
    """Adds FILE and --json."""
    return click.argument("file", type=click.Path(), callback=_no_stream)(json_option(function))


def reading_options(function: F) -> F:
    """The same for what only reads: FILE may be stdin."""
    return click.argument("file", type=click.Path())(json_option(function))


def _no_stream(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value == STDIN:
        raise click.BadParameter("stdin can only be read: give a file (./- for one of that name)")
    return value


def _keep_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().ensure_object(Session).json = True


fsync_option = click.option("--fsync", is_flag=True, help="Be on the disk before this returns.")


def states_option(text: str) -> Callable[[F], F]:
    """Adds --state."""
    return click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([*(state.value for state in State), ALL]),
        help=f"{text} in this state; repeatable.  [default: queued]",
    )
