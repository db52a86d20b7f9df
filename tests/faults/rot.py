"""Bit rot: bits flipped, files cut, emptied, deleted or exchanged, in the store of an instance.

In a stopped store one file is damaged, or a whole folder of a database is gone, and then three
things are asked. Does verification name it? Does a reader, or an owner that opens the database,
ever return a row or a payload that is not what was stored? Is what the damage did not touch still
there?

Some kinds of damage leave nothing by which an owner could notice: see `silence_of`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import slatemq
from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind as DatabaseKind
from libs.storage.errors import StorageError
from libs.storage.layout.own_keys import CLOCK_KEY
from services.janitor.verify.command import verify_stopped
from services.janitor.verify.findings import Findings
from tests.integration.janitor.instances import LONG_S, Instance, instance

DATABASES: Final = ("ingest/0", "broker/0")
FOLDERS: Final = ("wal", "compacted", "manifest", "compactions", "blobs")
"""Kinds of files that are damaged, by the folders that they are in."""

OBJECT_BYTES: Final = 70_000

TURNS: Final = 2
"""Times that the instance is started and killed: each leaves tables and a WAL."""

Rows = Mapping[bytes, bytes]


LOST_FOLDERS: Final = tuple(
    f"{database}{folder}" for database in DATABASES for folder in ("", "/manifest", "/wal")
)
"""What is deleted as a whole."""


@dataclass(frozen=True)
class Damage:
    """One file, damaged, or a folder that is deleted. `other` is exchanged with it."""

    path: str
    what: str
    place: int = 0
    other: str = ""

    @property
    def folder(self) -> str:
        parts = Path(self.path).parts
        if self.path in DATABASES:
            return "database"
        return parts[2] if parts[0] in ("ingest", "broker") else parts[0]

    def do(self, data: Path) -> None:
        file = data / self.path
        if self.what == "lose":
            shutil.rmtree(file)
            return
        stored = file.read_bytes()
        if self.what == "flip":
            at = self.place // 8 % len(stored)
            flipped = bytes((stored[at] ^ 1 << self.place % 8,))
            file.write_bytes(stored[:at] + flipped + stored[at + 1 :])
        elif self.what == "cut":
            file.write_bytes(stored[: 1 + self.place % (len(stored) - 1)])
        elif self.what == "empty":
            file.write_bytes(b"")
        elif self.what == "delete":
            file.unlink()
        else:
            other = data / self.other
            file.write_bytes(other.read_bytes())
            other.write_bytes(stored)


@dataclass
class Stored:
    """What a store holds: the rows of its databases, the payloads that are objects."""

    rows: dict[str, Rows] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of one damage.

    Attributes:
        findings: Of the verification.
        refused: The databases that an owner could not open or read, with the reasons.
        wrong: What an owner read without an error, and is not what was stored.
        differs: What only a reader of the files read so: verification, which must name it.
        lost: What can no longer be read, although the damage is elsewhere.
    """

    damage: Damage
    findings: Findings
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_harmless: bool = False
    silent: str = ""

    @property
    def faults(self) -> list[str]:
        """What must not be."""
        named = self.findings.faults_count > 0
        found = [*self.lost]
        if self.wrong and not self.silent:
            found += self.wrong
        if not self.is_harmless and not named and self.silent != "last":
            found.append(
                f"verification found nothing: {self.wrong or self.differs or self.refused}"
            )
        return [f"{self.damage}: {one}" for one in found]

    @property
    def word(self) -> str:
        if self.wrong:
            return "served, named" if self.findings.faults_count else "served, not named"
        if self.refused:
            return "refused, named"
        return "named" if self.findings.faults_count else "harmless"


