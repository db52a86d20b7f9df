"""`slatemq tq`: queue files that people read and edit, without a server."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import click

from slatemq.cli.failures import EXIT_REFUSED, error_fields
from slatemq.cli.output import json_pieces, note, write_bytes, write_json
from slatemq.cli.parameters import DURATION, WORDS, flag
from slatemq.cli.session import JSON_OPTION, Session
from slatemq.cli.tq.entries import (
    ALL,
    OFFSET_DIGITS_MAX,
    STDIN,
    FileGroup,
    entries_of,
    entry_fields,
    file_argument,
    finishing,
    fsync_option,
    is_token,
    name_of,
    oddities,
    offset_of,
    reserved,
    states_of,
    states_option,
    stdin_batches,
    stdin_lines,
    stdin_text,
    stream_argument,
    translated_errors,
    warn_of_mark,
    write_entry,
)
from slatemq.errors import SlateMQError
from slatemq.textqueue import Claim, Entry, State, TextQueue, TextQueueError
from slatemq.textqueue.queue import LEASE

EPILOG = """\
To start:
  slatemq tq append jobs.tq 'resize photo 7' --reserve error=20
  slatemq tq ls jobs.tq
  slatemq tq next jobs.tq --claim
  slatemq tq done jobs.tq @k3jf9a2mxq4e     the token that next printed

In pipelines:
  seq 1000 | slatemq tq append jobs.tq --lines
  slatemq tq ls jobs.tq | cut -f 3
  slatemq tq ls jobs.tq --state error --json | jq -r .text
  slatemq tq ls jobs.tq | grep photo | cut -f 1 | slatemq tq done jobs.tq -

A line of output is offset or token, state, and text (a newline as \\n, a tab
as \\t), separated by tabs. WHICH is an offset, a token, or - to read them from
stdin, one on each line. `slatemq tq COMMAND --help` has more examples.
"""


@click.group("tq", cls=FileGroup, epilog=EPILOG, params=[JSON_OPTION])
def tq() -> None:
    """Work with queue files (TextQueue), without a server."""


@tq.command("ls")
@stream_argument
@states_option("List entries")
@flag("--strict", help="Refuse unknown control characters.")
def ls(session: Session, file: str, states: tuple[str, ...], strict: bool) -> None:
    """List the queued messages of FILE (- reads stdin), or entries in other states.

    Examples:
      slatemq tq ls jobs.tq
      slatemq tq ls jobs.tq --state error --state processed
      slatemq tq ls jobs.tq --json | jq -r .text      each text, unescaped
      cat jobs.*.tq | slatemq tq ls - --state all     several files as one
    """
    wanted = states_of(states)
    with translated_errors():
        stream = sys.stdout.buffer
        warn_of_mark(file)
        for entry in entries_of(file, strict, wanted):
            if session.json:
                stream.writelines(json_pieces(entry_fields(entry)))
            else:
                write_entry(entry, str(entry.offset))


@tq.command("next")
@file_argument
@states_option("Print an entry")
@flag("--claim", "claiming", help="Claim it, so that no other worker gets it.")
@click.option("--lease", type=DURATION, default=LEASE, help="How long a claim lasts. [default: 5m]")
@flag("--text", "only_text", help="Print only the text, unescaped; not with --claim.")
@fsync_option
def next_(
    session: Session,
    file: str,
    states: tuple[str, ...],
    claiming: bool,
    lease: timedelta,
    only_text: bool,
    fsync: bool,
) -> None:
    """Print the first queued message of FILE. If there is none, stdout stays empty.

    --claim takes the first message that is not claimed, and counts its retries down; `done`,
    `fail` or `release` with the printed token end the claim.

    Examples:
      slatemq tq next jobs.tq --text                shows it, changes nothing
      slatemq tq next jobs.tq --claim --lease 30m   token, state and text
      slatemq tq next jobs.tq --claim --json | jq -r .token

    A claim ends with its lease, even if the process that made it ends before.
    """
    if claiming and set(states) - {State.QUEUED}:
        raise click.UsageError("--claim takes queued messages only: leave out --state")
    if claiming and only_text:
        raise click.UsageError("--text would leave out the token of --claim: use --json")
    if lease <= timedelta(0):
        raise click.UsageError("--lease must be longer than 0, such as 5m")
    claim: Claim | None = None
    with translated_errors():
        queue = TextQueue(file, fsync=fsync, owner="slatemq tq next")
        warn_of_mark(file)
        if claiming:
            claim = queue.claim(lease, tied=False)
            entry = claim.entry if claim else None
        else:
            entry = next(queue.entries(*states_of(states)), None)
    if entry is None:
        if not session.json:
            known = "" if ALL in states else " or ".join(states or (State.QUEUED,)) + " "
            note(f"{file} has no {'unclaimed message' if claiming else f'{known}entry'}")
        return
    fields = entry_fields(entry)
    if claim is not None:
        fields |= {"token": claim.token, "deadline_ms": claim.deadline_ms}
    try:
        if session.json:
            write_json(fields)
        elif only_text:
            write_bytes(entry.text.encode() + b"\n")
        else:
            write_entry(entry, claim.token if claim else str(entry.offset))
            sys.stdout.buffer.flush()
    except BaseException:
        # The token was not printed: the message would stay claimed until its lease ends.
        if claim is not None:
            with suppress(TextQueueError, OSError):
                claim.release()
        raise


@tq.command("append")
@file_argument
@click.argument("text", type=WORDS, required=False)
@flag("--lines", help="Append each line of stdin as a message.")
@click.option(
    "--var", "values", type=WORDS, multiple=True, metavar="NAME=VALUE", help="Add a variable."
)
@click.option(
    "--reserve",
    "rooms",
    multiple=True,
    metavar="NAME=N",
    help="Add an empty variable with room for N bytes.",
)
@fsync_option
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

    FILE is created if it does not exist. Each message gets the variables. Lines are appended as
    they arrive, and their count is printed at the end, also after a failure.

    Examples:
      slatemq tq append jobs.tq 'resize photo 7'
      slatemq tq append jobs.tq 'photo 7' --var retries=03 --reserve error=20
      git log -1 | slatemq tq append jobs.tq -        one message of many lines
      tail -f log | slatemq tq append jobs.tq --lines
    """
    if lines == (text is not None):
        raise click.UsageError("give one of TEXT, - (stdin) and --lines")
    variables = [*values, *(reserved(room) for room in rooms)]
    queue = TextQueue(file, fsync=fsync)
    with translated_errors():
        if lines:
            _append_lines(session, queue, variables)
            return
        entry = queue.append(stdin_text() if text in (None, STDIN) else str(text), variables)
    session.show({"offset": entry.offset}, str(entry.offset))


