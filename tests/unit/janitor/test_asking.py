"""The owner of a queue is found while others are down, and is not said to be missing then."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from services.broker.core.moves import moving
from services.janitor.asking import asking, find_owner
from slatemq.errors import DeadlineExceeded, NotFound, PermissionDenied, SlateMQError, Unavailable

MISSING = NotFound("queue", "orders")


async def owner(answers: Mapping[int, SlateMQError | None]) -> int | None:
    async def ask(shard: int) -> None:
        error = answers[shard]
        if error is not None:
            raise error

    return await find_owner(answers, ask)


@pytest.mark.parametrize("down", [Unavailable("down"), DeadlineExceeded("no answer")])
async def test_a_queue_of_a_living_broker_is_found_whichever_broker_is_down(
    down: SlateMQError,
) -> None:
    assert await owner({0: down, 1: MISSING, 2: None}) == 2
    assert await owner({0: None, 1: MISSING, 2: down}) == 0


async def test_a_broker_that_never_answers_holds_up_no_queue_of_another() -> None:
    async def ask(shard: int) -> None:
        if shard == 0:
            await asyncio.Event().wait()

    async with asyncio.timeout(60):
        assert await find_owner([0, 1], ask) == 1


@pytest.mark.parametrize("down", [Unavailable("down"), DeadlineExceeded("no answer")])
async def test_a_queue_that_the_broker_that_is_down_may_have_is_not_missing(
    down: SlateMQError,
) -> None:
    with pytest.raises(type(down)):
        await owner({0: MISSING, 1: down, 2: MISSING})


async def test_only_if_all_brokers_answer_that_they_have_no_such_queue_is_it_missing() -> None:
    assert await owner({0: MISSING, 1: MISSING}) is None
    assert await owner({}) is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unavailable("connection refused"), "broker 3 is down: connection refused"),
        (DeadlineExceeded("no answer"), "broker 3 does not answer: no answer"),
        (Unavailable("ingest 1 is down", reason="INGEST_DOWN"), "ingest 1 is down"),
        (
            Unavailable("a redrive holds these rows, retry", reason="ROWS_BUSY"),
            "a redrive holds these rows, retry",
        ),
        (moving("orders"), "queue 'orders' is moving to another shard"),
    ],
)
def test_only_a_shard_that_does_not_answer_is_said_to_be_down(
    error: SlateMQError, text: str
) -> None:
    with pytest.raises(type(error), match=f"^{text}$"), asking("broker", 3):
        raise error


async def test_other_errors_are_raised() -> None:
    with pytest.raises(PermissionDenied):
        await owner({0: PermissionDenied("not yours"), 1: MISSING})
