"""A queue that has lost its config is not taken for one that was deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.datasource import EqualTo, Filter

from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import DamagedStore
from libs.storage.layout.keys import config_key, queue_state_key
from libs.storage.records.configs import QueueConfigRecord, encode_config
from libs.storage.records.states import QueueStateRecord, encode_queue_state
from tests.integration.janitor.spark.tables_read import read, snapshot_of

CONFIG = encode_config(QueueConfigRecord("true", 5, 0))


def state(*, deleted: bool = False) -> bytes:
    return encode_queue_state(QueueStateRecord(1, deleted, 0, (), 1, 0, 0, 0, 0, 0, 0, ()))


@pytest.mark.parametrize("table", ["queues", "active"])
@pytest.mark.parametrize("filters", [(), (EqualTo(("queue",), "lost"),)], ids=["all", "named"])
async def test_no_table_is_read_without_a_queue_whose_config_is_lost(
    tmp_path: Path, table: str, filters: tuple[Filter, ...]
) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    database = await root.database("broker/0", Kind.BROKER)
    batch = Batch()
    batch.put(config_key("there"), CONFIG)
    for queue_id in ("there", "lost"):
        batch.put(queue_state_key(queue_id), state())
    batch.put(queue_state_key("deleted"), state(deleted=True))
    await database.commit(batch)

    with pytest.raises(DamagedStore, match="queue lost has a state and no config"):
        await read(await snapshot_of(root, database), table, *filters)

    batch = Batch()
    batch.put(config_key("lost"), CONFIG)
    await database.commit(batch)
    await read(await snapshot_of(root, database), table, *filters)
    await database.close()
