"""`slatemq import`: the messages of a queue file into a queue, or published.

The request ID or dedupe keys of a batch must be the same when the run after a kill sends it again,
and differ for anything else that is imported: files often begin alike, and are filled and emptied
again. So they include the secret of the run. Only a message with its ID, from an export, has the
same key in every run. The server knows all that is in that key but an encrypted payload, which it
could find by trying: so it is made with the key that encrypts, where there is one. The dedupe keys
of other messages are the same without that key: a run that ends at the first message which needs it
can be repeated with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import click

from slatemq import textqueue
from slatemq._consume.commands import Push
from slatemq._counts import counted
from slatemq._grouping import groups_of
from slatemq._secrets import KEY_HEADER
from slatemq.cli.failures import BadInput
from slatemq.cli.files.import_journal import REPEATABLE_MS, Journal, Sending
from slatemq.cli.files.queue_files import Content, content_of, encryption_problem
from slatemq.cli.output import note, progress
from slatemq.cli.parameters import QUEUE, flag
from slatemq.cli.publish.applied import stored
from slatemq.cli.publish.runs import Run
from slatemq.cli.session import Session, command, in_thread
from slatemq.cli.tq.entries import STDIN, marked, name_of, translated_errors
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from slatemq.models import OutgoingMessage, now_ms
from slatemq.textqueue import AlreadyMarked, Rewritten, State, TextQueue, scan
from slatemq.textqueue.claiming import claimed_by_a_person
from slatemq.textqueue.controls import BYTE_ORDER_MARK

if TYPE_CHECKING:
    from slatemq.client import Client
    from slatemq.encryption import KeyRing

_PLACE = re.compile(r"(?:messages|commands)\[(\d+)\]\.?(?:push\.)?")
"""The part of an error's field that is replaced by the line of the file."""

OTHER_FILES = (
    "`slatemq publish --jsonl` publishes a file with a message on each line, such as JSON lines"
)

BATCH_MESSAGES = 500
BATCH_BYTES = 4 << 20


@command("import")
@click.argument("file", type=click.Path())
@click.option("--to", type=QUEUE, help="Import into this queue, without filters.")
@flag("--publish", help="Publish to all queues whose filters match.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["queued", "processed", "error"]),
    help="Import messages in this state; repeatable.  [default: queued]",
)
@flag("--no-mark", help="Do not mark imported messages.")
@click.option(
    "--unsure",
    type=click.Choice(["skip", "repeat"]),
    help="What to do with messages sent over 9 minutes ago, which may have arrived.",
)
def import_(
    session: Session,
    file: str,
    to: str | None,
    publish: bool,
    states: tuple[str, ...],
    no_mark: bool,
    unsure: str | None,
) -> None:
    """Import the queued messages of FILE (- reads stdin) into a queue, or publish them.

    Examples:
      slatemq import jobs.tq --to jobs
      slatemq import failed.tq --to orders --state error
      slatemq import events.tq --publish          each with its headers, to every
                                                  queue whose filter takes it
      slatemq export a --state available --out - | slatemq import - --to b

    Queued messages (-) are imported, and marked as processed (=) once they are
    durable: after a failure or a kill, run it again to continue. Request IDs (--to)
    or dedupe keys (--publish) identify messages that were being sent, so that
    within 10 minutes they are not imported twice; after that you must check
    whether they have arrived, and say so with --unsure. Stdin can be given again
    within 10 minutes of a failure; after that it is imported again.

    With --no-mark, or other states, the file does not change and does not show
    what was imported: a second import repeats it, except messages with an ID that
    --publish has published within the dedupe window.

    Headers, retention and base64 are taken from the variables, as `slatemq
    export` writes them; without variables a message is its text. The file is
    locked meanwhile; a change by an editor, which does not lock it, is detected.
    """
    if (to is None) != publish:
        raise click.UsageError("give one of --to QUEUE and --publish")
    wanted = [State(state) for state in states or ("queued",)]

    async def work(client: Client) -> Counter[str]:
        if to is not None:
            await client.get_queue(to)  # A queue that does not exist fails even an empty file.
        importer = Importer(session, client, file, to, wanted, not no_mark, unsure)
        try:
            with translated_errors():
                await importer.run()
        except BaseException:
            if imported := importer.counts["imported"]:
                note(f"imported before the error: {imported}")
            raise
        return importer.counts

    counts = session.call(work)
    if not counts["entries"]:
        raise BadInput(f"{name_of(file)} has no entries, so nothing was imported; {OTHER_FILES}")
    kinds = ("imported", "duplicate", "skipped")
    session.show(
        {"file": file, **{f"{kind}_count": counts[kind] for kind in kinds}},
        f"imported: {counts['imported']}  already stored: {counts['duplicate']}  "
        f"skipped: {counts['skipped']}",
    )
    is_marked = file == STDIN or (not no_mark and wanted == [State.QUEUED])
    if to is not None and counts["imported"] and not is_marked and not session.json:
        note(f"{file} does not show what was imported: a second import repeats it")


