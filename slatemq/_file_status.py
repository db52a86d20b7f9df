"""Whether files have changed: certificates, tokens and policies are read again when they have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

LOOK_S: Final = 2.0
"""How often files that are in use are looked at, in seconds."""


def file_status(*files: Path | None) -> tuple[object, ...]:
    """Differs from an earlier one when one of the files was changed or replaced."""
    return tuple(_one(file) for file in files if file is not None)


def _one(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
