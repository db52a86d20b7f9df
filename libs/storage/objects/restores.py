"""What marks a root to which a backup is being restored: until its end, that is no instance."""

from __future__ import annotations

from typing import Final

from libs.storage.errors import UnfinishedRestore
from libs.storage.objects.small_objects import Objects

RESTORING: Final = "restoring.json"
"""Written before anything else of a restore, and removed behind all else."""


async def refuse_unfinished_restore(objects: Objects, url: str) -> None:
    """Raises UnfinishedRestore: databases would go on under numbers that were given out since."""
    if await objects.exists(RESTORING):
        raise UnfinishedRestore(
            f"{url} has {RESTORING}: a restore to it has not ended. End all processes, and repeat "
            "it (`python -m services.janitor backup restore`), or empty the root"
        )