def silence_of(damage: Damage, data: Path) -> str:
    """Why an owner cannot notice damage by itself; "" where it must.

    - "last": nothing says that there was a last file of the WAL;
    - "empty": an empty file of the WAL is what an opening leaves behind;
    - "shape": two whole files of one shape are each valid in the place of the other;
    - "sum": a manifest has no checksum.
    """
    if damage.what == "lose":
        return ""
    if damage.folder == "manifest":
        return "sum"
    if damage.what == "exchange" and damage.folder in ("wal", "compacted"):
        return "shape"
    if damage.folder != "wal" or damage.what not in ("delete", "empty"):
        return ""
    path = data / damage.path
    if path == max(one for one in path.parent.iterdir() if one.stat().st_size):
        return "last"
    return "empty" if damage.what == "empty" else ""


async def fill(folder: Path) -> Stored:
    """Make a store in `folder`/data with records of most kinds, and leave it as a crash does."""
    for turn in range(TURNS):
        async with instance(folder) as made:
            await _work(made, turn)
    root = open_root((folder / "data").as_uri(), sync=False)
    stored = Stored({name: await _read_latest(root, name) for name in DATABASES})
    for path in await root.objects.list("blobs"):
        stored.payloads[path] = await root.objects.get(path)
    return stored


async def _work(made: Instance, turn: int) -> None:
    client = made.client
    names = [f"orders-{turn}", f"slow-{turn}"]
    for name in names:
        await client.create_queue(name, filter=f'headers.queue == "{name}"', max_attempts=1)
    ids = await made.publish(names[0], 60, payload=b"small" * 20)
    await made.publish(names[1], 40, payload=bytes(5000))
    await made.publish(names[1], 3, payload=random.Random(turn).randbytes(OBJECT_BYTES))
    late = slatemq.OutgoingMessage(
        b"late", {"queue": names[1]}, delay_ms=800_000, retention_s=LONG_S
    )
    await client.publish_many([late] * 5)
    await made.routed()
    for place, message in enumerate(await made.claim(names[0], set(sorted(ids)[:30]))):
        if place % 3 == 0:
            await message.ack()
        elif place % 3 == 1:
            await message.nack(reason="broken")


async def _read_latest(root: Root, name: str) -> Rows:
    reader = await root.open_latest(name)
    try:
        rows: dict[bytes, bytes] = {}
        async for some in reader.scan(b"\x00", b"\xff"):
            rows.update(some)
        return rows
    finally:
        await reader.close()


