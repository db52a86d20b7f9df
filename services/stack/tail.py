"""The last thing a log says."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 8_192


def last_line(path: Path | None, since_bytes: int = 0) -> str:
    """The last line of a log, written after its first `since_bytes`; empty where there is none."""
    if path is None:
        return ""
    try:
        with path.open("rb") as log:
            end = log.seek(0, 2)
            log.seek(max(since_bytes, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
