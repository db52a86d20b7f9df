r"""Messages of a queue as entries of a queue file (TextQueue), and back.

::

    !{"order": 7}                        the payload, if it is text
    \id=281474976710657                  the message
    \handle=orders/1000000000001/f68…    where it is: what `failed edit` acts on
    \content=9f86d081884c7d65            of payload and headers, to see what was edited
    \header.type=order                   one for each header
    \header-json=["a=b", "two\nlines"]   one that does not fit on a line as it is
    \encoding=base64                     the payload is base64, as long as this is here
    \decrypted=yes                       the payload was decrypted for the export
    \not_decrypted=…                     why it could not be: it is as it is stored
    \attempts=3  \reason=…  \failed_at=…    and so on, for people

A comment without an ID above a message is a note on it; so are the notes of its history.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slatemq import textqueue
from slatemq._admin.entry_models import Entry, EntryState, SealedMessage
from slatemq._secrets import KEY_HEADER
from slatemq.cli.entry_output import Opened
from slatemq.cli.failures import BadInput
from slatemq.cli.files.windows_lines import expect_none
from slatemq.cli.parameters import format_time, parse_time
from slatemq.cli.publish.plain_text import not_decrypted_problem, sealing_problem
from slatemq.textqueue import State, render

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing

CONTROL_OF = {
    EntryState.AVAILABLE: State.QUEUED,
    EntryState.DONE: State.PROCESSED,
    EntryState.FAILED: State.ERROR,
    EntryState.ARCHIVED: State.ERROR,
}
"""The state in the queue file by the state in the queue."""

BASE64 = "base64"
BASE64_COLUMNS = 76

NOTED = "note: "
"""The prefix of an attempt's outcome that is a note."""

SLATEMQ = "slatemq"
"""The variable of the comment at the head of an export, which is not a note."""

SETTLED = "settled"
SETTLED_NO, SETTLED_SENT, SETTLED_YES = "no", "..", "ok"
"""The variable that says whether an archived dead letter was settled, which only the file
remembers. Between the call and its answer it has dots."""

_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters that editors may lose, so without tab, newline and carriage return."""

_NOT_IN_LINES = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
"""Control characters that a header must not have, since each header is one line."""


@dataclass(frozen=True, slots=True)
class Content:
    """A message as an entry of a queue file.

    Attributes:
        message_id: 0 for none.
        handle: Of the message when it was exported; empty for none.
        digest: Of payload and headers as they were exported; empty for none.
        is_gone: The message was no longer stored when it was exported.
        is_decrypted: The payload was encrypted, and the export decrypted it.
        is_not_decrypted: The export had keys, and could not decrypt it.
        settled: Whether this archived dead letter was settled.
    """

    payload: bytes
    headers: Mapping[str, str]
    message_id: int = 0
    handle: str = ""
    etag: str = ""
    digest: str = ""
    retention_s: int | None = None
    created_at_ms: int | None = None
    is_gone: bool = False
    is_decrypted: bool = False
    is_not_decrypted: bool = False
    settled: str = ""

    @property
    def is_edited(self) -> bool:
        return digest_of(self.payload, self.headers) != self.digest


def digest_of(payload: bytes, headers: Mapping[str, str]) -> str:
    """16 hexadecimal digits."""
    encoded = json.dumps(sorted(headers.items())).encode()
    return hashlib.blake2b(b"%d %s%s" % (len(encoded), encoded, payload), digest_size=8).hexdigest()


# --- From the queue ---------------------------------------------------------


def head(queue_id: str, state: str, text: str, session: str, now_ms: int) -> bytes:
    """The comment at the head of an export; `text` explains it, `session` names it."""
    variables = [
        f"{SLATEMQ}=export of {queue_id}, {state}",
        f"exported_at={format_time(now_ms)}",
        f"session={session}",
    ]
    return render(text, variables, State.COMMENT) + b"\n"


def exported(entry: Entry, payload: Opened) -> bytes:
    """An entry of a queue in a queue file: its notes, the message and a blank line."""
    notes = b"".join(
        render(f" {note}".replace("\n", "\n "), (), State.COMMENT) for note in notes_of(entry)
    )
    message = entry.message
    text, encoding = _text(payload.payload)
    variables = [*_names(entry), *_facts(entry)]
    if message is None:
        variables.append("gone=the message is no longer stored")
    else:
        variables += [_header(name, value) for name, value in sorted(message.headers.items())]
        variables += [f"encoding={encoding}"] if encoding else []
        if payload.problem is not None:
            variables.append(f"not_decrypted={_one_line(payload.problem.message)}")
        elif KEY_HEADER in message.headers and isinstance(message, SealedMessage):
            variables.append("decrypted=yes")
        variables.append(f"content={digest_of(payload.payload, message.headers)}")
    return notes + render(text, variables, CONTROL_OF[entry.state]) + b"\n"


def notes_of(entry: Entry) -> list[str]:
    """The notes on a message, the oldest first; archived messages take none."""
    if entry.state is EntryState.ARCHIVED:
        return []
    noted = (one.outcome for one in entry.attempts if one.outcome.startswith(NOTED))
    return [outcome.removeprefix(NOTED) for outcome in noted]


def _text(payload: bytes) -> tuple[str, str]:
    """The text of an entry, and its encoding, which may be empty."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = "\0"
    if not _NOT_TEXT.search(text):
        return text, ""
    encoded = base64.b64encode(payload).decode()
    lines = (encoded[at : at + BASE64_COLUMNS] for at in range(0, len(encoded), BASE64_COLUMNS))
    return "\n".join(lines), BASE64


