"""Acks that name tokens in a row, over the wire."""

from __future__ import annotations

import grpc
import pytest

from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import consumer_pb2
from tests.integration.broker.rig import Rig, running

OK, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION = 0, 3, 5, 9


async def ack(rig: Rig, *runs: tuple[str, int], tokens: tuple[str, ...] = ()) -> list[int]:
    request = consumer_pb2.AckRequest(
        lease_tokens=tokens,
        runs=[consumer_pb2.LeaseRun(lease_token=token, count=count) for token, count in runs],
    )
    return [one.code for one in (await rig.consumers.Ack(request)).results]


async def claimed_tokens(rig: Rig, count: int) -> list[str]:
    await rig.create()
    await rig.assign(list(range(1, count + 1)))
    return [one.lease_token for one in await rig.claim(max_messages=count)]


async def test_a_row_of_tokens_is_acked_as_each_of_them_would_be() -> None:
    async with running() as rig:
        tokens = await claimed_tokens(rig, 550)
        assert len({token[:-2] for token in tokens}) == 3, "two buckets of 250, and one of 50"

        assert await ack(rig, (tokens[0], 250)) == [OK] * 250
        assert await ack(rig, (tokens[260], 5)) == [OK] * 5
        assert await rig.nack(tokens[266], reason="no") == [OK]
        assert await rig.counts() == {"available": 1, "in_flight": 294, "done": 255}
        # Repeated, in part of a lease that ended otherwise; what stands alone comes first.
        assert await ack(rig, (tokens[262], 5), (tokens[0], 3), tokens=(tokens[549],)) == [
            OK, *[OK] * 4, FAILED_PRECONDITION, *[OK] * 3
        ]  # fmt: skip
        assert await ack(rig, (tokens[250], 250), (tokens[500], 50)) == [
            *[OK] * 16, FAILED_PRECONDITION, *[OK] * 283
        ]  # fmt: skip
        assert await rig.counts() == {"available": 1, "done": 549}


async def test_tokens_that_no_claim_returned_are_refused_each() -> None:
    async with running() as rig:
        tokens = await claimed_tokens(rig, 60)
        prefix = tokens[0][:-2]

        assert await ack(rig, (prefix + "3a", 4)) == [OK, OK, NOT_FOUND, NOT_FOUND]
        assert await ack(rig, ("no token", 3)) == [INVALID_ARGUMENT] * 3
        assert await ack(rig, ("1-" + prefix[2:] + "00", 2)) == [NOT_FOUND] * 2
        assert await rig.counts() == {"in_flight": 58, "done": 2}


@pytest.mark.parametrize(
    ("runs", "field"),
    [
        ([("00", 0)], "runs[0].count"),
        ([("00", 1), ("00", 257)], "runs[1].count"),
        ([("00", 1), ("01", 256)], "runs[1].count"),
        ([("00", 256)] * 40, "lease_tokens"),
        ([], "lease_tokens"),
    ],
)
async def test_bad_runs_are_refused_as_a_whole(runs: list[tuple[str, int]], field: str) -> None:
    async with running() as rig:
        tokens = await claimed_tokens(rig, 60)

        with pytest.raises(grpc.RpcError) as caught:
            await ack(rig, *[(tokens[0][:-2] + digits, count) for digits, count in runs])

        error = from_rpc_error(caught.value)
        assert (caught.value.code(), getattr(error, "field", "")) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            field,
        )
        assert await rig.counts() == {"in_flight": 60}
