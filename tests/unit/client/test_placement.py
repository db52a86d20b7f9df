"""On which broker shards the partitions of a new queue go, and when there are too few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slatemq._admin import placement
from slatemq._admin.placement import least_loaded, least_loaded_of_all
from slatemq.errors import DeadlineExceeded, FailedPrecondition, SlateMQError, Unavailable
from slatemq.v1.queue_pb2 import GetShardLoadResponse

SILENT = DeadlineExceeded("late")
DRAINED = GetShardLoadResponse(draining=True)


def load(value: float) -> GetShardLoadResponse:
    return GetShardLoadResponse(load=value)


def peers_of(monkeypatch: pytest.MonkeyPatch, *answers: GetShardLoadResponse | SlateMQError) -> Any:
    """Peers of which the broker shards answer like this."""

    async def shards() -> list[int]:
        return [*range(len(answers))]

    async def answer(_: Any, shard: int) -> GetShardLoadResponse | SlateMQError:
        return answers[shard]

    monkeypatch.setattr(placement, "_load", answer)
    return SimpleNamespace(broker_shards=shards)


async def chosen(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    *answers: GetShardLoadResponse | SlateMQError,
) -> tuple[int, ...]:
    """The shards for the partitions of a queue, where those of the instance answer like this."""
    return await least_loaded_of_all(peers_of(monkeypatch, *answers), count)


async def test_partitions_go_where_there_is_least_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await chosen(monkeypatch, 2, load(3), load(1), DRAINED, SILENT, load(2)) == (1, 4)


async def test_a_broker_that_is_silent_may_answer_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Unavailable) as refused:
        await chosen(monkeypatch, 3, load(1), SILENT, load(2), DRAINED)
    assert refused.value.reason == "TOO_FEW_SHARDS"


async def test_where_too_many_shards_are_drained_no_repeat_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(FailedPrecondition, match="of 3 all but 2 are being drained") as refused:
        await chosen(monkeypatch, 3, load(1), SILENT, DRAINED)
    assert refused.value.reason == "SHARD_DRAINING"


async def test_shards_that_have_the_queue_do_not_count_as_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = peers_of(monkeypatch, load(0), DRAINED, SILENT, DRAINED)
    with pytest.raises(FailedPrecondition) as refused:
        await least_loaded(peers, beside=[0])
    said = "no broker shard without the queue takes it (being drained: 1, 3; down: 2): "
    assert refused.value.message.startswith(said)
    assert await least_loaded(peers) == 0


async def test_the_silent_brokers_are_named_where_none_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = peers_of(monkeypatch, load(0), SILENT)
    with pytest.raises(Unavailable) as refused:
        await least_loaded(peers, beside=[0])
    assert "broker shard 1 does not answer (late)" in refused.value.message
    with pytest.raises(Unavailable) as refused:
        await least_loaded(peers_of(monkeypatch, SILENT, SILENT))
    assert "broker shards 0, 1 do not answer (late)" in refused.value.message
