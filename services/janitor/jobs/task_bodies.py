"""The bodies of write tasks that no task needs any more, in the folders of all queue backends.

An ingest removes those of the backend that it uses, within minutes, since it can ask that backend
which tasks wait. A janitor cannot. So it takes a body whose task was applied, or that is a week old
without a record: a publish is answered only once its record says that the body must stay. Where the
task of such a publish still comes from a backend, it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libs.storage.database.roots import Root
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.layout.own_keys import task_key
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import ObjectInfo
from libs.storage.objects.task_folders import task_folder, task_of_body
from libs.storage.records.task_records import AppliedTask, decode_task_record
from services.janitor.orphans import ORPHAN_AGE_MS
from services.janitor.snapshots import SnapshotName, opened
from slatemq._admin.task_ids import is_task_id, parse_task_id

UNANSWERED_AGE_MS: Final = 7 * 24 * 3600 * 1000
"""How old a body without a record is before it goes: outages of backends are shorter."""


async def unneeded_bodies(
    root: Root, names: Sequence[SnapshotName], store_time_ms: int
) -> list[ObjectInfo]:
    """Bodies that no task needs by these snapshots, which were taken after `store_time_ms`.

    Also those of ingests that were given up, whose tasks no other ingest applies.
    """
    found: list[ObjectInfo] = []
    for shard in await RemovedShards(root.objects).numbers("ingest"):
        listed = await root.objects.describe(task_folder(shard))
        old = [one for one in listed if one.modified_ms < store_time_ms - UNANSWERED_AGE_MS]
        found += [one for one in old if is_task_id(task_of_body(one.path))]
    for name in names:
        if name.service == "ingest":
            listed = await root.objects.describe(task_folder(name.shard))
            old = [one for one in listed if one.modified_ms < store_time_ms - ORPHAN_AGE_MS]
            if old:
                async with opened(root, name) as reader:
                    found += [one for one in old if await _is_unneeded(reader, one, store_time_ms)]
    return found


async def _is_unneeded(reader: SnapshotReader, body: ObjectInfo, store_time_ms: int) -> bool:
    task_id = task_of_body(body.path)
    if not is_task_id(task_id):
        return False
    record = await reader.get(task_key(parse_task_id(task_id).ulid))
    if record is None:
        return body.modified_ms < store_time_ms - UNANSWERED_AGE_MS
    return isinstance(decode_task_record(record), AppliedTask)