async def _read_as_owner(root: Root, name: str) -> Rows:
    database = await root.database(name, DatabaseKind(name.partition("/")[0]))
    try:
        rows: dict[bytes, bytes] = {}
        async for some in database.scan(b"\x00", b"\xff"):
            rows.update(some)
        for key in list(rows)[:: max(len(rows) // 20, 1)]:
            if await database.get(key) != rows[key]:
                raise AssertionError(f"{name}: a get of {key.hex()} differs from a scan")
        return rows
    finally:
        await database.close()


def damages(data: Path, seed: int) -> Iterator[Damage]:
    """Damage without end: any file of the store, in any way."""
    chance = random.Random(seed)
    files = files_of(data)
    while True:
        if chance.randrange(LOSSES_ONE_IN) == 0:
            yield Damage(chance.choice(LOST_FOLDERS), "lose")
            continue
        folder = chance.choice([one for one in FOLDERS if files[one]])
        path = chance.choice(files[folder])
        yield damage_of(data, path, chance.choice(WAYS), chance)


WAYS: Final = ("flip", "flip", "cut", "empty", "delete", "exchange")

LOSSES_ONE_IN: Final = 20
"""The share of damages that delete a whole folder: one in this many."""


def files_of(data: Path) -> dict[str, list[str]]:
    """The files of a store, by their kinds; of manifests and compactions the newest."""
    found: dict[str, list[str]] = {folder: [] for folder in FOLDERS}
    for path in sorted(data.rglob("*")):
        name = str(path.relative_to(data))
        if path.is_file() and (folder := Damage(name, "").folder) in found:
            found[folder].append(name)
    for folder in ("manifest", "compactions"):
        newest = {str(Path(name).parent): name for name in found[folder]}
        found[folder] = list(newest.values())
    return found


def damage_of(data: Path, path: str, what: str, chance: random.Random) -> Damage:
    """This damage of this file, as far as it can be done."""
    size = (data / path).stat().st_size
    if size < 2 and what in ("flip", "cut", "empty"):
        what = "delete"
    if what == "exchange":
        folder = Damage(path, "").folder
        others = [one for one in files_of(data)[folder] if one != path]
        alike = [one for one in others if Path(one).parts[:1] == Path(path).parts[:1]]
        if not alike:
            what = "delete"
        else:
            return Damage(path, what, other=chance.choice(alike))
    return Damage(path, what, chance.randrange(1 << 40))


def copy_of(store: Path) -> Path:
    """The data of a store, copied into a folder of their own.

    A new one each time: what an owner that could not open has begun may still write to its own.
    """
    data = Path(tempfile.mkdtemp(prefix="copy-", dir=store)) / "data"
    shutil.copytree(store / "data", data)
    return data


async def suffer(store: Path, stored: Stored, damage: Damage) -> Outcome:
    """Damage a copy of a store, and read it in all ways. Raises what nothing should."""
    data = copy_of(store)
    try:
        return await _suffer(data, stored, damage)
    finally:
        shutil.rmtree(data.parent, ignore_errors=True)


async def _suffer(data: Path, stored: Stored, damage: Damage) -> Outcome:
    silent = silence_of(damage, data)
    damage.do(data)
    root = open_root(data.as_uri(), sync=False)
    outcome = Outcome(damage, await verify_stopped(root), silent=silent)
    touched = "/".join(Path(damage.path).parts[:2])
    same, whole = 0, len(stored.payloads)
    for name in DATABASES:
        good = stored.rows[name]
        reads = (_read_latest, _read_as_owner) if name == touched else (_read_latest,)
        whole += len(reads)
        for read in reads:
            try:
                rows = await read(root, name)
            except StorageError as error:
                outcome.refused[name] = str(error)
                if name != touched:
                    outcome.lost.append(f"{name} cannot be read: {error}")
                continue
            changed = {key for key in good.keys() | rows.keys() if good.get(key) != rows.get(key)}
            changed.discard(CLOCK_KEY)
            if changed:
                served = outcome.wrong if read is _read_as_owner else outcome.differs
                served.append(f"{len(changed)} rows of {name} differ")
            else:
                same += 1
    same += await _read_payloads(root, stored, outcome)
    outcome.is_harmless = same == whole
    return outcome


async def _read_payloads(root: Root, stored: Stored, outcome: Outcome) -> int:
    blobs, same = Blobs(root), 0
    for path, payload in stored.payloads.items():
        try:
            found = await blobs.get(path)
        except StorageError as error:
            outcome.refused[path] = str(error)
            if path not in (outcome.damage.path, outcome.damage.other):
                outcome.lost.append(f"{path} cannot be read: {error}")
            continue
        same += found == payload
        if found != payload:
            outcome.wrong.append(f"{path} is served with other bytes")
    return same


def run_rot(
    folder: Path, rounds: int, seed: int, report: Callable[[str], Any] = print
) -> list[str]:
    """Damage a store `rounds` times; returns what must not be."""
    store = folder / "store"
    stored = asyncio.run(fill(store))
    rows = sum(map(len, stored.rows.values()))
    report(f"a store of {rows} rows and {len(stored.payloads)} payload objects")
    healthy = asyncio.run(verify_stopped(open_root((store / "data").as_uri(), sync=False)))
    faults = [f"without damage: {one}" for one in healthy.all() if one.is_fault]
    words: Counter[tuple[str, str, str]] = Counter()
    chosen = damages(store / "data", seed)
    for number in range(rounds):
        damage = next(chosen)
        outcome = asyncio.run(suffer(store, stored, damage))
        words[damage.folder, damage.what, outcome.word] += 1
        faults += outcome.faults
        if (number + 1) % 50 == 0:
            report(f"{number + 1} of {rounds} damages, {len(faults)} faults")
    for (kind, what, word), count in sorted(words.items()):
        report(f"  {kind:12} {what:9} {word:18} {count}")
    return faults
