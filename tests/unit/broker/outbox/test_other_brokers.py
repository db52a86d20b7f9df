"""Whether a queue exists elsewhere: partition 0 decides, or another one while it is not heard."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.broker.outbox import targets
from services.broker.outbox.targets import OtherBrokers
from slatemq.errors import Unavailable
from tests.integration.waiting import eventually

PARTITIONS = (10, 11, 12)


class Known:
    async def of(self, queue_id: str, *, fresh: bool = False) -> tuple[int, ...]:
        return PARTITIONS


class Doubted:
    def __init__(self) -> None:
        self.shards: list[int] = []

    def doubt(self, service: str, shard: int) -> None:
        self.shards.append(shard)


class Others(OtherBrokers):
    """Brokers that answer when a test says what: whether they have the queue, or None, if down."""

    def __init__(self) -> None:
        self.doubted = Doubted()
        channels: Any = self.doubted
        known: Any = Known()
        super().__init__(channels, known, 0)
        self.asked: list[int] = []
        self.answers: dict[int, asyncio.Future[bool | None]] = {
            one: asyncio.get_running_loop().create_future() for one in PARTITIONS
        }

    @property
    def late_count(self) -> int:
        return len(self._late)

    async def _is_on(self, queue_id: str, shard: int) -> bool:
        self.asked.append(shard)
        answer = await asyncio.shield(self.answers[shard])
        if answer is None:
            self._channels.doubt("broker", shard)
            raise Unavailable(f"broker {shard} is down")
        return answer


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "ASK_NEXT_S", 0.001)


@pytest.mark.usefixtures("soon")
async def test_another_partition_will_do_while_partition_0_does_not_answer() -> None:
    others = Others()
    having = asyncio.create_task(others.having(["q"]))
    await eventually(lambda: others.asked == [*PARTITIONS])
    others.answers[11].set_result(None)
    others.answers[12].set_result(True)
    assert await having == {"q"}
    assert others.doubted.shards == [11]

    # And it is doubted once it is known not to answer
    others.answers[10].set_result(None)
    await eventually(lambda: others.doubted.shards == [11, 10])


@pytest.mark.usefixtures("soon")
async def test_a_broker_that_only_answers_late_is_not_doubted() -> None:
    others = Others()
    others.answers[11].set_result(True)
    assert await others.having(["q"]) == {"q"}
    assert await others.having(["q"]) == {"q"}
    caller = asyncio.create_task(others.having(["q"]))
    await eventually(lambda: others.asked.count(10) == 3)
    caller.cancel()
    await asyncio.wait([caller])

    # One of the calls to it goes on
    assert others.late_count == 1
    others.answers[10].set_result(True)
    await eventually(lambda: others.late_count == 0)
    assert others.doubted.shards == []


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("has", [True, False])
async def test_partition_0_decides_as_soon_as_it_answers(has: bool) -> None:
    others = Others()
    having = asyncio.create_task(others.having(["q"]))
    await eventually(lambda: others.asked == [*PARTITIONS])
    others.answers[11].set_result(False)
    others.answers[10].set_result(has)
    assert await having == ({"q"} if has else set())


@pytest.mark.usefixtures("soon")
async def test_it_is_waited_for_where_no_other_has_the_queue() -> None:
    others = Others()
    having = asyncio.create_task(others.having(["q"]))
    for one, answer in zip(PARTITIONS[1:], (False, None), strict=True):
        others.answers[one].set_result(answer)
    await eventually(lambda: others.asked == [*PARTITIONS])
    assert not having.done()
    others.answers[10].set_result(None)
    with pytest.raises(Unavailable, match="broker 10 is down"):
        await having


async def test_no_other_is_asked_while_partition_0_answers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "ASK_NEXT_S", 600.0)
    others = Others()
    others.answers[10].set_result(True)
    assert await others.having(["q"]) == {"q"}
    assert others.asked == [10]
