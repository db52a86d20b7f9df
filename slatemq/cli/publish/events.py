"""`slatemq events`: events of other systems into SlateMQ, and its own into other systems."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import click
import msgspec

from slatemq.cli.failures import EXIT_UNREACHABLE, BadInput
from slatemq.cli.output import Update, note, progress, say, write_items, write_json
from slatemq.cli.parameters import flag
from slatemq.cli.publish.applied import applied
from slatemq.cli.session import Group, Session, in_thread, run
from slatemq.errors import InvalidArgument
from slatemq.events import Notifications, message_of, read_notifications

if TYPE_CHECKING:
    from slatemq._admin.instance import EventsStatus
    from slatemq.client import Client
    from slatemq.models import OutgoingMessage

DOCUMENT_BYTES_MAX: Final = 16 << 20
"""Bounds our memory; AWS sends at most 256 KiB."""

_OFFSET = re.compile(r"\(byte (\d+)\)")


class Document(NamedTuple):
    """A document's notifications, and the offset in the file of its end."""

    notifications: Notifications
    end: int


def read_documents(stream: BinaryIO, name: str) -> Iterator[Document]:
    """The documents of a file, from its beginning, without a byte order mark and empty lines.

    Raises BadInput, which names the file and the line; OSError.
    """
    stream.seek(0)
    end = len(BOM_UTF8) if stream.read(len(BOM_UTF8)) == BOM_UTF8 else 0
    stream.seek(end)
    number = 0
    is_whole_first = True
    while line := stream.readline(DOCUMENT_BYTES_MAX + 1):
        number += 1
        end += len(line)
        if len(line) > DOCUMENT_BYTES_MAX:
            raise BadInput(f"{name}, line {number}: has more than {DOCUMENT_BYTES_MAX:,} bytes")
        if not line.strip():
            continue
        if is_whole_first and not _is_json(line):
            # Not a document by itself, so it begins a document of several lines.
            yield _read_one(stream, line, name, number, end)
            return
        is_whole_first = False
        yield Document(_read(line, f"{name}, line {number}"), end)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _read_one(stream: BinaryIO, first: bytes, name: str, number: int, end: int) -> Document:
    rest = stream.read(DOCUMENT_BYTES_MAX - len(first) + 1)
    text = first + rest
    if len(text) > DOCUMENT_BYTES_MAX:
        raise BadInput(
            f"{name}, line {number}: is neither JSON nor the start of a JSON document of at most "
            f"{DOCUMENT_BYTES_MAX:,} bytes"
        )
    try:
        return Document(read_notifications(text), end + len(rest))
    except InvalidArgument as error:
        offset = _OFFSET.search(error.description)
        is_syntax = error.field == "notification"
        lines = text[: int(offset[1])].count(b"\n") if offset and is_syntax else 0
        raise BadInput(f"{name}, line {number + lines}: {error.message}") from error


def _read(line: bytes, where: str) -> Notifications:
    try:
        return read_notifications(line)
    except InvalidArgument as error:
        raise BadInput(f"{where}: {error.message}") from error


STDIN = "-"

BATCH_MESSAGES = 1000


@click.group("events", cls=Group)
def events() -> None:
    """Import events of S3 stores, and show how far SlateMQ's own are published."""


@events.command("import")
@click.argument("file", type=click.Path())
def import_(session: Session, file: str) -> None:
    r"""Publish the S3 notifications of FILE (- reads stdin) as events.

    Examples:
      slatemq queue create thumbnails --filter \
          'headers.type == "object.created" && headers.key.endsWith(".jpg")'
      slatemq events import notifications.json
      slatemq events import notifications.jsonl --json
      aws sqs receive-message --queue-url URL | jq -r '.Messages[].Body' \
          | slatemq events import -

    FILE is one JSON document, or has one on each line: notifications as AWS S3,
    MinIO and Ceph send them, also by SNS and EventBridge. Each change of an
    object or a bucket becomes a message: its payload is the event, its headers
    are `type`, `bucket` and `key`. Other notifications are counted and skipped.

    FILE is checked to its end (stdin is read first) before anything is published.
    An event that is published again within the instance's dedupe window (10
    minutes unless set otherwise) is not stored twice: after a failure, run the
    same command again.
    """
    counts: Counter[str] = Counter()

    async def work() -> None:
        name = "stdin" if file == STDIN else file
        with await in_thread(lambda: _opened(file)) as stream:
            size = os.fstat(stream.fileno()).st_size
            await in_thread(lambda: _check(stream, name))
            async with session.connect() as client:
                with progress(not session.json, "import", size) as update:
                    batches = _batches(stream, name, counts, update)
                    await _publish(client, batches, counts, session.timeout)

    try:
        run(work())
    except BaseException:
        if done := counts["published"] + counts["duplicate"]:
            session.at_end.append(lambda: note(f"durable before the error: {done}; run it again"))
        raise
    kinds = ("published", "duplicate", "accepted", "skipped")
    session.show(
        {"file": file, **{f"{kind}_count": counts[kind] for kind in kinds}},
        f"published: {counts['published']}  already stored: {counts['duplicate']}  "
        f"skipped: {counts['skipped']}",
    )
    if counts["accepted"] and not session.json:
        note(f"accepted, and not stored yet: {counts['accepted']}")


