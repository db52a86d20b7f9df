"""`slatemq failed edit`: dead letters in an editor."""

from __future__ import annotations

import getpass
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import click

from slatemq._admin.entry_models import EntryState
from slatemq.cli.entry_output import listing_options
from slatemq.cli.failures import EXIT_REFUSED, BadInput
from slatemq.cli.files.exporting import write_export
from slatemq.cli.files.windows_lines import expect_none_in, has_any, mark_taken_out, taken_back
from slatemq.cli.output import note, remark, say
from slatemq.cli.parameters import QUEUE
from slatemq.cli.publish.runs import STATE_VARIABLE
from slatemq.cli.repair.archive_settling import ArchiveSettler
from slatemq.cli.repair.dead_letter_plans import session_of, steps
from slatemq.cli.repair.dead_letter_settling import DeadLetterSettler, review
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.cli.tq.output import translated_errors

FALLBACK_EDITOR = "vi"
EDITOR_VARIABLES = ("VISUAL", "EDITOR")

SH_NOT_EXECUTABLE, SH_NOT_FOUND = 126, 127
"""What a shell ends with that cannot run a program."""

_WANTED = {
    "redrive": "to come back",
    "replace": "to be replaced",
    "drop": "to be dropped",
    "note": "to get a note",
    "already": "done already",
    "conflict": "that cannot be done",
    "none": "left alone",
}
_DONE = {
    "redrive": "came back",
    "replace": "replaced",
    "drop": "dropped",
    "note": "noted",
    "already": "done already",
    "conflict": "not done",
}

EPILOG = """\
\b
Examples:
  slatemq failed edit orders
  EDITOR='code --wait' slatemq failed edit orders --newest --limit 20
  slatemq export orders --state failed --out f.tq
  sed -i 's/^!/-/' f.tq
  slatemq failed edit orders --file f.tq --yes    without an editor
  slatemq failed edit orders --archived --newest --limit 20

\b
Each dead letter is an entry that begins with !. Change that character:
  -   it comes back; with another text or other headers, a new message takes
      its place in the same commit, so that never both or none are there
  =   it is dropped, and listed as done
  !   it stays, as does what you delete or comment out with #
A comment without an ID is kept as a note on the letter below it, and is there
again the next time. The lines with \\ are about the letter; leave id, handle,
etag and content as they are.

\b
What changed is shown, and done after a yes. A letter that was settled
otherwise meanwhile, or has failed again, is told of and left alone: exit code
1, and the file is kept. Going on with --file does nothing twice.

\b
With --archived these are letters that the janitor has archived. They come back
as new messages, keep no notes, and are not listed as done. What was done, or
was under way at a kill, is noted in the file (\\settled=ok, ..); of another one
that is not archived any more nobody knows what it became: it is told of, too.
"""

TOLD = """ Dead letters of a queue of SlateMQ, for you to settle: change the first character
 of one to - to send it again (with its text and headers as you have edited them),
 or to = to drop it. What keeps its !, is deleted or commented out stays as it is.
 A comment of yours above a letter is kept as a note on it. Lines of a text after
 the first begin with a space. Save and close: you are asked before anything is done."""

TOLD_ARCHIVED = """ Archived dead letters of a queue of SlateMQ, for you to settle: change the first
 character of one to - to send it again as a new message (with its text and headers as you have
 edited them), or to = to drop it. What keeps its !, is deleted or commented out stays archived.
 Lines of a text after the first begin with a space. Save and close: you are asked first."""


class NoEditor(BadInput):
    """There is no such program."""


