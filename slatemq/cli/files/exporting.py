"""`slatemq export`: the messages of a queue as a queue file."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from uuid import uuid4

import click

from slatemq._admin.entry_models import Entry, EntryState, EntryView
from slatemq._counts import counted
from slatemq.cli.entry_output import Opened, listing_options, note_encrypted, opened
from slatemq.cli.failures import BadInput, sentence
from slatemq.cli.files.queue_files import exported, head
from slatemq.cli.output import note, progress
from slatemq.cli.parameters import flag, queue_argument
from slatemq.cli.session import Session, command
from slatemq.errors import INCOMPLETE, SlateMQError, Unavailable, incomplete
from slatemq.models import now_ms

if TYPE_CHECKING:
    from slatemq.client import Client

STDOUT = "-"

WRITE_BYTES = 1 << 20

PAGE_BYTES = 1 << 20
"""About the size of a page, which is in memory several times, as bytes and as messages."""

FIRST_PAGE_COUNT = 4
"""Messages in the first page, before their lengths are known."""

OWN_MODE = 0o600

PAGE_COUNT_MAX = 1000
"""The server's maximum."""

HEAD = """ Messages of a queue of SlateMQ, as `slatemq export` found them.
 Each begins with - (available), = (done) or ! (a dead letter);
 a continued line begins with a space, a variable with a \\."""


@command("export")
@queue_argument
@click.option(
    "--state",
    required=True,
    type=click.Choice(["available", "failed", "done", "archived"]),
    help="Export messages in this state.",
)
@click.option(
    "--out", required=True, type=click.Path(), metavar="F.tq", help="Write to F.tq; - is stdout."
)
@flag("--force", help="Overwrite an existing file.")
@listing_options("done, failed or archived", to_file=True)
def export(
    session: Session,
    queue: str,
    state: str,
    out: str,
    force: bool,
    limit: int | None,
    **bounds: Any,
) -> None:
    """Write messages of QUEUE that are in one state to a queue file.

    Examples:
      slatemq export orders --state failed --out failed.tq
      slatemq export orders --state done --from 2026-11-21T08:00:00Z --out done.tq
      slatemq export orders --state archived --out archived.tq
      slatemq export orders --state available --limit 100 --out - | less

    The file is a TextQueue, which people read and edit: available messages begin
    with -, done ones with =, dead letters, archived or not, with !. ID, headers,
    attempts, times and reason are variables below each message. The janitor reads
    archived dead letters, in the order of the archive. A payload that is not text
    is base64, as the variable encoding says. The queue does not change.

    What to do with the file:
      slatemq tq ls failed.tq --state error
      slatemq failed edit orders --file failed.tq    applies your edits
      slatemq import done.tq --to other --state processed
    """
    wanted = EntryState(state)
    if wanted is EntryState.AVAILABLE and is_bounded(bounds):
        raise click.UsageError("--newest, --from and --until are not for available messages")

    async def work(client: Client) -> Exported:
        with _opened(out, force) as stream:
            done = await write_export(session, client, queue, wanted, stream, limit, bounds)
            if done.problem is not None and not done.messages_count:
                raise done.problem
            return done

    done = session.call(work)
    if out != STDOUT:
        fields = {
            "file": out,
            "queue_id": queue,
            "state": state,
            "exported_count": done.messages_count,
            "not_decrypted_count": done.not_decrypted_count,
        }
        session.show(
            fields, f"exported: {done.messages_count} to {out}, {counted(done.size_bytes, 'byte')}"
        )
    if done.problem is not None:
        raise done.problem


class Exported(NamedTuple):
    """What a file has; `problem`: why it does not have all of the queue."""

    messages_count: int
    size_bytes: int
    problem: SlateMQError | None
    not_decrypted_count: int