def _opened(file: str) -> BinaryIO:
    """The file, or a copy of what can be read only once, such as stdin. It may block."""
    # A reader of our own: a thread left behind would keep Python's locked, and break the exit.
    stream = open(0 if file == STDIN else file, "rb", closefd=file != STDIN)  # noqa: SIM115
    if file != STDIN and stream.seekable():
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(stream, copy)
    copy.flush()
    if file != STDIN:
        stream.close()
    return copy


def _check(stream: BinaryIO, name: str) -> None:
    """Raises BadInput where any of it is wrong, or empty."""
    if not sum(1 for _ in read_documents(stream, name)):
        raise BadInput(f"{name} has no notifications")


def _batches(
    stream: BinaryIO, name: str, counts: Counter[str], update: Update
) -> Iterator[list[OutgoingMessage]]:
    batch: list[OutgoingMessage] = []
    for document in read_documents(stream, name):
        counts["skipped"] += document.notifications.skipped_count
        for event in document.notifications.events:
            batch.append(message_of(event))
            if len(batch) == BATCH_MESSAGES:
                yield batch
                batch = []
        update(completed=document.end)
    if batch:
        yield batch


async def _publish(
    client: Client,
    batches: Iterator[list[OutgoingMessage]],
    counts: Counter[str],
    timeout: timedelta,
) -> None:
    while batch := await in_thread(lambda: next(batches, None)):
        for one in await applied(client, await client.publish_many(batch), timeout):
            is_new = "accepted" if one.task_id else "published"
            counts["duplicate" if one.duplicate else is_new] += 1


@events.command("status")
@flag("--check", help="Exit with 3 when a process or backend is down.")
def status(session: Session, check: bool) -> None:
    """Show the event backend of each process, whether it answers, and its lag.

    Examples:
      slatemq events status
      slatemq events status --json | jq .lag_count
      slatemq events status --check

    The lag is the number of durable events that the backend does not have yet;
    its age is that of the oldest of them. The cursor is a message ID for an
    ingest, the number of an event for a broker, and for a janitor the number of
    its last look at the runs.
    docs/how-to/write-through.md says what happens while a backend is down.
    """
    found = session.call(lambda client: client.events_status())
    if session.json:
        for one in found:
            # Message IDs are text, because they exceed what JSON numbers hold safely.
            ids = {"cursor": str(one.cursor), "durable_sequence": str(one.durable_sequence)}
            write_json({**asdict(one), **ids})
    else:
        _show_status(found)
    if check and any(one.problem or (one.enabled and not one.answering) for one in found):
        sys.exit(EXIT_UNREACHABLE)


def _show_status(found: list[EventsStatus]) -> None:
    write_items(
        found,
        {
            "process": lambda one: f"{one.service} {one.shard}",
            "backend": lambda one: one.backend or "-",
            "mode": lambda one: one.consistency or "direct",
            "state": _state,
            "lag": lambda one: one.lag_count,
            "age": lambda one: f"{one.lag_ms / 1000:.1f}s" if one.lag_ms else "",
            "cursor": lambda one: one.cursor,
            "lost": lambda one: one.lost_count + one.dropped_count,
        },
        cuts=("mode", "state", "backend"),
    )
    for one in found:
        if error := one.problem or ("" if one.answering else one.last_error):
            say(f"{one.service} {one.shard}: {error}")


def _state(one: EventsStatus) -> str:
    if one.problem:
        return "process down"
    if not one.enabled:
        return "off"
    return "answers" if one.answering else "backend down"
