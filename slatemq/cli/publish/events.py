"""`slatemq events`: events of other systems into SlateMQ, and its own in other systems."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, BinaryIO

import click

import slatemq
from slatemq.cli.failures import BadInput
from slatemq.cli.groups import Group
from slatemq.cli.output import note, say, write_json
from slatemq.cli.progress import Update, progress
from slatemq.cli.publish.event_files import read_documents
from slatemq.cli.publish.events_status import status
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.cli.threads import in_thread
from slatemq.errors import FailedPrecondition
from slatemq.events import message_of

if TYPE_CHECKING:
    from slatemq._publish.published import Published
    from slatemq.client import Client
    from slatemq.models import OutgoingMessage

STDIN = "-"

BATCH_MESSAGES = 1000

IMPORT_EPILOG = """\
\b
Examples:
  slatemq queue create thumbnails --filter \\
      'headers.type == "object.created" && headers.key.endsWith(".jpg")'
  slatemq events import notifications.json
  slatemq events import notifications.jsonl --json
  aws sqs receive-message --queue-url URL | jq -r '.Messages[].Body' \\
      | slatemq events import -

\b
FILE is one JSON document, or has one on each line: notifications as AWS S3,
MinIO and Ceph send them, also from SNS and EventBridge. Each change of an
object or a bucket becomes a message: its payload is the event, its headers
are `type`, `bucket` and `key`. Other notifications are counted and left out.

\b
The whole of FILE is checked before the first message is published; stdin is
read to its end for that. An event that is published again within the
instance's dedupe window (10 minutes unless set otherwise) is not stored
twice: after a failure, run the same command again.
"""


@click.group("events", cls=Group)
def events() -> None:
    """Import events of S3 stores, and see how far SlateMQ's own are published."""


events.add_command(status)


@events.command("import", epilog=IMPORT_EPILOG)
@click.argument("file", type=click.Path())
@session_options
@pass_session
def import_(session: Session, file: str) -> None:
    """Publish the S3 notifications of FILE (- reads stdin) as events."""
    counts: Counter[str] = Counter()

    async def work() -> None:
        with _opened(file) as (stream, name):
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
            session.at_end.append(lambda: note(f"durable until then: {done}; run it again"))
        raise
    if session.json:
        write_json(
            {
                "file": file,
                "published_count": counts["published"],
                "duplicate_count": counts["duplicate"],
                "accepted_count": counts["accepted"],
                "skipped_count": counts["skipped"],
            }
        )
        return
    say(
        f"published: {counts['published']}  there already: {counts['duplicate']}  "
        f"left out: {counts['skipped']}"
    )
    if counts["accepted"]:
        note(f"accepted, and not stored yet: {counts['accepted']}")


@contextmanager
def _opened(file: str) -> Iterator[tuple[BinaryIO, str]]:
    """The file, or a copy of stdin, which can be read twice; and its name for people."""
    if file != STDIN:
        with open(file, "rb") as stream:
            if stream.seekable():
                yield stream, file
                return
            with _copied(stream) as copy:
                yield copy, file
        return
    with _copied(sys.stdin.buffer) as copy:
        yield copy, "stdin"


@contextmanager
def _copied(stream: BinaryIO) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield copy


def _check(stream: BinaryIO, name: str) -> None:
    """Raises BadInput where any of it is wrong, or nothing is there."""
    if not sum(1 for _ in read_documents(stream, name)):
        raise BadInput(f"{name} holds no notifications")


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
        published = await client.publish_many(batch)
        _count(counts, [message for message in published if not message.task_id])
        # Of accepted tasks only their end tells what was stored already.
        for task_id, accepted in Counter(one.task_id for one in published if one.task_id).items():
            task = await client.wait_task(task_id, timeout)
            if task.state is slatemq.TaskState.FAILED:
                raise FailedPrecondition("TASK_FAILED", f"{task_id} failed: {task.error}")
            _count(counts, task.published)
            counts["accepted"] += accepted - len(task.published)


def _count(counts: Counter[str], published: Sequence[Published]) -> None:
    duplicates = sum(message.duplicate for message in published)
    counts["duplicate"] += duplicates
    counts["published"] += len(published) - duplicates