@tq.command("check")
@stream_argument
@flag("--strict", help="Refuse unknown control characters.")
def check(session: Session, file: str, strict: bool) -> None:
    """Read all of FILE (- reads stdin): count its entries, and warn of likely mistakes.

    Examples:
      slatemq tq check jobs.tq
      slatemq tq check jobs.tq --strict --json
      slatemq tq check jobs.tq && vi jobs.tq
    """
    counts: Counter[State] = Counter()
    with translated_errors():
        if file != STDIN:
            TextQueue(file).has_all_appends()
        warn_of_mark(file)
        for entry in entries_of(file, strict, list(State)):
            counts[entry.state] += 1
            for line, warning in oddities(entry):
                note(f"{name_of(file)}:{line}: {warning}")
    fields = {f"{state}_count": counts[state] for state in State}
    session.show(fields, "  ".join(f"{state}: {counts[state]}" for state in State))


@tq.command("compact")
@file_argument
@flag("--errors", help="Also remove messages in error.")
def compact(session: Session, file: str, errors: bool) -> None:
    """Remove processed messages from FILE. Claims stay valid; other entries are kept.

    Examples:
      slatemq tq compact jobs.tq
      slatemq tq ls jobs.tq --state error --json > errors.jsonl
      slatemq tq compact jobs.tq --errors
    """
    with translated_errors():
        warn_of_mark(file)
        result = TextQueue(file).compact(errors=errors)
    session.show(asdict(result), f"removed: {result.removed_count}  kept: {result.kept_count}")


def _append_lines(session: Session, queue: TextQueue, variables: list[str]) -> None:
    count = 0
    try:
        for texts in stdin_batches():
            with finishing():
                count += queue.append_all(texts, variables)
    finally:
        session.show({"appended_count": count}, f"appended: {count}")


which_argument = click.argument("which", nargs=-1, required=True)


@tq.command("done")
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


@tq.command("fail")
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


@tq.command("release")
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


@tq.command("set")
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
