"""What a backup lacks, in words: which copies, of what, and how many of each.

A copy is of a shard's database (a table or a manifest, such as of `ingest/0`), a payload, a part of
the archive, or the body of a task. Without a table or a manifest there is no instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import Final

from libs.storage.database.blobs import FOLDER as BLOBS
from services.janitor.archive_paths import ARCHIVE_FOLDER
from services.janitor.backup.catalogue import BACKUPS
from slatemq._counts import counted

NAMED_MAX: Final = 100
"""Copies that an answer names; all of them are counted. A lost volume has millions."""

_NAMED_IN_TEXTS: Final = 5

PAYLOADS: Final = "payloads"

_PLACES: Final = {BLOBS: PAYLOADS, ARCHIVE_FOLDER: "archive", "tasks": "tasks"}


def place_of(stored: str) -> str:
    """What a copy at this path of the backup root is of: `payloads`, or such as `ingest/0`."""
    parts = stored.split("/")
    if parts[0] == BACKUPS:  # A manifest: backups/<ID>/ingest/0.manifest
        return "/".join(parts[2:]).removesuffix(".manifest")
    return _PLACES.get(parts[1], "/".join(parts[1:3]))


def is_of_database(stored: str) -> bool:
    """Whether there is no instance without it."""
    return stored.startswith(f"{BACKUPS}/") or stored.split("/")[1] not in _PLACES


def counts_of(paths: Iterable[str]) -> Mapping[str, int]:
    """How many are of each place, sorted."""
    return dict(sorted(Counter(map(place_of, paths)).items()))


def describe(paths: Sequence[str]) -> str:
    """Such as `3 payloads, 1 of ingest/0 (objects/…, objects/… and 2 more)`."""
    counted = ", ".join(starmap(_counted, counts_of(paths).items()))
    more = len(paths) - _NAMED_IN_TEXTS
    named = ", ".join(sorted(paths)[:_NAMED_IN_TEXTS])
    return f"{counted} ({named}{f' and {more:,} more' if more > 0 else ''})"


def _counted(place: str, count: int) -> str:
    if place == PAYLOADS:
        return counted(count, "payload")
    return f"{count:,} of {f'the {place}' if place in _PLACES.values() else place}"
