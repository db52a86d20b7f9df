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
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from slatemq._admin.entry_models import EntryState
from slatemq.cli.entry_output import listing_options
from slatemq.cli.failures import EXIT_REFUSED, BadInput
from slatemq.cli.files.exporting import is_bounded, write_export
from slatemq.cli.files.windows_lines import expect_none_in, has_any, remove_mark, restore_unix_lines
from slatemq.cli.output import note, remark, say
from slatemq.cli.parameters import flag, queue_argument
from slatemq.cli.publish.runs import state_folder
from slatemq.cli.repair.archive_settling import ArchiveSettler
from slatemq.cli.repair.dead_letter_plans import session_of, steps
from slatemq.cli.repair.dead_letter_settling import DeadLetterSettler, review
from slatemq.cli.session import Session, command
from slatemq.cli.tq.entries import translated_errors

if TYPE_CHECKING:
    from slatemq.client import Client

FALLBACK_EDITOR = "vi"
EDITOR_VARIABLES = ("VISUAL", "EDITOR")

SH_NOT_EXECUTABLE, SH_NOT_FOUND = 126, 127
"""The exit statuses of a shell that cannot run a program."""

_WANTED = {
    "redrive": "to redrive",
    "replace": "to replace",
    "drop": "to drop",
    "note": "to note",
    "already": "done already",
    "conflict": "that cannot be done",
    "none": "unchanged",
}
_DONE = {
    "redrive": "redriven",
    "replace": "replaced",
    "drop": "dropped",
    "note": "noted",
    "already": "done already",
    "conflict": "not done",
}

EPILOG = """\
Examples:
  slatemq failed edit orders
  EDITOR='code --wait' slatemq failed edit orders --newest --limit 20
  slatemq export orders --state failed --out f.tq
  sed -i 's/^!/-/' f.tq
  slatemq failed edit orders --file f.tq --yes    without an editor
  slatemq failed edit orders --archived --newest --limit 20

Each dead letter is an entry that begins with !. Change that character:
  -   to send it again; if you edit its text or headers, a new message replaces
      it in one commit
  =   to drop it; it is listed as done
  !   to leave it; so does deleting it, or commenting it out with #
A comment without an ID is kept as a note on the dead letter below it, and is
exported with it again. The lines that begin with \\ describe the message:
leave id, handle, etag and content as they are.

The changes are shown, and made after you confirm. A dead letter that was
settled meanwhile, or has failed again, is reported and left: exit code 1, and
the file is kept. Continuing with --file does nothing twice.

--archived edits dead letters that the janitor has archived. They come back as
new messages, take no notes, and are not listed as done. What was done, or sent
before a kill, is noted in the file (\\settled=ok, ..); any other that is no
longer archived is reported, since it is unknown what became of it.
"""

HEAD = """ Dead letters of a queue of SlateMQ, for you to settle: change the first character
 of one to - to send it again (with the text and headers as you edit them), or to =
 to drop it. One that keeps its !, is deleted or commented out stays as it is. Your
 comment above a dead letter is kept as a note on it. Continued lines of a text are
 indented by a space. Save and close: you are asked before anything is done."""

HEAD_ARCHIVED = """ Archived dead letters of a queue of SlateMQ, for you to settle: change the first
 character of one to - to send it again as a new message (with the text and headers as you edit
 them), or to = to drop it. One that keeps its !, is deleted or commented out stays archived.
 Continued lines of a text are indented by a space. Save and close: you are asked first."""


class NoEditor(BadInput):
    """The editor cannot be run."""


