"""Files of uploads that were killed, on `file://`.

The clients of local stores write an object as `<path>#<n>` and rename it once it is whole. Listings
leave such files out, so one whose writer was killed would stay for ever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_NAME: Final = re.compile(r".+#[0-9]+")


class UnfinishedFile(NamedTuple):
    path: Path
    size_bytes: int


def unfinished_files(folder: Path, before_ms: int) -> Iterator[UnfinishedFile]:
    """Those below a folder that were written last before a time, by the folder's clock."""
    for parent, _, names in os.walk(folder):
        for name in filter(_NAME.fullmatch, names):
            path = Path(parent, name)
            try:
                found = path.stat()
            except FileNotFoundError:
                continue  # it is whole by now
            if found.st_mtime_ns < before_ms * 1_000_000:
                yield UnfinishedFile(path, found.st_size)
