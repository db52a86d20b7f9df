"""Entries as tables and paragraphs for people, and as objects for programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from slatemq._admin.entry_models import Archived, Entry, EntryState, EntryView, StoredMessage
from slatemq._counts import counted
from slatemq._secrets import KEY_HEADER
from slatemq.cli.failures import sentence
from slatemq.cli.output import note, payload_fields, say, write_items, write_json
from slatemq.cli.parameters import TIME, Number, flag, format_time
from slatemq.cli.session import Session
from slatemq.errors import DataLoss, FailedPrecondition, SlateMQError

if TYPE_CHECKING:
    from slatemq._consume.delivered import ClaimedMessage

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_BYTES = 2000
"""Of a payload that people look at; --json has all of it."""

TABLE_ROWS = 1000
"""Rows that are aligned, and held in memory, together."""

LISTED = 100
"""Entries listed without --limit: a queue may have millions."""

_COLUMNS: dict[str, Callable[[Entry], object]] = {
    "message": lambda entry: entry.message_id,
    "priority": lambda entry: entry.priority,
    "done": lambda entry: format_time(entry.finished_at_ms),
    "failed": lambda entry: format_time(entry.finished_at_ms),
    "attempts": lambda entry: entry.attempts_count,
    "visible at": lambda entry: format_time(entry.visible_at_ms),
    "consumer": lambda entry: entry.consumer_id,
    "lease ends": lambda entry: format_time(entry.lease_deadline_ms),
    "transferred to": lambda entry: entry.transferred_to,
    "reason": lambda entry: entry.reason,
    "archived": lambda entry: format_time(_archived(entry).archived_at_ms),
    "run": lambda entry: _archived(entry).run,
    "headers": lambda entry: headers_text(entry.message),
    "handle": lambda entry: entry.handle,
}

_LISTED: dict[EntryState, tuple[str, ...]] = {
    EntryState.AVAILABLE: ("message", "priority", "attempts"),
    EntryState.DELAYED: ("message", "priority", "attempts", "visible at"),
    EntryState.IN_FLIGHT: ("message", "priority", "attempts", "consumer", "lease ends"),
    EntryState.DONE: ("message", "done", "attempts", "consumer", "transferred to"),
    EntryState.FAILED: ("message", "failed", "attempts", "reason"),
    EntryState.ARCHIVED: ("message", "failed", "attempts", "archived", "run"),
}
"""The columns of a listing by state, besides headers and handle."""


def _archived(entry: Entry) -> Archived:
    return entry.archived or Archived("", 0, 0)


def listing_options(finished: str = "", *, to_file: bool = False) -> Callable[[F], F]:
    """The options of a listing; `finished` says of what --from and --until are the times.

    Those that bound it are named as in the calls of the client.
    """
    default = "all" if to_file else f"{LISTED}; with --json: all"
    limit_text = f"At most N entries; 0: all.  [default: {default}]"
    options = [click.option("--limit", type=Number(min=0), help=limit_text)]
    if not to_file:
        options.append(flag("--headers", help="Also show the headers."))
    if finished:
        until = f"Only those {finished} before then."
        since = f"Only those {finished} then or later."
        options += [
            flag("--newest", "newest_first", help="Start with the newest."),
            click.option("--until", "finished_until", type=TIME, help=until),
            click.option("--from", "finished_from", type=TIME, help=since),
        ]

    def add(function: F) -> F:
        for option in options:
            function = option(function)
        return function

    return add


async def write_entries(
    session: Session,
    entries: AsyncIterator[Entry],
    state: EntryState,
    limit: int | None,
    with_headers: bool,
) -> int:
    """Print a listing as it comes, and note whether there is more; return its length.

    What came before an error is printed, too.
    """
    if limit is None:
        limit = 0 if session.json else LISTED
    names = (*_LISTED[state], *(("headers",) if with_headers else ()), "handle")
    columns = {name: _COLUMNS[name] for name in names}
    count = 0
    is_cut = False
    held: list[Entry] = []
    try:
        async for entry in entries:
            if limit and count == limit:
                is_cut = True
                break
            count += 1
            if session.json:
                write_json(entry_fields(entry))
            else:
                held.append(entry)
            if len(held) >= TABLE_ROWS:
                write_items(held, columns, headed=count == TABLE_ROWS)
                held = []
    finally:
        if held:
            write_items(held, columns, headed=count == len(held))
    if is_cut and not session.json:
        note("there are more: --limit 0 lists all of them")
    return count


def listing_view(session: Session, with_headers: bool) -> EntryView:
    if with_headers:
        return EntryView.HEADERS
    return EntryView.ATTEMPTS if session.json else EntryView.BASIC


def entry_fields(entry: Entry, *, with_payload: bool = False) -> dict[str, Any]:
    """An entry for programs, named as in the protos; IDs are text."""
    fields: dict[str, Any] = {one.name: getattr(entry, one.name) for one in dataclass_fields(entry)}
    for name in ("message", "etag", "archived"):
        del fields[name]
    fields["message_id"] = str(entry.message_id)
    fields["attempts"] = [attempt._asdict() for attempt in entry.attempts]
    if entry.archived is not None:
        fields["archived"] = entry.archived._asdict()
    if entry.message is not None:
        fields["headers"] = dict(entry.message.headers)
        fields["created_at_ms"] = entry.message.created_at_ms
        fields["received_at_ms"] = entry.message.received_at_ms
        fields["retention_s"] = entry.message.retention_s
        fields["etag"] = entry.etag
        if with_payload:
            fields.update(opened_with_note(entry.message).fields)
    return fields


def show_entry(session: Session, entry: Entry) -> None:
    if entry.message is not None:
        note_encrypted(session, entry.message.headers)
    if session.json:
        write_json(entry_fields(entry, with_payload=True))
        return
    say(f"message {entry.message_id} in {entry.queue_id}: {_describe(entry)}")
    say(f"  handle   {entry.handle}")
    for attempt in entry.attempts:
        where = f" in {attempt.queue_id}" if attempt.queue_id != entry.queue_id else ""
        say(
            f"  attempt  {format_time(attempt.claimed_at_ms)} by {attempt.consumer_id}{where}: "
            f"{one_line(attempt.outcome)}"
        )
    if entry.archived is not None:
        say(f"  content  in the archive, from the run {entry.archived.run}")
        return
    if entry.message is None:
        say("  the message itself is no longer stored")
        return
    say(f"  etag     {entry.etag}")
    if entry.message.headers:
        say(f"  headers  {headers_text(entry.message)}")
    say(f"  payload  {shown(opened_with_note(entry.message).payload)}")


def _describe(entry: Entry) -> str:
    attempts = f"attempts {entry.attempts_count}"
    match entry.state:
        case EntryState.DELAYED:
            return f"delayed until {format_time(entry.visible_at_ms)}, {attempts}"
        case EntryState.IN_FLIGHT:
            return (
                f"in flight with {entry.consumer_id} until "
                f"{format_time(entry.lease_deadline_ms)}, {attempts}"
            )
        case EntryState.DONE if entry.transferred_to:
            return f"moved to {entry.transferred_to} at {format_time(entry.finished_at_ms)}"
        case EntryState.DONE:
            return f"done by {entry.consumer_id} at {format_time(entry.finished_at_ms)}, {attempts}"
        case EntryState.FAILED:
            when = format_time(entry.finished_at_ms)
            return f"failed at {when}, {attempts}: {one_line(entry.reason)}"
        case EntryState.ARCHIVED:
            when = format_time(_archived(entry).archived_at_ms)
            return f"failed at {format_time(entry.finished_at_ms)}, archived at {when}, {attempts}"
    return f"available, priority {entry.priority}, {attempts}"


def note_encrypted(session: Session, headers: Mapping[str, str]) -> None:
    """Say, once for each key, that payloads are encrypted, where no keys were given."""
    key_id = headers.get(KEY_HEADER)
    if key_id is None or session.has_keys or key_id in session.missing_keys:
        return
    session.missing_keys.add(key_id)
    note(
        f"payloads are encrypted with the key {key_id!r}: give the file that has it with "
        "--encryption-keys or SLATEMQ_ENCRYPTION_KEYS"
    )


class Opened(NamedTuple):
    """A payload; as it is stored where it cannot be decrypted, with the problem."""

    payload: bytes
    problem: SlateMQError | None = None

    @property
    def fields(self) -> dict[str, str]:
        """For programs."""
        fields = payload_fields(self.payload)
        return fields if self.problem is None else fields | {"not_decrypted": self.problem.message}


def opened(message: StoredMessage | ClaimedMessage) -> Opened:
    try:
        return Opened(message.payload)
    except (FailedPrecondition, DataLoss) as error:
        return Opened(message.stored_payload, error)


def opened_with_note(message: StoredMessage | ClaimedMessage) -> Opened:
    found = opened(message)
    if found.problem is not None:
        note(f"the payload is shown as it is stored: {sentence(found.problem)}")
    return found


def headers_text(message: StoredMessage | None) -> str:
    headers = message.headers if message is not None else {}
    return one_line(" ".join(f"{key}={value}" for key, value in sorted(headers.items())))


def shown(payload: bytes) -> str:
    text = one_line(payload[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    if len(payload) > SHOWN_BYTES:
        return f"{text}… ({counted(len(payload), 'byte')}; --json has all)"
    return text


def one_line(text: str) -> str:
    return text.replace("\n", "\\n")
