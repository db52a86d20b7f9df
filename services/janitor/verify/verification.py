"""Verifies an instance: its files, every row of every database, and what they say of one another.

Nothing is written. The databases are read one after the other: all ingests first, then the brokers,
whose entries are compared with the messages of the ingests' logs. Snapshots are taken in this
order, too, so a message that a broker needs and that is not in a log was lost, or came later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from libs.storage.database.integrity import DELETE_COMPACTIONS, find_exchanged
from libs.storage.database.roots import SILENCE_S, Root
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.errors import DamagedStore, StorageError, StoreFailed, StoreUnavailable
from libs.storage.layout.ids import message_id, sequence_of, shard_of
from libs.storage.layout.keys import payload_range
from libs.storage.layout.own_keys import task_key
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.payloads import PayloadUri
from libs.storage.records.replay_records import OPEN_END
from libs.storage.records.task_records import WaitingTask, decode_task_record
from services.janitor.verify.archive import ArchiveCheck
from services.janitor.verify.brokers import (
    ArchivedMessages,
    BrokerCheck,
    BrokerContents,
    NeededMessages,
)
from services.janitor.verify.findings import Findings, Kind
from services.janitor.verify.ingests import (
    IDS_NAMED,
    IngestCheck,
    IngestContents,
    NamedObject,
    named_ids,
)
from services.janitor.verify.objects import ObjectCheck
from services.janitor.verify.walk import Walk
from slatemq._admin.task_ids import task_id_of
from slatemq._counts import counted

REPORT_ROWS: Final = 5_000
"""Rows between two reports of progress."""

OPENINGS: Final = 3
"""Times that a database is opened while the store fails."""

SERVICES: Final = ("ingest", "broker")


class Cancelled(Exception):
    """The verification was cancelled."""


class Databases(Protocol):
    """How the databases are opened: a snapshot each, or as a stopped owner has left them."""

    names: Sequence[str]
    is_stopped: bool

    def open(self, name: str) -> AbstractAsyncContextManager[SnapshotReader]:
        """Open one for reading. Raises StorageError."""

    async def ends(self) -> Mapping[int, int] | None:
        """By ingest shard, the last message of its log by now; None: what was read is the end."""

    def later(self, services: Sequence[str]) -> AbstractAsyncContextManager[Databases]:
        """Those of these services as they are by now; none: what was read is the end."""


@dataclass
class StoppedDatabases:
    """The databases of an instance whose processes are stopped."""

    root: Root
    names: Sequence[str]
    is_stopped: bool = True

    @classmethod
    async def find(cls, root: Root) -> StoppedDatabases:
        names: list[str] = []
        removed = await RemovedShards(root.objects).all()  # Their folders may be left, empty.
        for service in SERVICES:
            folders = await root.objects.folders(service)
            shards = [folder.rpartition("/")[2] for folder in folders]
            numbers = sorted(map(int, filter(str.isdigit, shards)))
            names += [f"{service}/{number}" for number in numbers]
        return cls(root, [name for name in names if name not in removed])

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[SnapshotReader]:
        for again in reversed(range(OPENINGS)):
            try:
                reader = await self.root.open_latest(name)
                break
            except StoreUnavailable:  # its reads are not repeated
                if not again:
                    raise
        try:
            yield reader
        finally:
            await reader.close()

    async def ends(self) -> None:
        """What was read is all that there is."""

    @asynccontextmanager
    async def later(self, services: Sequence[str]) -> AsyncIterator[StoppedDatabases]:
        yield StoppedDatabases(self.root, ())


Report = Callable[[str, int, int], None]
"""Called with what is being done, how many databases are done, and how many there are."""


@dataclass
class Verification:
    """One verification. `run` it once; `findings` has what it found.

    Attributes:
        began_ms: The store's time before any database was read, or a snapshot taken: only what was
            old by then can be a leftover.
    """

    root: Root
    databases: Databases
    began_ms: int
    report: Report = lambda _doing, _done, _count: None
    is_cancelled: Callable[[], bool] = lambda: False
    sizes_only: bool = False
    findings: Findings = field(default_factory=Findings, init=False)
    _ingests: dict[int, IngestContents] = field(default_factory=dict, init=False)
    _brokers: dict[int, BrokerContents] = field(default_factory=dict, init=False)
    _needed: dict[str, set[int]] = field(default_factory=dict, init=False)
    """By broker database, the ingests whose messages its queues have."""
    _removed: frozenset[str] = field(default=frozenset(), init=False)
    _done: int = field(default=0, init=False)

    async def run(self) -> Findings:
        """Raises StoreUnavailable where the store cannot be used, and Cancelled."""
        objects = ObjectCheck(self.root, self.findings, self.sizes_only)
        self.report("looking at the instance", 0, len(self.databases.names))
        self._removed = await RemovedShards(self.root.objects).all()
        await objects.check_instance()
        await objects.check_topology(self.databases.names, is_stopped=self.databases.is_stopped)
        await objects.check_owners(self.databases.names)
        self._ends: Mapping[int, int] | None = None
        try:
            for name in self.databases.names:
                if name.startswith("broker/") and self._ends is None:
                    self._ends = await self.databases.ends()
                await self._check_database(name, objects)
                self._done += 1
        finally:
            await objects.finish()
        await self._check_missing(objects)
        await self._check_bodies(objects)
        self._cross_check()
        self.report("looking for what is left over", self._done, self._done)
        await objects.find_orphans(self.began_ms, lambda: self._read_on(objects))
        queues: dict[str, dict[int, int]] = {}
        moving: set[str] = set()
        for one in self._brokers.values():
            for queue, index in one.queues.items():
                queues.setdefault(queue, {})[one.shard] = index
            moving |= one.leaving | one.arriving
        await objects.check_names(queues, moving, self.began_ms)
        self.findings.counts["databases"] = len(self.databases.names)
        return self.findings

    # --- One database -------------------------------------------------------

    async def _check_database(self, name: str, objects: ObjectCheck) -> None:
        await self._check_files(name)
        check = self._check_ingest if name.startswith("ingest/") else self._check_broker
        await self._read(self.databases, name, lambda walk: check(walk, objects))

    async def _read(
        self, databases: Databases, name: str, read: Callable[[Walk], Awaitable[None]]
    ) -> None:
        try:
            async with databases.open(name) as reader:
                report = partial(self._report_rows, name)
                await read(Walk(name, reader, self.findings, self._check_store, report))
        except StorageError as error:
            await self._check_store()
            self.findings.unreadable.add(name)
            self.findings.add(Kind.FILE, name, "database", "", str(error))

    async def _read_on(self, objects: ObjectCheck) -> None:
        """Note what the messages name that ingests have stored since they were read.

        A push names its object in an outbox, then in an ingest: it may have moved there after the
        ingest's snapshot, and have left the outbox before the broker's.
        """

        async def note(walk: Walk) -> None:
            read = self._ingests.get(walk.shard)
            async for row in walk.rows(payload_range(read.end + 1 if read else 0)):
                if isinstance(row.value, PayloadUri):
                    key = f"message {row.parsed}"
                    objects.note(NamedObject(row.value.uri, -1, walk.name, "payload", row.key, key))

        async with self.databases.later(["ingest"]) as later:
            for name in later.names:
                await self._read(later, name, note)

    async def _check_missing(self, objects: ObjectCheck) -> None:
        """Each payload object that a record names is there, as long as the record names it.

        An object goes once its message was purged, or edited, perhaps since the database was read;
        that of a push, once it was sent, and its message purged. Where it was sent, and its message
        is there and the object is not, the next verification says so of its ingest.
        """
        missing: dict[str, list[NamedObject]] = {}
        for one in objects.missing:
            missing.setdefault(one.shard, []).append(one)
        if not missing:
            return

        async def look_again(walk: Walk) -> None:
            missing[walk.name] = [
                one
                for one in missing.get(walk.name, ())
                if one.uri.encode() in (await walk.reader.get(one.row) or b"")
            ]

        services = sorted({name.partition("/")[0] for name in missing})
        async with self.databases.later(services) as later:
            for name in later.names:
                await self._read(later, name, look_again)
        for named in missing.values():
            for one in named:
                objects.add_missing(one)

    async def _check_bodies(self, objects: ObjectCheck) -> None:
        """Each task that is to be applied, and whose body is an object, has its body.

        Where a part of the ingest could not be read, that may say that the task was applied.
        """
        wrong = {
            ingest.name: await objects.wrong_bodies(ingest.shard, ingest.waiting_tasks)
            for ingest in self._ingests.values()
            if ingest.waiting_tasks and ingest.name not in self.findings.unreadable
        }
        if not any(wrong.values()):
            return

        async def look_again(walk: Walk) -> None:
            # A body goes once its task was applied, perhaps since the ingest was read.
            waiting = wrong.get(walk.name, {})
            for ulid in sorted(waiting):
                value = await walk.reader.get(task_key(ulid))
                if value is None or not isinstance(decode_task_record(value), WaitingTask):
                    del waiting[ulid]

        async with self.databases.later(["ingest"]) as later:
            for name in later.names:
                await self._read(later, name, look_again)
        for name, tasks in wrong.items():
            for ulid, why in sorted(tasks.items()):
                self.findings.add(
                    Kind.OBJECT,
                    name,
                    "task",
                    task_id_of(ulid),
                    f"it is still to be applied, but {why}",
                    advice=_LOST_BODY,
                )

    async def _check_store(self) -> None:
        await self.root.objects.check(SILENCE_S)

    def _report_rows(self, name: str, rows: int) -> None:
        if rows % REPORT_ROWS == 1:
            self._report_reading(f"{name}: {counted(rows, 'row')}")

    def _report_reading(self, what: str) -> None:
        if self.is_cancelled():
            raise Cancelled
        self.report(f"reading {what}", self._done, len(self.databases.names))

    async def _check_files(self, name: str) -> None:
        self.report(f"looking at the files of {name}", self._done, len(self.databases.names))
        try:
            files = await self.root.files(name)
        except (DamagedStore, StoreFailed) as error:
            self.findings.unreadable.add(name)
            self.findings.add(Kind.FILE, name, "manifest", "", str(error))
            return
        faults = [*files.faults, *await find_exchanged(self.root.objects, files.tables)]
        if self.databases.is_stopped and not files.faults:
            fault = await self.root.wal_fault(name, files)
            faults += [fault] if fault is not None else []
        for fault in faults:
            self.findings.unreadable.add(name)
            self.findings.add(Kind.FILE, name, "file", fault.path, fault.wrong)
        if files.compactions is not None:
            self.findings.add(
                Kind.FILE, name, "file", *files.compactions, advice=DELETE_COMPACTIONS
            )
        self.findings.counts["files"] += 1 + len(files.tables) + len(files.wal)

    async def _check_ingest(self, walk: Walk, objects: ObjectCheck) -> None:
        check = IngestCheck(walk)
        async for named in check.objects():
            await objects.begin(named)
        self._ingests[walk.shard] = check.contents

    async def _check_broker(self, walk: Walk, objects: ObjectCheck) -> None:
        check = BrokerCheck(walk)
        archive = ArchiveCheck(
            self.root, self.findings, self._check_store, self.sizes_only, self._report_reading
        )
        async for found in check.needs():
            if isinstance(found, NeededMessages):
                self._compare_messages(walk.name, found)
            elif isinstance(found, ArchivedMessages):
                await archive.check(walk.name, found)
            else:
                await objects.begin(found)
        self._brokers[walk.shard] = check.contents

    # --- Databases beside one another ---------------------------------------

    def _compare_messages(self, name: str, needed: NeededMessages) -> None:
        missing: list[int] = []
        shardless: list[int] = []
        named = self._needed.setdefault(name, set())
        for one in needed.ids:
            shard = shard_of(one)
            named.add(shard)
            if f"ingest/{shard}" in self.findings.unreadable:
                continue
            ingest = self._ingests.get(shard)
            if ingest is None:
                shardless.append(one)
            elif one not in ingest.messages and one <= ingest.end:
                missing.append(one)
        self.findings.counts["entries"] += len(needed.ids)
        for ids, where, advice in (
            (missing, "in no log", ""),
            (shardless, "of ingests without a database", _GIVEN_UP),
        ):
            if ids:
                ids.sort()
                are_needed = counted(len(ids), "message is needed", "messages are needed")
                self.findings.add(
                    Kind.MESSAGE,
                    name,
                    needed.record,
                    f"queue {needed.queue}",
                    f"{are_needed} and {where}: {named_ids(ids)}",
                    advice=advice,
                    queue_id=needed.queue,
                    message_ids=ids[:IDS_NAMED],
                )

    def _end_of(self, shard: int) -> int | None:
        """The last message that the log of an ingest may have; None: it could not be read."""
        ingest = self._ingests.get(shard)
        if ingest is None or ingest.name in self.findings.unreadable:
            return None
        later = (self._ends or {}).get(shard, 0)
        return max(ingest.end, later, message_id(shard, 1) - 1)

    def _cross_check(self) -> None:
        for broker in self._brokers.values():
            if broker.name in self.findings.unreadable:
                continue
            for shard, cursor in broker.cursors.items():
                self._check_place(broker.name, "routing cursor", f"ingest {shard}", shard, cursor)
            self._check_cursors(broker)
            for queue, ranges in broker.replays.items():
                for part in ranges:
                    last = part.cursor if part.end == OPEN_END else part.end
                    shard = part.ingest_shard
                    self._check_place(broker.name, "replay", f"queue {queue}", shard, last)
            self._check_outbox(broker)
        for ingest in self._ingests.values():
            if ingest.name not in self.findings.unreadable:
                self._check_progress(ingest)

    def _check_cursors(self, broker: BrokerContents) -> None:
        """Messages of a log are in queues only up to its cursor, or behind it in a replay."""
        replayed = {part.ingest_shard for ranges in broker.replays.values() for part in ranges}
        needed = self._needed.get(broker.name, set())
        for shard in sorted(needed - broker.cursors.keys() - replayed):
            if f"ingest/{shard}" not in self._removed:
                wrong = "queues have messages of its log, and the cursor is gone"
                key = f"ingest {shard}"
                self.findings.add(
                    Kind.REFERENCE, broker.name, "routing cursor", key, wrong, advice=_LOST_CURSOR
                )

    def _check_place(self, name: str, record: str, key: str, shard: int, place: int) -> None:
        if f"ingest/{shard}" in self._removed:
            return  # Its broker forgets it soon.
        end = self._end_of(shard)
        if shard not in self._ingests and f"ingest/{shard}" not in self.findings.unreadable:
            wrong = f"there is no database ingest/{shard}"
            self.findings.add(Kind.REFERENCE, name, record, key, wrong, advice=_NO_SHARD)
        elif end is not None and place > end:
            wrong = f"it is at message {place}, and the log ends with {end}: its end was lost"
            advice = _LOST_MESSAGES if self._is_left_out(place) else _LOST_END
            self.findings.add(Kind.REFERENCE, name, record, key, wrong, advice=advice)

    def _is_left_out(self, message: int) -> bool:
        """Whether the ingest will give no new message this ID, behind the end of its log."""
        block = self._ingests[shard_of(message)].block
        if block is None:
            return False
        # A running owner may be within its block; each start goes on behind it.
        unused = block.end if self.databases.is_stopped else block.base
        return sequence_of(message) < unused

    def _check_outbox(self, broker: BrokerContents) -> None:
        """What was sent of an outbox is stored, and no more; see `_check_progress` for the rest."""
        for shard, counter in broker.counters.items():
            ingest = self._ingests.get(shard)
            if ingest is None or ingest.name in self.findings.unreadable:
                continue
            progress = ingest.outbox_progress.get(broker.shard, 0)
            last = counter.last_number + counter.offset
            sent = counter.first_waiting - 1 + counter.offset
            key = f"ingest {shard}"
            if progress > last:
                wrong = f"ingest has stored up to {progress}, and the last row was {last}"
                self.findings.add(Kind.REFERENCE, broker.name, "outbox counter", key, wrong)
            elif progress < sent and self.databases.is_stopped:
                wrong = f"rows up to {sent} are gone as sent, and ingest has up to {progress}"
                self.findings.add(Kind.REFERENCE, broker.name, "outbox counter", key, wrong)

    def _check_progress(self, ingest: IngestContents) -> None:
        """What an ingest has stored of outboxes was sent by brokers that know of them."""
        for shard, progress in sorted(ingest.outbox_progress.items()):
            broker, name = self._brokers.get(shard), f"broker/{shard}"
            if not progress or name in self.findings.unreadable or name in self._removed:
                continue
            pushes = counted(progress, "push", "pushes")
            if broker is None:
                wrong = f"{pushes} came from it, and there is no database {name}"
            elif ingest.shard not in broker.counters:
                wrong = f"{pushes} came from it, and its outbox has no counter of them"
            else:
                continue
            record, key = "outbox progress", f"broker {shard}"
            self.findings.add(Kind.REFERENCE, ingest.name, record, key, wrong, advice=_LOST_OUTBOX)


_LOST_BODY: Final = (
    "restore the object below `tasks/` from the store's versions or a copy, under the name of the "
    "task; else the task fails once its backend gives it out, and its messages are not published"
)

_LOST_OUTBOX: Final = (
    "restore the broker's database from a copy that has its outbox. Do not push from that shard "
    "before: the ingest would take its next pushes for those that it has stored"
)

_GIVEN_UP: Final = (
    "restore the ingest's database from a copy. If the shard was given up, each of these becomes "
    "a dead letter when it is claimed: cancel or purge them, or let their retention end"
)

_NO_SHARD: Final = (
    "restore the ingest's database from a copy. To do without it, give the shard up: see "
    "docs/how-to/repair.md"
)

_LOST_CURSOR: Final = (
    "restore the broker's database from a copy that has it, before its process starts: all that is "
    "left of the log would be routed again, and delivered twice"
)

_LOST_END: Final = (
    "the end of this log was lost after it was routed: restore the ingest's database from a copy "
    "that has it. Do not publish before: new messages would get IDs that were used"
)

_LOST_MESSAGES: Final = (
    "the end of this log was lost after it was routed: restore the ingest's database from a copy "
    "that has it, or go on without these messages: no new one gets their IDs, and each queue makes "
    "those that it has dead letters (`payload gone`) when they are claimed"
)
