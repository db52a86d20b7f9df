"""What a run has left in its store: verified once its processes have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from libs.storage.database.roots import open_root
from libs.storage.objects.shard_owners import FOLDER as OWNERS
from services.janitor.verify.command import verify_stopped
from services.janitor.verify.findings import Kind

OF_ONE_SHARD = frozenset({Kind.FILE, Kind.ROW, Kind.COUNT, Kind.ORDER})
"""What can be wrong with a shard alone, where the others were not real."""


def faults_of(root: str, kinds: Collection[Kind] = frozenset(Kind)) -> list[str]:
    """The faults of the instance at this URL."""
    findings = asyncio.run(verify_stopped(open_root(root, sync=False)))
    print(f"verified: {findings.faults_count} faults, {findings.leftovers_count} leftovers")
    return [f"verification: {one}" for one in findings.all() if one.is_fault and one.kind in kinds]


def faults_below(folder: Path) -> list[str]:
    """The faults of the instances whose data are in this folder; raises where there is none."""
    services = ("ingest", "broker")
    found = {path.parent for one in services for path in folder.rglob(one) if (path / "0").is_dir()}
    roots = sorted(path for path in found if path.name != OWNERS)
    if not roots:
        raise FileNotFoundError(f"no instance to verify below {folder}")
    return [fault for root in roots for fault in faults_of(root.as_uri())]
