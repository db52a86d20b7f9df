"""Where a process notes what it serves; `libs.serving.peers.topology` says what it notes.

    topology/<service>-<shard>.json

An ingest or a broker writes its entry after its first commit, and never removes it: where there is
one, there was a database.
"""

from __future__ import annotations

from typing import Final

FOLDER: Final = "topology"

_ENDING: Final = ".json"


def entry_path(service: str, shard: int) -> str:
    return f"{FOLDER}/{service}-{shard}{_ENDING}"


def entry_path_of(database: str) -> str:
    """The path for the shard of a database, such as `ingest/0`."""
    service, _, shard = database.partition("/")
    return entry_path(service, int(shard))


def database_of(path: str) -> str | None:
    """The database, such as `ingest/0`, that the shard of an entry had; None of another object."""
    name = path.removeprefix(f"{FOLDER}/").removesuffix(_ENDING)
    service, _, shard = name.partition("-")
    if service not in ("ingest", "broker") or not shard.isdecimal():
        return None
    return f"{service}/{shard}" if path == entry_path(service, int(shard)) else None
