"""What a copy must not continue as it was: the numbers of pushes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.own_keys import outbox_progress_key
from libs.storage.records.states import decode_outbox_progress, encode_outbox_progress
from services.janitor.backup.renumbering import renumber_ingest


@pytest.mark.parametrize(
    ("pushes", "last_number"),
    [({(3, 0): 9}, 5), ({(3, 0): 4}, 4), ({}, 0)],
)
async def test_an_ingest_has_no_push_stored_that_the_copy_of_its_broker_has_not_made(
    pushes: Mapping[tuple[int, int], int], last_number: int
) -> None:
    # Given an ingest that has stored five pushes of broker 3
    database = await open_root("memory:///").database("ingest/0", Kind.INGEST)
    batch = Batch()
    batch.put(outbox_progress_key(3), encode_outbox_progress(5))
    await database.commit(batch)

    await renumber_ingest(database, 0, pushes, 1.0)

    # Else it would pass over the next ones that the broker makes.
    value = await database.get(outbox_progress_key(3))
    assert value is not None
    assert decode_outbox_progress(value) == last_number
    await database.close()