@click.command("edit", epilog=EPILOG)
@click.argument("queue", type=QUEUE)
@click.option(
    "--file",
    "file",
    type=click.Path(),
    metavar="F.tq",
    help="Act on this export, which was edited already.",
)
@click.option("--archived", is_flag=True, help="Those whose content was moved into the archive.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@listing_options("failed, or archived,", to_file=True)
@session_options
@pass_session
def edit(
    session: Session,
    queue: str,
    file: str | None,
    archived: bool,
    yes: bool,
    limit: int | None,
    newest: bool,
    since: int | None,
    until: int | None,
) -> None:
    """Edit the dead letters of QUEUE: send them again, mended or as they are, or drop them."""
    chosen = limit is not None or newest or since is not None or until is not None
    if file is not None and chosen:
        raise click.UsageError("--file has its letters already")
    if file is not None:
        _act(session, queue, file, archived, yes)
        return
    bounds = {"newest_first": newest, "finished_from": since, "finished_until": until}
    path = _new_file(queue)

    async def work() -> int:
        async with session.connect() as client:
            with path.open("xb") as stream:
                done = await write_export(
                    session,
                    client,
                    queue,
                    EntryState.ARCHIVED if archived else EntryState.FAILED,
                    stream,
                    limit,
                    bounds,
                    TOLD_ARCHIVED if archived else TOLD,
                    path.stem.rpartition("-")[2],
                )
            return done[0]

    try:
        count = run(work())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if not count:
        path.unlink()
        note(f"{queue} has no {'archived ' if archived else ''}dead letters")
        return
    before, is_unix = _digest(path), not has_any(path)
    try:
        _open_editor(path, is_unix)
        is_edited = _digest(path) != before
        if is_edited:
            _act_again(session, queue, path, archived, yes, is_unix)
    except BaseException as error:
        again = f"slatemq failed edit {queue}{' --archived' if archived else ''} --file {path}"
        if path.exists() and _digest(path) != before:
            note(f"what you edited is kept: `{again}` goes on with it")
        elif isinstance(error, NoEditor):
            note(f"the export is kept: edit {path}, and `{again}` goes on with it")
        else:
            path.unlink(missing_ok=True)
        raise
    if not is_edited:
        note("nothing was changed")
    path.unlink(missing_ok=True)


def _act_again(
    session: Session, queue: str, path: Path, archived: bool, yes: bool, is_unix: bool
) -> None:
    """Acts on the file; one that cannot be read is edited once more, if somebody is there."""
    while True:
        try:
            _act(session, queue, str(path), archived, yes)
        except BadInput as error:
            if not sys.stdin.isatty():
                raise
            note(str(error))
            click.confirm("Edit it again?", default=True, abort=True, err=True)
            _open_editor(path, is_unix)
        else:
            return


def _act(session: Session, queue: str, file: str, archived: bool, yes: bool) -> None:
    """Shows what a file asks for, asks, and does it."""
    with translated_errors():
        expect_none_in(file)
    name = session_of_file(file)
    settler_of = ArchiveSettler if archived else DeadLetterSettler
    who = f"{_user()}, slatemq failed edit {name}"[:200]

    async def look() -> Counter[str]:
        async with session.connect() as client:
            with translated_errors():
                settler = settler_of(client, who, session.json)
                # With JSON that is the result, and all of stdout.
                return await review(settler, steps(file, queue), remark if session.json else say)

    async def settle() -> Counter[str]:
        async with session.connect() as client:
            settler = settler_of(client, who, session.json)
            with translated_errors():
                await settler.settle_all(steps(file, queue))
            return settler.counts

    if not (session.json and yes):
        wanted = run(look())
        asked = sum(wanted[name] for name in ("redrive", "replace", "drop", "note"))
        said = _sentence(wanted, _WANTED)
        if not asked:
            note(f"nothing to do: {said or 'the file has no letters'}")
            if wanted["conflict"]:
                sys.exit(EXIT_REFUSED)
            return
        if not yes:
            click.confirm(f"{said}. Do it?", abort=True, err=True)
    counts = run(settle())
    if not session.json:
        say(_sentence(counts, _DONE) or "nothing was done")
    if counts["conflict"]:
        sys.exit(EXIT_REFUSED)


def session_of_file(file: str) -> str:
    """What names the export that the file was, or the file where its head is gone."""
    with translated_errors():
        return session_of(file) or Path(file).name


def _sentence(counts: Counter[str], words: Mapping[str, str]) -> str:
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def _open_editor(path: Path, is_unix: bool) -> None:
    """Lets somebody edit the file; `is_unix` where no line ended as those of Windows before."""
    source = next((name for name in EDITOR_VARIABLES if os.environ.get(name)), None)
    editor = os.environ[source] if source else FALLBACK_EDITOR
    # Ctrl-C is the editor's while it runs: it may mean anything there. A handler, since a signal
    # that is ignored would be ignored by the editor too.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        ended = subprocess.run(["sh", "-c", f'{editor} "$@"', editor, str(path)], check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    if ended.returncode in (SH_NOT_EXECUTABLE, SH_NOT_FOUND):
        why = f"${source}" if source else "neither $VISUAL nor $EDITOR is set"
        raise NoEditor(
            f"the editor `{editor}` ({why}) is not there, or is no program: "
            f"set {source or 'EDITOR'} to one that is, such as nano or 'code --wait'"
        )
    if ended.returncode:
        raise BadInput(f"the editor ({editor}) ended with {ended.returncode}: nothing was done")
    if not path.exists():
        raise BadInput(f"the editor ({editor}) has left no file behind: nothing was done")
    if mark_taken_out(path):
        note(f"the editor ({editor}) saved a byte order mark: it is taken out")
    if is_unix and taken_back(path):
        note(f"the editor ({editor}) saved Windows line ends (CRLF): they are taken back")


def _new_file(queue: str) -> Path:
    state = os.environ.get(STATE_VARIABLE)
    home = Path(state) if state else Path(os.path.expanduser("~")) / ".local" / "state"
    folder = home / "slatemq" / "edit"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return folder / f"{queue}-{moment}-{uuid4().hex[:12]}.tq"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody"
