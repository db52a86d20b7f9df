"""A queue whose config is lost is not passed over as if it had been deleted."""

from __future__ import annotations

import pytest

from libs.storage.errors import DamagedStore
from libs.storage.layout.keys import config_key, queue_state_key
from tests.unit.broker.core.shards import Rig


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (config_key("orders"), "queue orders has a state and no config"),
        (queue_state_key("orders"), "queue orders has a config and no state"),
    ],
)
async def test_a_shard_of_which_a_queue_has_half_of_its_records_does_not_start(
    key: bytes, said: str
) -> None:
    rig = Rig()
    rig.create()
    rig.create("other")
    rig.commit()
    rig.store.durable_rows.pop(key)

    with pytest.raises(DamagedStore, match=f"{said}.*[Rr]estore"):
        await rig.restart()


async def test_a_queue_that_was_deleted_has_no_config() -> None:
    rig = Rig()
    rig.shard.delete_queue(rig.create())
    rig.commit()

    await rig.restart()

    assert rig.shard.deleted.keys() == {"orders"}
