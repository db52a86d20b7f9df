"""What lies beside the databases: payload objects, names, owners, the instance, the topology."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

from libs.serving.process.instance import settings_of_record
from libs.storage.database.blobs import BLOB_PATH, Blobs
from libs.storage.database.blobs import FOLDER as BLOBS
from libs.storage.database.roots import Root
from libs.storage.errors import (
    CorruptRecord,
    DamagedObject,
    ForeignUri,
    ObjectNotFound,
    OtherFormat,
    StorageError,
)
from libs.storage.objects.instance_records import InstanceRecords
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.queue_names import CLAIM_PATH, QueueNames, named_shards
from libs.storage.objects.queue_names import FOLDER as QUEUE_NAMES
from libs.storage.objects.shard_owners import ShardOwners
from libs.storage.objects.task_folders import read_body, task_folder, task_of_body
from libs.storage.objects.topology_entries import FOLDER as TOPOLOGY
from libs.storage.objects.topology_entries import database_of
from services.janitor.orphans import ORPHAN_AGE_MS
from services.janitor.verify.findings import Findings, Kind
from services.janitor.verify.ingests import NamedObject
from slatemq._admin.task_ids import is_task_id, parse_task_id
from slatemq._counts import counted

READS_AT_ONCE: Final = 8
"""Objects read at the same time, a MiB of each in memory."""

MISSING_MAX: Final = 100_000
"""Payload objects that are looked for again, some 500 bytes each. More do not go by themselves
while an instance is read."""

CLAIM_AGE_MS: Final = 3600 * 1000
"""How old a claim of a name is that has no queue, before it is a leftover."""

_LOST_DATABASE: Final = (
    "stop the shard's process, and restore its database from the store's versions or a copy, or "
    "mount what holds it. To give the shard up instead, see `Give a shard up` of "
    "docs/how-to/repair.md"
)

_FOREIGN: Final = "remove it by hand: SlateMQ did not write it"

_DAMAGED_ENTRY: Final = "restart the shard's process: each start writes its entry again"

_DAMAGED_OWNER: Final = (
    "delete it: it counts as of a process without a name, and the next claim replaces it"
)

_DAMAGED_NAME: Final = (
    "restore this object from the store's versions or a copy: calls that need to know where the "
    "queue is fail until then"
)


@dataclass
class ObjectCheck:
    """Verifies the objects of a root.

    Attributes:
        missing: What records name and is not there: it may have gone with its message since.
    """

    root: Root
    findings: Findings
    sizes_only: bool = False
    missing: list[NamedObject] = field(default_factory=list, init=False)
    _named: set[bytes] = field(default_factory=set, init=False)
    _reading: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._blobs = Blobs(self.root)
        self._turns = asyncio.Semaphore(READS_AT_ONCE)

    # --- Payload objects ----------------------------------------------------

    def note(self, named: NamedObject) -> str | None:
        """Note that a record names a payload object; its path, None and a finding if it is none."""
        try:
            path = self._blobs.path_of(named.uri)
        except ForeignUri:
            self.findings.unreadable.add(named.shard)  # It may be any object that it needs.
            wrong = f"it names {named.uri}, which is not a payload object below this root"
            self._add(named, Kind.REFERENCE, wrong)
            return None
        self._named.add(_name_of(path))
        return path

    async def begin(self, named: NamedObject) -> None:
        """Note a payload object, and have it checked; waits for a free place."""
        path = self.note(named)
        if path is None or named.size_bytes < 0:
            return  # of a message that the log does not have: its size is not known
        await self._turns.acquire()
        task = asyncio.create_task(self._check(path, named))
        self._reading = [one for one in self._reading if not one.done()]
        self._reading.append(task)

    async def finish(self) -> None:
        """Wait for all that was begun."""
        await asyncio.gather(*self._reading)

    async def _check(self, path: str, named: NamedObject) -> None:
        try:
            if self.sizes_only:
                found_bytes = await self.root.objects.size(path)
                if found_bytes != named.size_bytes:
                    detail = (
                        f"it has {counted(found_bytes, 'byte')} instead of {named.size_bytes:,}"
                    )
                    raise DamagedObject(path, detail)
            else:
                await self._blobs.check(path, named.size_bytes)
            self.findings.counts["payload objects"] += 1
        except ObjectNotFound:
            if len(self.missing) < MISSING_MAX:
                self.missing.append(named)
            else:
                self.add_missing(named)
        except DamagedObject as error:
            self._add(named, Kind.OBJECT, f"its payload, {path}, is damaged: {error.detail}")
        except StorageError as error:
            self._add(named, Kind.OBJECT, f"its payload, {path}, cannot be read: {error}")
        finally:
            self._turns.release()

    def add_missing(self, named: NamedObject) -> None:
        self._add(named, Kind.OBJECT, f"its payload, {named.uri}, is gone")

    def _add(self, named: NamedObject, kind: Kind, wrong: str) -> None:
        self.findings.add(
            kind,
            named.shard,
            named.record,
            named.key,
            wrong,
            message_ids=named.message_ids,
        )

    async def find_orphans(self, began_ms: int, read_on: Callable[[], Awaitable[None]]) -> None:
        """The payload objects that nothing names. Call it when all databases were read.

        `began_ms` is the store's time before the snapshots that were read. `read_on` notes what
        ingests name by now; it is called once, and only where an object would be an orphan.
        """
        is_read = False
        if self.findings.unreadable:
            return  # what could not be read may name them
        for folder in await self.root.objects.folders(BLOBS):
            for info in await self.root.objects.describe(folder):
                if not BLOB_PATH.fullmatch(info.path):
                    self.findings.add(
                        Kind.LEFTOVER,
                        BLOBS,
                        "object",
                        info.path,
                        "not the name of a payload",
                        advice=_FOREIGN,
                    )
                    continue
                name = _name_of(info.path)
                if name in self._named or info.modified_ms >= began_ms - ORPHAN_AGE_MS:
                    continue
                if not is_read:
                    await read_on()
                    is_read = True
                    if self.findings.unreadable:
                        return
                if name not in self._named:
                    wrong = f"no record names it; it has {counted(info.size_bytes, 'byte')}"
                    self.findings.add(Kind.LEFTOVER, BLOBS, "payload object", info.path, wrong)

    async def wrong_bodies(self, shard: int, tasks: Set[bytes]) -> dict[bytes, str]:
        """What is wrong with the bodies of these tasks of one ingest, in the store of any backend.

        Bodies are read, unless sizes alone are looked at.
        """
        wrong = dict.fromkeys(tasks, "its body is gone")
        for path in await self.root.objects.list(task_folder(shard)):
            task_id = task_of_body(path)
            ulid = parse_task_id(task_id).ulid if is_task_id(task_id) else b""
            if ulid not in wrong:
                continue
            try:
                if not self.sizes_only:
                    await read_body(self.root.objects, path)
                del wrong[ulid]
            except ObjectNotFound:
                pass
            except DamagedObject as error:
                wrong[ulid] = f"its body, {path}, is damaged: {error.detail}"
        return wrong

    # --- The instance -------------------------------------------------------

    async def check_instance(self) -> None:
        try:
            record = await InstanceRecords(self.root.objects).latest()
            if record is not None:
                settings_of_record(record)
        except (CorruptRecord, OtherFormat) as error:
            self.findings.add(
                Kind.OBJECT,
                "instance",
                "settings",
                "",
                str(error),
                advice="restore this object from the store's versions or a copy: no process starts "
                "without it",
            )
            return
        if record is None:
            self.findings.add(
                Kind.OBJECT,
                "instance",
                "settings",
                "",
                "there is no record",
                advice="restore the folder `instance/` from the store's versions or a copy: no "
                "process starts without it",
            )

    async def check_topology(self, databases: Iterable[str], *, is_stopped: bool) -> None:
        """Each shard that has a database has an entry, and each entry of a shard a database.

        A shard writes its entry after its first commit: without a database, that is lost. Each
        start writes it: in an instance that `is_stopped`, it may lack, as after a restore.
        """
        known = set(databases)
        announced: set[str] = set()
        paths = await self.root.objects.list(TOPOLOGY)
        # Listed after the entries: a shard that has come meanwhile has its folder by now.
        folders = {
            f"{service}/{folder.rpartition('/')[2]}"
            for service in ("ingest", "broker")
            for folder in await self.root.objects.folders(service)
        }
        for path in paths:
            if not path.endswith(".json"):
                continue  # what marks a change of the others
            database = database_of(path)
            if database is not None and database not in known:
                self.findings.unreadable.add(database)
                if database not in folders:
                    wrong = f"{path} says that the shard had one, and it is gone"
                    self.findings.add(
                        Kind.FILE, database, "database", "", wrong, advice=_LOST_DATABASE
                    )
            fields = await self._json(path)
            if fields is None:
                continue
            name = f"{fields.get('service')}/{fields.get('shard')}"
            announced.add(name)
            if path != f"{TOPOLOGY}/{name.replace('/', '-')}.json":
                self.findings.add(
                    Kind.OBJECT,
                    TOPOLOGY,
                    "entry",
                    path,
                    f"it is about {name}",
                    advice=_DAMAGED_ENTRY,
                )
        for name in sorted(folders - known - announced):
            self.findings.unreadable.add(name)
            wrong = "it is not in the topology, so it was not read"
            advice = "start its process, which writes its entry; then verify again"
            self.findings.add(Kind.REFERENCE, name, "database", "", wrong, advice=advice)
        for name in () if is_stopped else sorted(known - announced):
            self.findings.add(
                Kind.REFERENCE,
                name,
                "topology entry",
                "",
                "no process finds the shard",
                advice="start the shard's process: it writes its entry",
            )

    async def check_owners(self, databases: Iterable[str]) -> None:
        for database in databases:
            claim = await ShardOwners(self.root.objects, database).latest()
            if claim.damage:
                self.findings.add(
                    Kind.OBJECT, database, "shard owner", "", claim.damage, advice=_DAMAGED_OWNER
                )

    async def check_names(
        self, queues: Mapping[str, Mapping[int, int]], moving: Set[str], began_ms: int
    ) -> None:
        """Each queue has the claim of its name, and each partition its place in it.

        `queues` are their shards, with the index of the partition on each; one that moves has none.
        `moving` are those that move, or of which a partition does. `began_ms` is the store's time
        before the snapshots that have them: claims made since are of queues that were created,
        deleted or moved meanwhile.
        """
        for path in await self.root.objects.list(QUEUE_NAMES):
            if not CLAIM_PATH.fullmatch(path):
                wrong = "not the claim of a name"
                self.findings.add(
                    Kind.LEFTOVER, QUEUE_NAMES, "object", path, wrong, advice=_FOREIGN
                )
        claimed: dict[str, tuple[int, ...]] = {}
        changed: set[str] = set()
        async for path, modified_ms, found in QueueNames(self.root.objects).valid():
            if isinstance(found, CorruptRecord):
                wrong = found.detail.removeprefix(f"{path}: ")
                self.findings.add(
                    Kind.OBJECT, QUEUE_NAMES, "queue name", path, wrong, advice=_DAMAGED_NAME
                )
                continue
            queue_id, claim = found
            if modified_ms >= began_ms:
                changed.add(queue_id)
            if not claim.broker_shards:
                continue
            claimed[queue_id] = claim.broker_shards
            is_old = modified_ms < began_ms - CLAIM_AGE_MS
            is_used = queue_id in queues or queue_id in moving
            if is_old and not is_used and not self.findings.unreadable:
                wrong = (
                    f"{named_shards(claim.broker_shards)} claimed it, and no such queue is there"
                )
                self.findings.add(
                    Kind.LEFTOVER, QUEUE_NAMES, "queue name", queue_id, wrong, queue_id=queue_id
                )
        places = [(one, *place) for one, shards in queues.items() for place in shards.items()]
        for queue_id, shard, index in sorted(places):
            claimers = claimed.get(queue_id, ())
            if claimers[index : index + 1] != (shard,) and queue_id not in changed:
                self.findings.add(
                    Kind.REFERENCE,
                    f"broker/{shard}",
                    "queue name",
                    queue_id,
                    f"{named_shards(claimers)} claimed its name, and the queue is here: "
                    "another could be created",
                    advice="restore the folder `queue-names/` from a copy",
                    queue_id=queue_id,
                )

    async def _json(self, path: str) -> dict[str, Any] | None:
        try:
            fields = load_json(await self.root.objects.get(path))
            if not isinstance(fields, dict):
                raise ValueError("it is not an object of JSON")
        except ObjectNotFound:
            return None  # withdrawn since it was listed
        except ValueError as error:
            self.findings.add(
                Kind.OBJECT, TOPOLOGY, "entry", path, str(error), advice=_DAMAGED_ENTRY
            )
            return None
        return fields


def _name_of(path: str) -> bytes:
    """The name of a payload object, in half the memory of its path."""
    return bytes.fromhex(path.removeprefix(f"{BLOBS}/").replace("/", ""))
