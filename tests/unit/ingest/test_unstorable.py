"""What ingest cannot encode: its commit fails, names the record, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from libs.storage.database.roots import Root
from libs.storage.errors import Unstorable
from services.ingest.shard import Shard
from services.ingest.write import publishing
from services.ingest.write.pushing import Push
from slatemq.v1.ingest_pb2 import PublishRun
from tests.unit.ingest.shards import accepted, batch, opened, sequences

TOO_LONG = "x" * 65_536
"""One byte more than a text in a record may have."""

Poison = Callable[[Shard], Coroutine[Any, Any, object]]


def poison_entry(shard: Shard) -> Coroutine[Any, Any, object]:
    poisoned = batch(b"x")
    poisoned.columns.retention_s = [1 << 32]
    return shard.publisher.publish(poisoned)


def poison_late_entry(shard: Shard) -> Coroutine[Any, Any, object]:
    """One that is encoded while its commit is written."""
    poisoned = batch(b"x")
    poisoned.columns.created_at_ms = [1 << 63]
    poisoned.size_bytes = publishing.STEP_BYTES + 1
    return shard.publisher.publish(poisoned)


def poison_request_id(shard: Shard) -> Coroutine[Any, Any, object]:
    poisoned = batch(b"x")
    poisoned.request_id = TOO_LONG
    return shard.publisher.publish(poisoned)


def poison_dedupe_key(shard: Shard) -> Coroutine[Any, Any, object]:
    poisoned = accepted(PublishRun(payloads=[b"x"]))
    poisoned.dedupe_keys = {0: TOO_LONG}
    return shard.publisher.publish(poisoned)


def poison_outbox(shard: Shard) -> Coroutine[Any, Any, object]:
    push = Push(7, 1 << 64, (1 << 64) - 1)
    return shard.publisher.push(push, batch(b"x"), {})


POISONS: dict[Poison, str] = {
    poison_entry: "log entry 1",
    poison_late_entry: "log entry 1",
    poison_request_id: "request IDs",
    poison_dedupe_key: "dedupe keys",
    poison_outbox: "progress of the outbox of broker 7",
}


@pytest.mark.parametrize("poison", POISONS)
async def test_a_commit_that_cannot_be_encoded_names_the_record_and_leaves_nothing(
    poison: Poison, root: Root
) -> None:
    async with opened(root) as shard:
        with pytest.raises(Unstorable, match=POISONS[poison]):
            await poison(shard)
        assert isinstance(shard.publisher.commits.failed, Unstorable)

    async with opened(root) as shard:
        assert shard.log.end.last_message_id == 0
        stored = await shard.publisher.publish(batch(b"later"))
        assert await sequences(shard) == [stored.first_message_id]
