"""`slatemq tq`: queue files that people read and edit. No server is asked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import click

from slatemq.cli.failures import EXIT_REFUSED, error_fields
from slatemq.cli.groups import Group
from slatemq.cli.output import json_line, note, say, write_json
from slatemq.cli.parameters import DURATION, WORDS
from slatemq.cli.session import Session, pass_session
from slatemq.cli.textqueue_input import (
    ALL,
    OFFSET_DIGITS_MAX,
    STDIN,
    entries_of,
    finishing,
    is_token,
    offset_of,
    reserved,
    states_of,
    stdin_batches,
    stdin_lines,
    stdin_text,
)
from slatemq.cli.textqueue_output import entry_fields, entry_line, oddities, told
from slatemq.errors import SlateMQError
from slatemq.textqueue import Claim, Entry, State, TextQueue, TextQueueError
from slatemq.textqueue.queue import LEASE

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = """\
\b
A round:
  slatemq tq append jobs.tq 'resize photo 7' --reserve error=20
  slatemq tq ls jobs.tq
  slatemq tq next jobs.tq --claim
  slatemq tq done jobs.tq @k3jf9a2mxq4e     the token that next printed

\b
In pipelines:
  seq 1000 | slatemq tq append jobs.tq --lines
  slatemq tq ls jobs.tq | cut -f 3
  slatemq tq ls jobs.tq --state error --json | jq -r .text
  slatemq tq ls jobs.tq | grep photo | cut -f 1 | slatemq tq done jobs.tq -

