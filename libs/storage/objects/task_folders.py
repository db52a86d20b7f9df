"""Where the bodies of write tasks are that do not travel in their tasks.

    tasks/ingest-<shard>/<backend>/<task ID>

Written by the ingest of the shard before the task is enqueued, removed once it is applied.
"""

from __future__ import annotations

from typing import Final

_FOLDER: Final = "tasks"


def task_folder(shard: int) -> str:
    """The folder of a shard's bodies, of all its backends."""
    return f"{_FOLDER}/ingest-{shard}"
