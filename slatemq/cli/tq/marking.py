"""`slatemq tq done`, `fail`, `release` and `set`: changes of single messages, in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from slatemq.cli.failures import EXIT_REFUSED, error_fields
from slatemq.cli.output import note, write_json
from slatemq.cli.parameters import WORDS
from slatemq.cli.session import Session
from slatemq.cli.tq.entries import (
    OFFSET_DIGITS_MAX,
    STDIN,
    FileCommand,
    file_argument,
    fsync_option,
    is_token,
    offset_of,
    stdin_lines,
    translated_errors,
)
from slatemq.errors import SlateMQError
from slatemq.textqueue import Claim, Entry, TextQueue

which_argument = click.argument("which", nargs=-1, required=True)


@click.command("done", cls=FileCommand)
@file_argument
@which_argument
@fsync_option
def done(session: Session, file: str, which: tuple[str, ...], fsync: bool) -> None:
    """Mark messages of FILE as processed.

    Examples:
      slatemq tq done jobs.tq 44                      the offset that ls printed
      slatemq tq done jobs.tq @k3jf9a2mxq4e           the token of a claim
      slatemq tq ls jobs.tq | grep photo | cut -f 1 | slatemq tq done jobs.tq -
    """
    queue = TextQueue(file, fsync=fsync)

    _each(session, which, lambda one: _finish(queue, one, TextQueue.done, Claim.done))


@click.command("fail", cls=FileCommand)
@file_argument
@which_argument
@click.option("--code", type=WORDS, default="", help="Write this into the variable error.")
@fsync_option
def fail(session: Session, file: str, which: tuple[str, ...], code: str, fsync: bool) -> None:
    r"""Mark messages of FILE as failed.

    Examples:
      slatemq tq fail jobs.tq 44
      slatemq tq fail jobs.tq @k3jf9a2mxq4e --code E-GONE

    A message has room for a code if it was appended with --reserve error=20, or
    has a line such as `\error=        ` below it.
    """
    queue = TextQueue(file, fsync=fsync)

    def fail_one(one: str) -> None:
        entry = _finish(
            queue, one, lambda q, entry: q.fail(entry, code), lambda claim: claim.fail(code)
        )
        if code and not any(variable.name == "error" for variable in entry.variables):
            note(f"{one}: the code is not stored, because there is no variable error")

    _each(session, which, fail_one)


@click.command("release", cls=FileCommand)
@file_argument
@click.argument("which", nargs=-1, required=True, metavar="TOKEN...")
def release(session: Session, file: str, which: tuple[str, ...]) -> None:
    """Release claimed messages of FILE, which stay queued.

    Examples:
      slatemq tq release jobs.tq @k3jf9a2mxq4e
      slatemq tq release jobs.tq @k3jf9a2mxq4e @9s0dm3v1kq7x
    """
    queue = TextQueue(file)

    def release_one(token: str) -> None:
        if not is_token(token):
            raise click.UsageError(f"{token!r} is not a token such as @k3jf9a2mxq4e")
        queue.claimed(token).release()

    _each(session, which, release_one)


@click.command("set", cls=FileCommand)
@file_argument
@click.argument("which")
@click.argument("name", type=WORDS)
@click.argument("value", type=WORDS)
@fsync_option
def set_(session: Session, file: str, which: str, name: str, value: str, fsync: bool) -> None:
    """Set the variable NAME (or its index, from 0) of an entry of FILE to VALUE.

    Examples:
      slatemq tq set jobs.tq 44 step resized
      slatemq tq set jobs.tq 44 0 'ann checked'       by index
      slatemq tq set jobs.tq @k3jf9a2mxq4e step resized

    The room for a value is reserved when the message is appended (--reserve
    step=10), or in an editor, as spaces at the end of its line.
    """
    queue = TextQueue(file, fsync=fsync)

    def change(one: str) -> None:
        with translated_errors():
            holder = queue.claimed(one) if is_token(one) else queue.entry(offset_of(one))
            entry = holder.entry if isinstance(holder, Claim) else holder
            named = any(variable.name == name for variable in entry.variables)
            key = name if named or not name.isdecimal() else int(name[:OFFSET_DIGITS_MAX])
            if isinstance(holder, Claim):
                holder.set_variable(key, value)
            else:
                queue.set_variable(entry, key, value)

    _each(session, (which,), change)


def _finish(
    queue: TextQueue,
    one: str,
    mark: Callable[[TextQueue, Entry], Entry],
    finish: Callable[[Claim], None],
) -> Entry:
    """Finish a message by its offset or token; return it as it is then."""
    if not is_token(one):
        return mark(queue, queue.entry(offset_of(one)))
    claim = queue.claimed(one)
    finish(claim)
    return claim.entry


def _each(session: Session, which: Sequence[str], change: Callable[[str], object]) -> None:
    refused = False
    for one in _with_lines(which):
        fields: dict[str, Any] = {"which": one, "ok": True}
        try:
            with translated_errors():
                change(one)
        except SlateMQError as error:
            refused = True
            fields |= {"ok": False, "error": error_fields(error)}
            if not session.json:
                note(f"{one}: {error.message}")
        if session.json:
            write_json(fields)
    if refused:
        sys.exit(EXIT_REFUSED)


def _with_lines(which: Sequence[str]) -> Iterator[str]:
    for one in which:
        if one == STDIN:
            yield from (line.strip() for line in stdin_lines() if line.strip())
        else:
            yield one
