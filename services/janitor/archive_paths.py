"""Where the archive of dead letters is, below the root of an instance."""

from __future__ import annotations

import hashlib
import re
from datetime import date
from typing import Final

from libs.storage.objects.small_objects import ObjectInfo

ARCHIVE_FOLDER: Final = "archive/dead-letters"

NAME_LENGTH_MAX: Final = 240
"""Of a queue as its folder is named: file systems take names of 255 bytes, queues have as many."""

NAME_KEPT: Final = 200
"""Of a longer name; the rest of its folder's is a digest, behind what no queue's name has."""

EMPTY_BYTES: Final = 6_000
"""More than the file of an empty part has; that of a single dead letter has some hundred more."""

_PART: Final = re.compile(r"part-(\d{6,})\.parquet")


def day_path(queue: str, day: date) -> str:
    """The folder of a queue's dead letters that failed on a day."""
    if len(queue) > NAME_LENGTH_MAX:
        digest = hashlib.blake2b(queue.encode(), digest_size=16).hexdigest()
        queue = f"{queue[:NAME_KEPT]}~{digest}"
    return f"{ARCHIVE_FOLDER}/queue={queue}/day={day.isoformat()}"


def is_part(info: ObjectInfo) -> bool:
    return _PART.fullmatch(info.path.rpartition("/")[2]) is not None


def may_be_empty(info: ObjectInfo) -> bool:
    """Whether it is a part that may have been emptied."""
    return is_part(info) and info.size_bytes < EMPTY_BYTES
