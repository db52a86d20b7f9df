"""The bodies of write tasks: small ones travel in their tasks, others are objects.

An object `tasks/ingest-<shard>/<backend>/<task ID>.<digest>` is durable before its task is
enqueued, and is removed once the task is applied. Before its publish is answered, a record says
that it must be kept. An old object without a record is an orphan: its publish was never answered
(see services.ingest.tasks.cleanup). Objects in the folders of other backends stay here; a janitor
removes them later (services.janitor.jobs.task_bodies).
"""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from typing import Any, Final

from libs.storage.errors import StoreUnavailable
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.task_folders import body_name, read_body, task_folder
from slatemq.errors import InvalidArgument

log = logging.getLogger(__name__)

INLINE_BODY_BYTES_MAX: Final = 512 << 10
"""Bodies up to this size travel in the task, in base 64: Kafka takes messages of 1 MB by
default."""

TASK_BYTES: Final = 4096
"""More than a task takes beside its body."""

ENQUEUE_MS_MAX: Final = 5 * 60_000
"""A publish whose task took longer to enqueue is answered with an error."""

ORPHAN_MS: Final = 15 * 60_000
"""The least age of an orphan: far beyond `ENQUEUE_MS_MAX`."""


def inline_bytes_max(message_bytes_max: float) -> float:
    """How large a body may be to travel in its task, by what the backend takes at most."""
    return min(INLINE_BODY_BYTES_MAX, (message_bytes_max - TASK_BYTES) * 3 / 4)


def within_task(body: bytes) -> dict[str, Any]:
    """The members of a task's payload that hold a body."""
    return {"content_length": len(body), "body": b64encode(body).decode()}


class TaskBodies:
    """The bodies of one shard's tasks. Methods raise StoreUnavailable when the store is down."""

    def __init__(self, objects: Objects, shard: int, backend: str) -> None:
        """`backend` is the backend's folder; see TaskBackend.place."""
        self._objects = objects
        self._of_shard = task_folder(shard)
        self._folder = f"{self._of_shard}/{backend}"
        self._others_count = 0

    async def put(self, task_id: str, body: bytes) -> dict[str, Any]:
        """Make a body durable as an object; returns the members of the payload that name it."""
        path = f"{self._folder}/{body_name(task_id, body)}"
        await self._objects.put(path, body)
        return {"content_length": len(body), "data_ref": path}

    async def get(self, payload: Mapping[str, Any]) -> bytes:
        """The body that a task's payload holds or names.

        Raises ObjectNotFound, DamagedObject, and InvalidArgument for a payload of another form.
        """
        path = self.path_of(payload)
        if path is not None:
            return await read_body(self._objects, path)
        try:
            return b64decode(str(payload["body"]), validate=True)
        except (KeyError, ValueError) as error:
            raise InvalidArgument("payload.body", f"must be base 64: {error}") from error

    def path_of(self, payload: Mapping[str, Any]) -> str | None:
        """The path of a body that is an object. Raises InvalidArgument for one of another shard.

        It may lie in the folder of another backend: perhaps this one at an earlier address.
        """
        path = payload.get("data_ref")
        if path is None:
            return None
        folder = self._of_shard
        if not isinstance(path, str) or not path.startswith(f"{folder}/") or ".." in path:
            raise InvalidArgument("payload.data_ref", f"must be below {folder}, not {path!r}")
        return path

    async def remove(self, payload: Mapping[str, Any]) -> None:
        """Remove a body that is an object; no error if it is gone."""
        path = self.path_of(payload)
        if path is not None:
            await self._objects.delete(path)

    async def old(self, now_ms: int) -> Collection[str]:
        """The paths of this backend's objects that are old enough to be orphans."""
        found = await self._objects.describe(self._of_shard)
        own = [info for info in found if info.path.startswith(f"{self._folder}/")]
        self._log_others(len(found) - len(own))
        return {info.path for info in own if info.modified_ms < now_ms - ORPHAN_MS}

    def _log_others(self, count: int) -> None:
        if count > self._others_count:
            log.warning(
                "%s has %d bodies of publishes accepted with another backend, address or prefix: "
                "unless that was this backend by another name, these settings apply none of them "
                "(docs/how-to/async.md, Switch it off)",
                self._of_shard,
                count,
            )
        self._others_count = count

    async def remove_orphans(self, paths: Collection[str]) -> int:
        """Remove those that are still there; returns how many."""
        left = {info.path for info in await self._objects.describe(self._folder)}
        orphans = sorted(left.intersection(paths))
        for path in orphans:
            await self._objects.delete(path)
        return len(orphans)


async def warn_of_stranded(objects: Objects, shard: int) -> None:
    """Warn when a shard has bodies of tasks that its settings would never apply."""
    folder = task_folder(shard)
    try:
        count = len(await objects.describe(folder))
    except StoreUnavailable as error:
        log.info("cannot look for tasks of async or sync mode: %s", error)
        return
    if count:
        log.warning(
            "%s has %d bodies of publishes accepted in async or sync mode, and these settings "
            "apply none: start with the earlier settings until no task is pending "
            "(docs/how-to/async.md, Switch it off)",
            folder,
            count,
        )