async def write_export(
    session: Session,
    client: Client,
    queue: str,
    state: EntryState,
    stream: BinaryIO,
    limit: int | None,
    bounds: dict[str, Any],
    text: str = HEAD,
    name: str = "",
) -> Exported:
    """Write a queue file, with a page of messages in memory."""
    counts = (await client.get_queue(queue)).counts
    total = getattr(counts, f"{state.value}_count")
    buffer = bytearray(head(queue, state.value, text, name or uuid4().hex[:12], now_ms()))
    count = size = 0
    problem: SlateMQError | None = None
    problems: dict[int, SlateMQError] = {}
    not_decrypted: SlateMQError | None = None
    not_decrypted_count = 0
    entries = _entries(client, queue, state, limit, bounds, problems)
    with progress(not session.json, "export", min(total, limit or total)) as update:
        try:
            async for entry in entries:
                payload = Opened(b"")
                if entry.message is not None:
                    note_encrypted(session, entry.message.headers)
                    payload = opened(entry.message)
                if payload.problem is not None:
                    not_decrypted = not_decrypted or payload.problem
                    not_decrypted_count += 1
                buffer += exported(entry, payload)
                count += 1
                if len(buffer) >= WRITE_BYTES:
                    size += stream.write(buffer)
                    buffer.clear()
                    update(completed=count)
                if count == limit:
                    break
        except Unavailable as error:
            if error.reason != INCOMPLETE:
                raise
            problem = error
        size += stream.write(buffer)
    if problems:
        problem = incomplete(problems)
    if not_decrypted is not None:
        note(
            "payloads that could not be decrypted, and are in the file as they are stored: "
            f"{not_decrypted_count}; the first: {sentence(not_decrypted)}"
        )
    return Exported(count, size, problem, not_decrypted_count)


def _entries(
    client: Client,
    queue: str,
    state: EntryState,
    limit: int | None,
    bounds: dict[str, Any],
    problems: dict[int, SlateMQError],
) -> AsyncIterator[Entry]:
    """The entries with their content, which for archived ones is in the archive.

    Adds to `problems` the brokers that did not answer; for archived ones the last raises
    Unavailable (INCOMPLETE).
    """
    if state is not EntryState.ARCHIVED:
        return _listed(client, queue, state, bounds, problems)
    return client.read_archived(
        queue,
        archived_from=bounds["finished_from"],
        archived_until=bounds["finished_until"],
        newest_first=bounds["newest_first"],
        limit=limit or 0,
    )


async def _listed(
    client: Client,
    queue: str,
    state: EntryState,
    bounds: dict[str, Any],
    problems: dict[int, SlateMQError],
) -> AsyncIterator[Entry]:
    """Entries page by page; pages of long messages have fewer, which bounds the memory."""
    size, token = FIRST_PAGE_COUNT, ""
    while True:
        page = await client.entry_page(
            queue, state, page_size=size, page_token=token, view=EntryView.FULL, **bounds
        )
        size = next_size(page.entries, size)
        token = page.next_page_token
        problems |= page.problems
        for entry in page.entries:
            yield entry
        if not token:
            return


def next_size(entries: Sequence[Entry], size: int) -> int:
    """The length of the next page, if its messages are as long as those of this one."""
    taken = sum(len(entry.message.stored_payload) for entry in entries if entry.message is not None)
    fitting = PAGE_BYTES * len(entries) // max(taken, 1) if entries else size
    # Grows slowly: one page may have short messages, and all others long ones.
    return max(1, min(fitting, 4 * size, PAGE_COUNT_MAX))


def is_bounded(bounds: Mapping[str, Any]) -> bool:
    """Whether any of the bounds of a listing was given."""
    return any(value is not None and value is not False for value in bounds.values())


@contextmanager
def _opened(out: str, force: bool) -> Iterator[BinaryIO]:
    """The file, which gets its name once it is complete; a failure leaves nothing.

    Its user alone may read it, since payloads may be decrypted; the mode of an existing one stays.
    """
    if out == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(out)
    if path.exists() and not force:
        raise BadInput(f"{out} exists: choose another name, or overwrite it with --force")
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:  # a pipe, a device
            yield stream
        return
    beside = Path(f"{out}.{os.getpid()}.exporting")
    try:
        with open(
            beside, "xb", opener=lambda name, flags: os.open(name, flags, OWN_MODE)
        ) as stream:
            if path.exists():
                os.fchmod(stream.fileno(), path.stat().st_mode & 0o777)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
