"""What the synchronous client has of the asynchronous one: all that programs use."""

from __future__ import annotations

import pytest

import slatemq.client
import slatemq.sync
from slatemq._admin import watching
from slatemq._consume import batches, consumer

OF_OURS = {"requeue", "list_answering"}
"""What only the client itself calls."""


@pytest.mark.parametrize(
    ("asynchronous", "synchronous", "absent"),
    [
        (slatemq.client.Client, slatemq.sync.SyncClient, {"process"}),
        (consumer.Consumer, slatemq.sync.Consumer, set()),
        (batches.BatchConsumer, slatemq.sync.BatchConsumer, set()),
        (batches.Batch, slatemq.sync.Batch, set()),
        (watching.DelayedWatch, slatemq.sync.DelayedWatch, set()),
    ],
)
def test_the_synchronous_client_has_what_the_asynchronous_one_has(
    asynchronous: type, synchronous: type, absent: set[str]
) -> None:
    def names(of: type) -> set[str]:
        return {name for name in dir(of) if not name.startswith("_")}

    assert names(asynchronous) - names(synchronous) - OF_OURS == absent
