"""`slatemq tq`: queue files that people read and edit. No server is asked."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import click

from slatemq.cli.groups import Group
from slatemq.cli.output import json_pieces, note, say, write_bytes, write_json
from slatemq.cli.parameters import DURATION, WORDS
from slatemq.cli.session import Session, pass_session
from slatemq.cli.tq import marking
from slatemq.cli.tq.input import (
    ALL,
    STDIN,
    entries_of,
    finishing,
    name_of,
    reserved,
    states_of,
    stdin_batches,
    stdin_text,
    warn_of_mark,
)
from slatemq.cli.tq.options import (
    fsync_option,
    json_option,
    options,
    reading_options,
    states_option,
)
from slatemq.cli.tq.output import entry_fields, oddities, translated_errors, write_entry
from slatemq.textqueue import Claim, State, TextQueue, TextQueueError
from slatemq.textqueue.queue import LEASE

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
on stdin, one on each line. `slatemq tq COMMAND --help` has more examples.
"""

LS_EPILOG = """\
\b
Examples:
  slatemq tq ls jobs.tq
  slatemq tq ls jobs.tq --state error --state processed
  slatemq tq ls jobs.tq --json | jq -r .text      each text as it is
  cat jobs.*.tq | slatemq tq ls - --state all     several files as one
"""

NEXT_EPILOG = """\
\b
Examples:
  slatemq tq next jobs.tq --text                a look, which changes nothing
  slatemq tq next jobs.tq --claim --lease 30m   token, state and text
  slatemq tq next jobs.tq --claim --json | jq -r .token

\b
A claim is over with its lease, whatever becomes of the process that made it.
"""

APPEND_EPILOG = """\
\b
Examples:
  slatemq tq append jobs.tq 'resize photo 7'
  slatemq tq append jobs.tq 'photo 7' --var retries=03 --reserve error=20
  git log -1 | slatemq tq append jobs.tq -        one message of many lines
  tail -f log | slatemq tq append jobs.tq --lines
"""

CHECK_EPILOG = """\
\b
Examples:
  slatemq tq check jobs.tq
  slatemq tq check jobs.tq --strict --json
  slatemq tq check jobs.tq && vi jobs.tq
"""

COMPACT_EPILOG = """\
\b
Examples:
  slatemq tq compact jobs.tq
  slatemq tq ls jobs.tq --state error --json > errors.jsonl
  slatemq tq compact jobs.tq --errors
"""


@click.group("tq", cls=Group, epilog=EPILOG)
@json_option
def tq() -> None:
    """Work with queue files (TextQueue), without a server."""


for command in (marking.done, marking.fail, marking.release, marking.set_):
    tq.add_command(command)


@tq.command("ls", epilog=LS_EPILOG)
@reading_options
@states_option("Entries")
@click.option("--strict", is_flag=True, help="Refuse unknown control characters.")
@pass_session
def ls(session: Session, file: str, states: tuple[str, ...], strict: bool) -> None:
    """List the queued messages of FILE (- reads stdin), or entries in other states."""
    wanted = states_of(states)
    with translated_errors():
        stream = sys.stdout.buffer
        warn_of_mark(file)
        for entry in entries_of(file, strict, wanted):
            if session.json:
                stream.writelines(json_pieces(entry_fields(entry)))
            else:
                write_entry(entry, str(entry.offset))


@tq.command("next", epilog=NEXT_EPILOG)
@options
@states_option("An entry")
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
    states: tuple[str, ...],
    claiming: bool,
    lease: timedelta,
    only_text: bool,
    fsync: bool,
) -> None:
    """Print the first queued message of FILE. Nothing there is no error: stdout stays empty.

    With --claim it is the first that nobody works on; its retries are counted down, and `done`,
    `fail` or `release` with the token that is printed end the claim.
    """
    if claiming and set(states) - {State.QUEUED}:
        raise click.UsageError("--claim takes queued messages alone")
    if lease <= timedelta(0):
        raise click.UsageError("--lease must be longer than nothing, such as 5m")
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
            known = "there" if ALL in states else " or ".join(states or (State.QUEUED,))
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
            write_bytes(entry.text.encode() + b"\n")
        else:
            write_entry(entry, claim.token if claim else str(entry.offset))
            sys.stdout.buffer.flush()
    except BaseException:
        # Nobody has got the token: it would be kept from all others until its lease is over.
        if claim is not None:
            with suppress(TextQueueError, OSError):
                claim.release()
        raise


@tq.command("append", epilog=APPEND_EPILOG)
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
    with translated_errors():
        if lines:
            _append_lines(session, queue, variables)
            return
        entry = queue.append(stdin_text() if text in (None, STDIN) else str(text), variables)
    write_json({"offset": entry.offset}) if session.json else say(str(entry.offset))


@tq.command("check", epilog=CHECK_EPILOG)
@reading_options
@click.option("--strict", is_flag=True, help="Refuse unknown control characters.")
@pass_session
def check(session: Session, file: str, strict: bool) -> None:
    """Read all of FILE (- reads stdin): count its entries, and warn of likely mistakes."""
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
    if session.json:
        write_json(fields)
    else:
        say("  ".join(f"{state}: {counts[state]}" for state in State))


@tq.command("compact", epilog=COMPACT_EPILOG)
@options
@click.option("--errors", is_flag=True, help="Leave out messages in error too.")
@pass_session
def compact(session: Session, file: str, errors: bool) -> None:
    """Leave processed messages out of FILE. Claims go on; other entries are kept as they are."""
    with translated_errors():
        warn_of_mark(file)
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
