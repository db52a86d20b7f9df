"""(i), bytes: what is written to the store for each byte of payload, by what it is written for.

On file://, each object is a file. A sampler looks at them all the while, so that what is collected
meanwhile counts too. L0 tables are those that any manifest ever listed as such; the other tables
come from compaction.
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from slatedb.uniffi import AdminBuilder, ObjectStoreBuilder, ObjectStoreType

from benchmarks.suite import servers, workloads
from benchmarks.suite.payloads import EVENTS
from benchmarks.suite.workloads import Measured

EVERY_S = 0.1
DATABASES = ("ingest/0", "broker/0")


@dataclass(slots=True)
class Objects:
    """Sizes of all objects seen below a folder, by path from it; and L0 tables by database."""

    root: Path
    sizes: dict[str, int] = field(default_factory=dict)
    level_0: set[str] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Objects:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()
            asyncio.run(self._read_manifests())

    def _look(self) -> None:
        for folder, _, names in os.walk(self.root):
            for name in names:
                if "#" in name:
                    continue  # not yet an object
                path = Path(folder, name)
                try:
                    size = path.stat().st_size
                except FileNotFoundError:
                    continue  # collected, or renamed, between the two looks
                self.sizes[str(path.relative_to(self.root))] = size

    async def _read_manifests(self) -> None:
        builder = ObjectStoreBuilder(ObjectStoreType.LOCAL)
        builder.with_config("local_path", str(self.root))
        store = builder.build()
        for name in DATABASES:
            manifest = await AdminBuilder(name, store).build().read_manifest(None)
            if manifest is not None:
                self.level_0.update(f"{name}/{view.sst.id.value}" for view in manifest.l0)

    def by_purpose(self) -> dict[str, tuple[int, int]]:
        """Count and bytes of the objects of each purpose."""
        found: dict[str, tuple[int, int]] = {}
        for path, size in self.sizes.items():
            purpose = self._purpose(path)
            count, total = found.get(purpose, (0, 0))
            found[purpose] = (count + 1, total + size)
        return found

    def _purpose(self, path: str) -> str:
        parts = path.split("/")
        if len(parts) < 4 or parts[0] not in ("ingest", "broker"):
            return "other"
        kind = parts[2]
        if kind == "wal":
            return "WAL"
        if kind == "compacted":
            table = "/".join([*parts[:2], parts[3].removesuffix(".sst")])
            return "L0" if table in self.level_0 else "compaction"
        return "manifests"


def written(folder: Path, size: int, count: int, kind: str = EVENTS) -> Measured:
    """Publishes, consumes and acks `count` messages. Returns what that wrote."""
    with servers.slatemq(folder) as server:
        with Objects(folder / "data") as objects:
            workloads.in_turn(server, size, count, 4, 1, kind)
        found = objects.by_purpose()
    payload = size * count
    first = sum(found.get(name, (0, 0))[1] for name in ("WAL", "L0"))
    numbers = {f"WAL and L0 bytes for a payload byte, {size} B": first / payload}
    for name, (number, total) in sorted(found.items()):
        numbers[f"{name} bytes for a payload byte, {size} B"] = total / payload
        numbers[f"{name} objects for 1,000 messages, {size} B"] = 1000 * number / count
    return Measured(numbers, {"messages": count}, count)