\b
A line of output is offset or token, state, and text (a newline as \\n, a tab
as \\t), with tabs between them. WHICH is an offset, a token, or - for those
on stdin, one on each line.
"""


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
which_argument = click.argument("which", nargs=-1, required=True)


@click.group("tq", cls=Group, epilog=EPILOG)
@json_option
def tq() -> None:
    """Work with queue files (TextQueue), without a server."""


@tq.command("ls")
@reading_options
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([*(state.value for state in State), ALL]),
    help="Entries in this state; repeatable.  [default: queued]",
)
@click.option("--strict", is_flag=True, help="Refuse unknown control characters.")
@pass_session
def ls(session: Session, file: str, states: tuple[str, ...], strict: bool) -> None:
    """List the queued messages of FILE (- reads stdin), or entries in other states."""
    wanted = states_of(states)
    with told():
        stream = sys.stdout.buffer
        for entry in entries_of(file, strict, wanted):
            fields = entry_fields(entry)
            stream.write(
                json_line(fields) if session.json else entry_line(entry, str(entry.offset))
            )


@tq.command("next")
@options
@click.option(
    "--state",
    type=click.Choice([*(state.value for state in State), ALL]),
    help="An entry in this state.  [default: queued]",
)
@click.option("--claim", "claiming", is_flag=True, help="Claim it: nobody else gets it meanwhile.")
@click.option("--lease", type=DURATION, default=LEASE, help="How long a claim lasts. [default: 5m]")
@click.option(
    "--text", "only_text", is_flag=True, help="Print the text alone, as it is, and a newline."
)
@fsync_option
@pass_session
def next_(
    session: Session,
    file: str,
    state: str | None,
    claiming: bool,
    lease: timedelta,
    only_text: bool,
    fsync: bool,
) -> None:
    """Print the first queued message of FILE. Nothing there is no error: stdout stays empty.

    With --claim it is the first that nobody works on; its retries are counted down, and `done`,
    `fail` or `release` with the token that is printed end the claim.
    """
    if claiming and state not in (None, State.QUEUED):
        raise click.UsageError("--claim takes queued messages alone")
    if lease <= timedelta(0):
        raise click.UsageError("--lease must be longer than nothing, such as 5m")
    claim: Claim | None = None
    with told():
        queue = TextQueue(file, fsync=fsync, owner="slatemq tq next")
        if claiming:
            claim = queue.claim(lease, tied=False)
            entry = claim.entry if claim else None
        else:
            entry = next(queue.entries(*states_of(() if state is None else (state,))), None)
    if entry is None:
        if not session.json:
            known = "there" if state == ALL else state or State.QUEUED
            what = "queued that nobody has" if claiming else known
            note(f"nothing is {what} in {file}")
        return
    fields = entry_fields(entry)
    if claim is not None:
        fields |= {"token": claim.token, "deadline_ms": claim.deadline_ms}
    try:
        if session.json:
            write_json(fields)
        elif only_text:
            _write(entry.text.encode() + b"\n")
        else:
            _write(entry_line(entry, claim.token if claim else str(entry.offset)))
    except BaseException:
        # Nobody has got the token: it would be kept from all others until its lease is over.
        if claim is not None:
            with suppress(TextQueueError, OSError):
                claim.release()
        raise


@tq.command("append")
@options
@click.argument("text", type=WORDS, required=False)
@click.option("--lines", is_flag=True, help="Each line of stdin is a message.")
@click.option("--var", "values", type=WORDS, multiple=True, metavar="NAME=VALUE", help="Variable.")
@click.option(
    "--reserve", "rooms", multiple=True, metavar="NAME=N", help="Empty variable with N bytes."
)
@fsync_option
@pass_session
def append(
    session: Session,
    file: str,
    text: str | None,
    lines: bool,
    values: tuple[str, ...],
    rooms: tuple[str, ...],
    fsync: bool,
) -> None:
    """Append TEXT to FILE, or - for stdin without its last newline, or each line with --lines.

    FILE is made if it is not there. The variables belong to each message. Lines are appended as
    they come, and counted however it ends.
    """
    if lines == (text is not None):
        raise click.UsageError("give one of TEXT, - (stdin) and --lines")
    variables = [*values, *(reserved(room) for room in rooms)]
    queue = TextQueue(file, fsync=fsync)
    with told():
        if lines:
            _append_lines(session, queue, variables)
            return
        entry = queue.append(stdin_text() if text in (None, STDIN) else str(text), variables)
    write_json({"offset": entry.offset}) if session.json else say(str(entry.offset))


@tq.command("done")
@options
@which_argument
@fsync_option
@pass_session
def done(session: Session, file: str, which: tuple[str, ...], fsync: bool) -> None:
    """Mark messages of FILE as processed."""
    queue = TextQueue(file, fsync=fsync)

    def finish_one(one: str) -> None:
        _finish(queue, one, TextQueue.done, Claim.done)

    _each(session, which, finish_one)


@tq.command("fail")
@options
@which_argument
@click.option(
    "--code", type=WORDS, default="", help="Goes into the variable error, if it is there."
)
@fsync_option
@pass_session
def fail(session: Session, file: str, which: tuple[str, ...], code: str, fsync: bool) -> None:
    """Mark messages of FILE as failed for good."""
    queue = TextQueue(file, fsync=fsync)

    def fail_one(one: str) -> None:
        entry = _finish(
            queue, one, lambda q, entry: q.fail(entry, code), lambda claim: claim.fail(code)
        )
        if code and not any(variable.name == "error" for variable in entry.variables):
            note(f"{one}: it has no variable error: the code is kept nowhere")

    _each(session, which, fail_one)


@tq.command("release")
@options
@click.argument("which", nargs=-1, required=True, metavar="TOKEN...")
@pass_session
def release(session: Session, file: str, which: tuple[str, ...]) -> None:
    """Give claimed messages of FILE back, still queued."""
    queue = TextQueue(file)

    def release_one(token: str) -> None:
        if not is_token(token):
            raise click.UsageError(f"{token!r} is no token such as @k3jf9a2mxq4e")
        queue.claimed(token).release()

    _each(session, which, release_one)


@tq.command("set")
@options
@click.argument("which")
@click.argument("name", type=WORDS)
@click.argument("value", type=WORDS)
@fsync_option
@pass_session
def set_(session: Session, file: str, which: str, name: str, value: str, fsync: bool) -> None:
    """Set the variable NAME (or its index, from 0) of an entry of FILE to VALUE."""
    queue = TextQueue(file, fsync=fsync)

    def change(one: str) -> None:
        with told():
            holder = queue.claimed(one) if is_token(one) else queue.entry(offset_of(one))
            entry = holder.entry if isinstance(holder, Claim) else holder
            named = any(variable.name == name for variable in entry.variables)
            key = name if named or not name.isdecimal() else int(name[:OFFSET_DIGITS_MAX])
            if isinstance(holder, Claim):
                holder.set_variable(key, value)
            else:
                queue.set_variable(entry, key, value)

    _each(session, (which,), change)


@tq.command("check")
@reading_options
@click.option("--strict", is_flag=True, help="Refuse unknown control characters.")
@pass_session
def check(session: Session, file: str, strict: bool) -> None:
    """Read all of FILE (- reads stdin): count its entries, and warn of likely mistakes."""
    counts: Counter[State] = Counter()
    with told():
        if file != STDIN:
            TextQueue(file).has_all_appends()
        for entry in entries_of(file, strict, list(State)):
            counts[entry.state] += 1
            for warning in oddities(entry):
                note(f"{file}:{entry.line}: {warning}")
    fields = {f"{state}_count": counts[state] for state in State}
    if session.json:
        write_json(fields)
    else:
        say("  ".join(f"{state}: {counts[state]}" for state in State))


@tq.command("compact")
@options
@click.option("--errors", is_flag=True, help="Leave out messages in error too.")
@pass_session
def compact(session: Session, file: str, errors: bool) -> None:
    """Leave processed messages out of FILE. Claims go on; other entries are kept as they are."""
    with told():
        result = TextQueue(file).compact(errors=errors)
    if session.json:
        write_json(
            {
                "kept_count": result.kept_count,
                "removed_count": result.removed_count,
                "bytes_before": result.bytes_before,
                "bytes_after": result.bytes_after,
            }
        )
    else:
        say(f"removed: {result.removed_count}  kept: {result.kept_count}")


def _append_lines(session: Session, queue: TextQueue, variables: list[str]) -> None:
    count = 0
    try:
        for texts in stdin_batches():
            with finishing():
                count += queue.append_all(texts, variables)
    finally:
        write_json({"appended_count": count}) if session.json else say(f"appended: {count}")


def _finish(
    queue: TextQueue,
    one: str,
    mark: Callable[[TextQueue, Entry], Entry],
    finish: Callable[[Claim], None],
) -> Entry:
    """The message as it is then."""
    if not is_token(one):
        return mark(queue, queue.entry(offset_of(one)))
    claim = queue.claimed(one)
    finish(claim)
    return claim.entry


def _each(session: Session, which: Sequence[str], change: Callable[[str], None]) -> None:
    """Do it to each, told apart; what is refused does not stop the others."""
    refused = False
    for one in _spelt_out(which):
        fields: dict[str, Any] = {"which": one, "ok": True}
        try:
            with told():
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


def _spelt_out(which: Sequence[str]) -> Iterator[str]:
    for one in which:
        if one == STDIN:
            yield from (line.strip() for line in stdin_lines() if line.strip())
        else:
            yield one


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