class Item(NamedTuple):
    entry: textqueue.Entry
    content: Content


def push_of(queue_id: str, content: Content) -> Push:
    return Push(queue_id, content.payload, content.headers, retention=content.retention_s)


def outgoing_of(item: Item, secret: str, ring: KeyRing | None) -> OutgoingMessage:
    """A publish; within the dedupe window an exported message is published once."""
    content, key = item.content, _key(item, secret)
    if ring is not None and KEY_HEADER in content.headers:
        key = ring.digest(key.encode()).hex()
    return OutgoingMessage(
        content.payload,
        content.headers,
        content.created_at_ms,
        content.retention_s,
        dedupe_key="tq-" + key,
    )


def request_id(target: str, batch: Sequence[Item], secret: str) -> str:
    """Unique to this batch of this run, and this target."""
    digest = hashlib.blake2b(f"{target} {secret} ".encode(), digest_size=16)
    for item in batch:
        digest.update(_key(item, secret).encode())
    return digest.hexdigest()


def _key(item: Item, secret: str) -> str:
    """Identifies a message by its content, and its ID or else its place in the file."""
    entry, content = item
    name = f"in {secret} at {entry.offset}"
    if content.message_id:
        name = f"id {content.message_id} of {content.created_at_ms}"
    digest = hashlib.blake2b(f"{name} {sorted(content.headers.items())} ".encode(), digest_size=16)
    digest.update(content.payload)
    return digest.hexdigest()


