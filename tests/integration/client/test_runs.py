"""Claims in runs, and acks of tokens in a row."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

import slatemq
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.integration.client.peers import Instance, tokens_of

PAYLOADS = [b"%d" % number for number in range(512)]


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    async with Instance() as running:
        running.broker.available.extend((payload, 0) for payload in PAYLOADS)
        yield running


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(instance.endpoint) as connected:
        yield connected


def asked(instance: Instance) -> list[tuple[int, int]]:
    """Of each request to ack: tokens that stand for themselves, and those in rows."""
    acks = instance.broker.acks
    return [(len(one.lease_tokens), sum(run.count for run in one.runs)) for one in acks]


async def test_a_claim_in_runs_is_acked_in_rows(instance: Instance, client: slatemq.Client) -> None:
    claimed = await client.claim("q", 512)
    assert [message.payload for message in claimed] == PAYLOADS
    assert len({message.message_id for message in claimed}) == 512

    assert await client.ack([message.lease_token for message in claimed]) == [None] * 512

    assert asked(instance) == [(0, 512)]
    assert instance.broker.acked == PAYLOADS


@pytest.mark.parametrize("by", ["messages", "batches"])
async def test_what_consumers_finish_together_is_acked_in_rows(
    instance: Instance, client: slatemq.Client, by: str
) -> None:
    came: list[bytes] = []
    if by == "messages":
        # Given a first ack that is answered last: the others gather behind it, and go together
        instance.broker.answers_acks.clear()
        async with client.consume("q") as messages:
            async for message in messages:
                async with message:
                    came.append(message.payload)
                if len(came) == 300:
                    break
            instance.broker.answers_acks.set()
    else:
        async with client.consume_batches("q", 100) as batches:
            async for batch in batches:
                async with batch:
                    came += [message.payload for message in batch]
                if len(came) == 300:
                    break
    assert came == PAYLOADS[:300]
    assert sorted(instance.broker.acked) == sorted(PAYLOADS[:300])
    assert any(in_rows for _, in_rows in asked(instance))


async def test_each_token_of_a_row_is_answered_for_itself(
    instance: Instance, client: slatemq.Client
) -> None:
    claimed = await client.claim("q", 512)
    tokens = [message.lease_token for message in claimed]
    ended = {tokens[at] for at in (0, 17, 299, 402)}
    instance.broker.ended |= ended
    at_random = random.Random(7)
    # Some in rows, some in no order, some that are none or of no broker.
    wanted: list[str] = tokens[:200]
    shuffled = tokens[200:300]
    at_random.shuffle(shuffled)
    wanted += [*shuffled, "no token", *tokens[300:512], "7-0000000000000000"]

    results = await client.ack(wanted)

    assert len(results) == len(wanted)
    for token, result in zip(wanted, results, strict=True):
        if token in ended:
            assert isinstance(result, FailedPrecondition)
        elif token == "no token":
            assert isinstance(result, InvalidArgument)
        elif token.startswith("7"):
            assert isinstance(result, NotFound)
        else:
            assert result is None
    ((lone, in_rows),) = asked(instance)
    assert lone + in_rows == 512
    assert in_rows > 200
    sent = instance.broker.acks[0]
    items = [*sent.lease_tokens, *(token for run in sent.runs for token in tokens_of(run))]
    assert sorted(items) == sorted(tokens)


async def test_an_ack_in_rows_whose_answer_got_lost_is_repeated(
    instance: Instance, client: slatemq.Client
) -> None:
    claimed = await client.claim("q", 256)
    instance.broker.lose = 2
    tokens = [message.lease_token for message in claimed]
    assert await client.ack(tokens) == [None] * 256
    assert asked(instance) == [(0, 256)] * 3
    assert instance.broker.acked == PAYLOADS[:256]
