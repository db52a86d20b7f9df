"""An instance of one ingest and one broker that no process serves, its backups, and restores."""

from __future__ import annotations

from typing import Final

from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.ids import SeqBlock, encode_seq_block
from libs.storage.layout.own_keys import CLOCK_KEY, ID_BLOCK_KEY
from services.janitor.backup.catalogue import Backup, Catalogue
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.runs.history import RunStore
from tests.made_instances import make_instance

NOW_MS: Final = 1_795_269_141_374
ROW: Final = b"\x01\x7f"
KINDS: Final = {"ingest/0": Kind.INGEST, "broker/0": Kind.BROKER}


async def write(root: Root, value: bytes, block: SeqBlock | None = None) -> None:
    """Put a row into each of the instance's databases, and make it first where it is none."""
    await make_instance(root)
    for name, kind in KINDS.items():
        database = await root.database(name, kind)
        batch = Batch()
        batch.put(ROW, value)
        batch.put(CLOCK_KEY, value[:1] * 8)
        if block is not None and kind is Kind.INGEST:
            batch.put(ID_BLOCK_KEY, encode_seq_block(block))
        await database.commit(batch)
        await database.close()


async def read(root: Root, name: str, key: bytes = ROW) -> bytes | None:
    database = await root.database(name, KINDS[name])
    try:
        return await database.get(key)
    finally:
        await database.close()


def taking(root: Root, backups: Root, kept: int = 5) -> Taking:
    return Taking(
        BackupSource(root, lambda: snapshots_of_stopped(root, NOW_MS), RunStore(root.objects)),
        backups,
        kept,
    )


async def restored(backups: Root, fresh: Root, backup: Backup | None = None) -> Restoring:
    catalogue = Catalogue(backups.objects)
    restoring = Restoring(catalogue, backup or await catalogue.get(), fresh)
    await restoring.restore()
    return restoring