def _names(entry: Entry) -> Iterator[str]:
    yield f"id={entry.message_id}"
    yield f"handle={entry.handle}"
    if entry.etag:
        yield f"etag={entry.etag}"


def _facts(entry: Entry) -> Iterator[str]:
    is_dead_letter = entry.state in (EntryState.FAILED, EntryState.ARCHIVED)
    if is_dead_letter:
        yield f"reason={_one_line(entry.reason)}"
    yield f"attempts={entry.attempts_count}"
    for attempt in entry.attempts:
        if entry.state is EntryState.ARCHIVED or not attempt.outcome.startswith(NOTED):
            when = format_time(attempt.claimed_at_ms)
            outcome = _one_line(f"{when} by {attempt.consumer_id}: {attempt.outcome}")
            yield f"attempt={outcome}"
    if entry.finished_at_ms:
        state = EntryState.FAILED if is_dead_letter else entry.state
        yield f"{state.value}_at={format_time(entry.finished_at_ms)}"
    if entry.archived is not None:
        yield f"archived_at={format_time(entry.archived.archived_at_ms)}"
        yield f"run={_one_line(entry.archived.run)}"
        yield f"{SETTLED}={SETTLED_NO}"
    if entry.state is EntryState.DONE and entry.consumer_id:
        yield f"consumer={_one_line(entry.consumer_id)}"
    if entry.transferred_to:
        yield f"transferred_to={entry.transferred_to}"
    if entry.state is not EntryState.DONE:
        yield f"priority={entry.priority}"
    if entry.message is not None:
        yield f"created_at={format_time(entry.message.created_at_ms)}"
        yield f"received_at={format_time(entry.message.received_at_ms)}"
        yield f"retention={entry.message.retention_s}"


def _one_line(text: str) -> str:
    escaped = text.replace("\\", "\\\\")
    return _NOT_IN_LINES.sub(lambda found: repr(found[0])[1:-1], escaped)


def _header(name: str, value: str) -> str:
    if "=" in name or _NOT_IN_LINES.search(name + value) or value.endswith(" "):
        pair = json.dumps([name, value], ensure_ascii=False).replace("\x7f", "\\u007f")
        return f"header-json={pair}"
    return f"header.{name}={value}"


# --- From the file ----------------------------------------------------------


class _Wrong(Exception):
    """A variable cannot be read, or the text where it is None."""

    def __init__(self, why: str, variable: textqueue.Variable | None) -> None:
        super().__init__(why)
        self.variable = variable


_Known = Mapping[str, textqueue.Variable]
"""The first variable of each name."""


def content_of(entry: textqueue.Entry, file: str) -> Content:
    """The message of an entry. Raises BadInput, with file and line, where it cannot be read."""
    expect_none(entry, file)
    known = {one.name: one for one in reversed(entry.variables) if one.name}
    fields = {name: one.value for name, one in known.items()}
    try:
        return Content(
            payload=_payload(entry.text, known),
            headers=_headers(entry),
            message_id=_whole(known, "id") or 0,
            handle=fields.get("handle", ""),
            etag=fields.get("etag", ""),
            digest=fields.get("content", ""),
            retention_s=_whole(known, "retention"),
            created_at_ms=_moment(known, "created_at"),
            is_gone="gone" in known,
            is_decrypted="decrypted" in known,
            is_not_decrypted="not_decrypted" in known,
            settled=fields.get(SETTLED, ""),
        )
    except _Wrong as error:
        line = entry.line if error.variable is None else entry.line_of(error.variable)
        raise BadInput(f"{file}:{line}: {error}") from None


def encryption_problem(content: Content, ring: KeyRing | None) -> str:
    """Why a client with or without keys must not send this; empty when it may."""
    key_id = content.headers.get(KEY_HEADER)
    if content.is_not_decrypted and key_id is not None:
        problem = not_decrypted_problem(content.payload, key_id, ring)
        if problem:
            return problem
    return sealing_problem(
        content.payload, content.headers, ring is not None, is_decrypted=content.is_decrypted
    )


def _payload(text: str, known: _Known) -> bytes:
    encoding = known.get("encoding")
    if encoding is None or not encoding.value:
        return text.encode()
    if encoding.value != BASE64:
        why = f"the variable encoding is {encoding.value!r}: write {BASE64}, or remove it"
        raise _Wrong(why, encoding)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        why = f"the text is not base64 ({error}): fix it, or remove the variable encoding"
        raise _Wrong(why, None) from None


def _headers(entry: textqueue.Entry) -> dict[str, str]:
    headers: dict[str, str] = {}
    for variable in entry.variables:
        if variable.name == "header-json":
            name, value = _pair(variable)
        elif variable.name is not None and variable.name.startswith("header."):
            name, value = variable.name.removeprefix("header."), variable.value
        else:
            continue
        if name in headers:
            raise _Wrong(f"the header {name!r} is given twice: remove one", variable)
        headers[name] = value
    return headers


def _pair(variable: textqueue.Variable) -> tuple[str, str]:
    try:
        name, value = json.loads(variable.value)
    except (ValueError, TypeError):
        name = value = None
    if not isinstance(name, str) or not isinstance(value, str):
        raise _Wrong(f'header-json must be ["name", "value"], not {variable.value!r}', variable)
    return name, value


def _whole(known: _Known, name: str) -> int | None:
    found = known.get(name)
    if found is None:
        return None
    text = found.value
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _Wrong(f"the variable {name} must be a whole number, not {text!r}", found)
    return int(text)


def _moment(known: _Known, name: str) -> int | None:
    found = known.get(name)
    if found is None:
        return None
    try:
        return parse_time(found.value)
    except ValueError as error:
        raise _Wrong(f"the variable {name}: {error}", found) from None