class Importer:
    """Imports one file, a batch at a time.

    Attributes:
        counts: Of entries, and of imported, duplicate and skipped messages.
    """

    def __init__(
        self,
        session: Session,
        client: Client,
        file: str,
        to: str | None,
        states: list[State],
        marking: bool,
        unsure: str | None,
    ) -> None:
        """With `to` None it publishes."""
        self.counts: Counter[str] = Counter()
        self._session = session
        self._client = client
        self._ring = session.key_ring()
        self._file = file
        self._to = to
        self._states = states
        self._name = name_of(file)
        self._marking = marking and file != STDIN
        self._unsure = unsure
        self._secret = ""
        self._noted: set[str] = set()
        self._claimed: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Import all. Raises BadInput, SlateMQError, OSError; what was imported stays imported."""
        if self._file == STDIN:
            await self._run_stream()
            return
        size = os.stat(self._file).st_size
        self._queue = TextQueue(self._file)
        with (
            self._queue.lock(wait=False) if self._marking else nullcontext(),
            progress(not self._session.json, "bytes", size) as update,
        ):
            journal = Journal.beside(self._file, self._target, sorted(self._states))
            self._secret = journal.secret
            if journal.sending is not None:
                await self._resume(journal, journal.sending)
            if self._marking:
                self._claimed = self._queue.claimed_offsets()
            for batch in self._batches(self._queue.entries(*State), self._start(journal)):
                sending = Sending(
                    [item.entry.offset for item in batch],
                    request_id(self._target, batch, self._secret),
                    now_ms(),
                )
                journal.sending = sending
                journal.store()
                await self._sent(journal, batch, sending.request_id)
                self._settled(journal, batch)
                update(completed=batch[-1].entry.end)
            journal.remove()

    async def _run_stream(self) -> None:
        """Import stdin, read in a thread because its writer may be slow."""
        entries = scan(lambda wanted: os.read(sys.stdin.fileno(), wanted), self._name)
        batches = self._batches(entries, 0)
        # All batches go to one shard, so its number does not matter.
        this_run = Run(STDIN, ["import", self._target, sorted(self._states)], [0])
        self._secret = this_run.secret
        is_sent = False
        try:
            while (batch := await in_thread(lambda: next(batches, None))) is not None:
                is_sent = True
                await self._send(batch, request_id(self._target, batch, self._secret))
        except BaseException as error:
            if imported := self.counts["imported"]:
                again = "repeat the command with the same input within 10 minutes to continue"
                what = counted(imported, "message was imported", "messages were imported")
                note(f"{what} before the error: {again}")
            is_refused = self._to is not None and isinstance(error, BadInput)
            this_run.stop(imported > 0 or (is_sent and not is_refused))
            raise
        this_run.finish()

    @property
    def _target(self) -> str:
        return "--publish" if self._to is None else f"--to {self._to}"

    # --- The file -----------------------------------------------------------

    def _start(self, journal: Journal) -> int:
        """The offset to continue from; 0 where marks show it. Raises BadInput."""
        if journal.last < 0 or self._marking:
            return 0
        try:
            entry = self._queue.entry(journal.last)
        except textqueue.TextQueueError:
            entry = None
        if entry is None or entry.digest != journal.digest:
            raise BadInput(
                f"{self._file} was changed since the last, incomplete import: remove "
                f"{journal.path} to start over"
            )
        return journal.through

    def _batches(self, entries: Iterator[textqueue.Entry], start: int) -> Iterator[list[Item]]:
        items = self._items(entries, start)
        return groups_of(items, lambda item: len(item.entry.raw), BATCH_BYTES, BATCH_MESSAGES)

    def _items(self, entries: Iterator[textqueue.Entry], start: int) -> Iterator[Item]:
        is_first = True
        for entry in entries:
            # An empty line with a Windows line end is an entry, too, and shows no kind of file.
            shows_kind = entry.state is not State.COMMENT and entry.control != "\r"
            if entry.state is State.UNKNOWN:
                self._warn_of_unknown(entry, is_first and shows_kind)
            is_first = is_first and not shows_kind
            if entry.offset < start or entry.state in (State.COMMENT, State.UNKNOWN):
                continue
            self.counts["entries"] += 1
            item = self._item(entry)
            if item is None:
                self.counts["skipped"] += 1
            else:
                yield item

    def _item(self, entry: textqueue.Entry) -> Item | None:
        if entry.state not in self._states:
            return None
        is_claimed = self._marking and entry.state is State.QUEUED
        if is_claimed and (entry.offset in self._claimed or claimed_by_a_person(entry)):
            note(f"{self._name}:{entry.line}: skipped, because it is claimed")
            return None
        content = content_of(entry, self._name)
        if not content.digest and b"\r\n" in entry.raw:
            why = "lines end with a carriage return (a Windows line end), which is imported, too"
            self._note_once(entry, "returns", why)
        if content.is_gone:
            note(f"{self._name}:{entry.line}: skipped: its message was no longer stored")
            return None
        item = Item(entry, content)
        self._check_encryption(item)
        return item

    def _check_encryption(self, item: Item) -> None:
        """Raises BadInput where its payload must not be sent so."""
        problem = encryption_problem(item.content, self._ring)
        if problem:
            raise BadInput(f"{self._name}:{item.entry.line}: {problem}")

    def _warn_of_unknown(self, entry: textqueue.Entry, is_first: bool) -> None:
        """Note it. Raises BadInput where a file begins with it: others have lists in them, too."""
        if entry.control == BYTE_ORDER_MARK:
            self._note_once(entry, "mark", marked(self._file))
            return
        if is_first:
            raise BadInput(
                f"{self._name}:{entry.line}: no entry of a queue file begins with "
                f"{entry.control!r}, so nothing was imported; {OTHER_FILES}"
            )
        why = f"skipped, because {entry.control!r} is not a known control character"
        self._note_once(entry, "unknown", why)

    def _note_once(self, entry: textqueue.Entry, what: str, why: str) -> None:
        """Note the first of its kind: there may be millions."""
        if what not in self._noted:
            self._noted.add(what)
            note(f"{self._name}:{entry.line}: {why}")

    def _settled(self, journal: Journal, batch: list[Item]) -> None:
        """Mark a durable batch, and store how far the import is."""
        for entry, _ in batch:
            if not self._marking or entry.state is not State.QUEUED:
                continue
            try:
                self._queue.done(entry)
            except AlreadyMarked:
                continue  # by an earlier run, or by hand
            except Rewritten as error:
                raise BadInput(
                    f"{self._file} was changed without its lock: "
                    f"{counted(len(batch), 'message was', 'messages were')} imported, from line "
                    f"{batch[0].entry.line} on, but not all could be marked ({error})"
                ) from None
        last = batch[-1].entry
        journal.through, journal.last, journal.digest = last.end, last.offset, last.digest
        journal.sending = None
        journal.store()

    # --- The queue ----------------------------------------------------------

    async def _resume(self, journal: Journal, sending: Sending) -> None:
        """Finish the batch that an earlier run was sending when it ended."""
        batch: list[Item] = []
        try:
            for offset in sending.offsets:
                entry = self._queue.entry(offset)
                batch.append(Item(entry, content_of(entry, self._name)))
        except (textqueue.TextQueueError, BadInput):
            batch = []
        for item in batch:
            self._check_encryption(item)
        if request_id(self._target, batch, self._secret) != sending.request_id:
            self._doubt(journal, "and the file was changed since")
            if self._unsure == "skip":
                raise BadInput(
                    f"{self._file} was changed since: mark what has arrived with = yourself, then "
                    "use --unsure repeat"
                )
            journal.sending = None
            journal.store()
            return
        age_ms = now_ms() - sending.at_ms
        if not 0 <= age_ms <= REPEATABLE_MS:
            self._doubt(journal, f"from line {self._line(sending)} on, over 9 minutes ago")
        if self._unsure != "skip" or 0 <= age_ms <= REPEATABLE_MS:
            await self._sent(journal, batch, sending.request_id)
        self._settled(journal, batch)

    def _doubt(self, journal: Journal, why: str) -> None:
        if self._unsure is None:
            assert journal.sending is not None, "there is a batch to doubt"
            count = len(journal.sending.offsets)
            sending = counted(count, "message was being sent", "messages were being sent")
            have_arrived = "it has arrived" if count == 1 else "they have arrived"
            raise BadInput(
                f"{sending} when the last import of {self._file} ended, {why}: check whether "
                f"{have_arrived}, and use --unsure skip if so, --unsure repeat if not"
            )

    def _line(self, sending: Sending) -> int:
        first = sending.offsets[0]
        entries = self._queue.entries(*State)
        return next((entry.line for entry in entries if entry.offset >= first), 0)

    async def _sent(self, journal: Journal, batch: list[Item], request_id: str) -> None:
        """Send a batch; a refused one is no longer in the journal."""
        try:
            await self._send(batch, request_id)
        except (BadInput, NotFound, FailedPrecondition):
            journal.sending = None
            # A part of a publish may be stored, and its keys must stay known.
            if journal.last < 0 and self._to is not None:
                journal.remove()
            else:
                journal.store()
            raise

    async def _send(self, batch: list[Item], request_id: str) -> None:
        """Send a batch, which is durable when this returns."""
        try:
            if self._to is not None:
                pushes = [push_of(self._to, item.content) for item in batch]
                await self._client.execute(pushes, request_id=request_id)
                self.counts["imported"] += len(batch)
                return
            published = await self._client.publish_many(
                [outgoing_of(item, self._secret, self._ring) for item in batch]
            )
            done = await stored(self._client, published, self._session.timeout)
        except InvalidArgument as error:
            place = _PLACE.match(error.field)
            line = batch[int(place[1]) if place else 0].entry.line
            why = error.field[place.end() :] + f": {error.description}" if place else error.message
            raise BadInput(f"{self._name}:{line}: {why}") from None
        except (Unavailable, DeadlineExceeded):
            note("unanswered messages may have arrived: repeat the same command to continue")
            raise
        duplicates = sum(one.duplicate for one in done)
        self.counts["duplicate"] += duplicates
        self.counts["imported"] += len(batch) - duplicates