@command("edit", epilog=EPILOG)
@queue_argument
@click.option(
    "--file",
    "file",
    type=click.Path(),
    metavar="F.tq",
    help="Use this edited export.",
)
@flag("--archived", help="Edit those whose content is in the archive.")
@flag("--yes", help="Do not ask for confirmation.")
@listing_options("failed, or archived,", to_file=True)
def edit(
    session: Session,
    queue: str,
    file: str | None,
    archived: bool,
    yes: bool,
    limit: int | None,
    **bounds: Any,
) -> None:
    """Edit the dead letters of QUEUE, to send them again, changed or not, or drop them."""
    if file is not None and (limit is not None or is_bounded(bounds)):
        raise click.UsageError("--file has its dead letters: leave out the other options")
    if file is not None:
        _act(session, queue, file, archived, yes)
        return
    path = _new_file(queue)

    async def work(client: Client) -> int:
        state = EntryState.ARCHIVED if archived else EntryState.FAILED
        head, name = HEAD_ARCHIVED if archived else HEAD, path.stem.rpartition("-")[2]
        with path.open("xb") as stream:
            done = await write_export(
                session, client, queue, state, stream, limit, bounds, head, name
            )
        if done.problem is not None:
            # One who wants some of them has some; one who wants all would take these for all.
            if limit is None or not done.messages_count:
                raise done.problem
            note(done.problem.message)
        return done.messages_count

    try:
        count = session.call(work)
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
            note(f"your edits are kept: continue with `{again}`")
        elif isinstance(error, NoEditor):
            note(f"the export is kept: edit {path}, and continue with `{again}`")
        else:
            path.unlink(missing_ok=True)
        raise
    if not is_edited:
        note("nothing was changed")
    path.unlink(missing_ok=True)


def _act_again(
    session: Session, queue: str, path: Path, archived: bool, yes: bool, is_unix: bool
) -> None:
    """Apply the file; at a terminal, offer to edit one that cannot be read again."""
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
    with translated_errors():
        expect_none_in(file)
    name = session_of_file(file)
    settler_of = ArchiveSettler if archived else DeadLetterSettler
    consumer_id = f"{_user()}, slatemq failed edit {name}"[:200]
    ring = session.key_ring()

    def settler_with(client: Client) -> DeadLetterSettler:
        return settler_of(client, consumer_id, as_json=session.json, ring=ring)

    async def look(client: Client) -> Counter[str]:
        with translated_errors():
            settler = settler_with(client)
            # With --json stdout is for the result alone.
            return await review(settler, steps(file, queue), remark if session.json else say)

    async def settle(client: Client) -> Counter[str]:
        settler = settler_with(client)
        with translated_errors():
            await settler.settle_all(steps(file, queue))
        return settler.counts

    if not (session.json and yes):
        wanted = session.call(look)
        asked = sum(wanted[name] for name in ("redrive", "replace", "drop", "note"))
        said = _sentence(wanted, _WANTED)
        if not asked:
            note(f"nothing to do: {said or 'the file has no dead letters'}")
            if wanted["conflict"]:
                sys.exit(EXIT_REFUSED)
            return
        if not yes:
            click.confirm(f"{said}. Continue?", abort=True, err=True)
    counts = session.call(settle)
    if not session.json:
        say(_sentence(counts, _DONE) or "nothing was done")
    if counts["conflict"]:
        sys.exit(EXIT_REFUSED)


def session_of_file(file: str) -> str:
    """The session of the export, or the name of the file where its head is gone."""
    with translated_errors():
        return session_of(file) or Path(file).name


def _sentence(counts: Counter[str], words: Mapping[str, str]) -> str:
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def _open_editor(path: Path, is_unix: bool) -> None:
    """Run the editor; `is_unix` where no line of the file had a Windows line end before."""
    source = next((name for name in EDITOR_VARIABLES if os.environ.get(name)), None)
    editor = os.environ[source] if source else FALLBACK_EDITOR
    # While the editor runs, Ctrl-C is for the editor. A handler, because the editor would inherit
    # an ignored signal.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        ended = subprocess.run(["sh", "-c", f'{editor} "$@"', editor, str(path)], check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    if ended.returncode in (SH_NOT_EXECUTABLE, SH_NOT_FOUND):
        why = f"${source}" if source else "neither $VISUAL nor $EDITOR is set"
        raise NoEditor(
            f"the editor `{editor}` ({why}) cannot be run: set {source or 'EDITOR'} to an "
            "editor, such as nano or 'code --wait'"
        )
    if ended.returncode:
        raise BadInput(
            f"the editor ({editor}) ended with exit status {ended.returncode}: nothing was done"
        )
    if not path.exists():
        raise BadInput(f"the editor ({editor}) removed the file: nothing was done")
    if remove_mark(path):
        note(f"the editor ({editor}) saved a byte order mark: removed it")
    if is_unix and restore_unix_lines(path):
        note(f"the editor ({editor}) saved Windows line ends (CRLF): restored those of Unix")


def _new_file(queue: str) -> Path:
    folder = state_folder("edit")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return folder / f"{queue}-{moment}-{uuid4().hex[:12]}.tq"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
