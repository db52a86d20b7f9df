"""Where the bodies of write tasks are that do not travel in their tasks.

    tasks/ingest-<shard>/<backend>/<task ID>.<digest>

Written by the ingest of the shard before the task is enqueued, removed once it is applied. The
digest is XXH3-128 of the body, in hexadecimal.
"""

from __future__ import annotations

from typing import Final

import xxhash

from libs.storage.objects.digests import DIGEST_CHARACTERS, read_checked
from libs.storage.objects.small_objects import Objects

_FOLDER: Final = "tasks"


def task_folder(shard: int) -> str:
    """The folder of a shard's bodies, of all its backends."""
    return f"{_FOLDER}/ingest-{shard}"


def body_name(task_id: str, body: bytes) -> str:
    """The name of a body's object in the folder of its backend."""
    return f"{task_id}.{xxhash.xxh3_128_hexdigest(body)}"


def task_of_body(path: str) -> str:
    """The ID of the task whose body is at this path, if it is a body."""
    return path.rpartition("/")[2].partition(".")[0]


async def read_body(objects: Objects, path: str) -> bytes:
    """The body at this path. Raises ObjectNotFound, and DamagedObject for any other bytes."""
    digest = path[-DIGEST_CHARACTERS:]  # Never empty, which would let any bytes pass.
    return await read_checked(path, digest, lambda: objects.get(path))
