"""The memory of a real ingest whose callers do not read what they asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from libs.serving.peers.channels import open_channel
from libs.serving.requests import budget as budgets
from services.ingest.config import IngestConfig
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq._rpc.stored_runs import messages_of
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc
from tests.integration.ingest.test_publish_limits import limited
from tests.integration.serving.test_large_requests import ingest
from tests.integration.waiting import eventually

pytestmark = pytest.mark.usefixtures("cheap_hashes")

MEBIBYTE = 1 << 20

MESSAGES = 40
"""Of a mebibyte each: what one read may give."""

READS = 32
SHARES = 3
"""Reads at once that half of the memory is enough for: a quarter of it, 3/16 and 1/16."""

TAILS = 64

UNREAD = (
    # A connection of its own, since what is not read fills the window of its connection; and a
    # small window, as gRPC would take megabytes that no one reads.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
)

DEFAULTS = IngestConfig(root="memory:///")

BOUND_BYTES = 2 * DEFAULTS.answers_bytes_max + 192 * MEBIBYTE
"""As README.md states it, with what four answers take while they are made and encoded."""


async def test_answers_that_are_not_read_take_bounded_memory_and_hold_up_no_small_ones(
    tmp_path: Path,
) -> None:
    async with (
        ingest(tmp_path) as there,
        open_channel(there.address) as opened,
        grpc.aio.insecure_channel(there.address, options=UNREAD) as unread,
    ):
        stub = ingest_pb2_grpc.IngestServiceStub(opened)
        large = await publish(stub, [bytes(MEBIBYTE)] * MESSAGES)
        small = await publish(stub, [b"x"] * 10)
        at_rest = there.resident

        # When reads of all come without end, and tails from the beginning, and none is read
        read: Any = unread.unary_stream("/slatemq.v1.IngestService/BatchGetMessages")
        request = ingest_pb2.BatchGetMessagesRequest(message_ids=large)
        calls = [read(request.SerializeToString()) for _ in range(READS)]
        tail = ingest_pb2_grpc.IngestServiceStub(unread).TailLog
        calls += [tail(ingest_pb2.TailLogRequest()) for _ in range(TAILS)]
        async with asyncio.timeout(120):
            while await refusal(stub, request) != "UNREAD_ANSWERS":
                calls.append(read(request.SerializeToString()))

        # Then memory is bounded, and small reads are answered
        assert there.peak - at_rest < BOUND_BYTES
        answer = await stub.BatchGetMessages(ingest_pb2.BatchGetMessagesRequest(message_ids=small))
        assert [one.payload for one in messages_of(answer.runs)] == [b"x"] * 10

        # And large ones are, too, once the others have gone
        for call in calls:
            call.cancel()
        async with asyncio.timeout(120):
            while await refusal(stub, request):
                await asyncio.sleep(0.05)


async def publish(stub: ingest_pb2_grpc.IngestServiceAsyncStub, payloads: list[bytes]) -> list[int]:
    messages = [ingest_pb2.PublishRun(payloads=[payload]) for payload in payloads]
    answer = await stub.Publish(ingest_pb2.PublishRequest(runs=messages))
    return list(answer.message_ids)


async def refusal(
    stub: ingest_pb2_grpc.IngestServiceAsyncStub, request: ingest_pb2.BatchGetMessagesRequest
) -> str:
    """Why a read is refused; empty where it is not."""
    try:
        await stub.BatchGetMessages(request)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return ""


async def test_reads_by_id_at_once_of_one_principal_leave_half_of_the_memory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "WAIT_S", 0)  # Those beyond the half are refused at once.
    budget_bytes, settings = 16 * MEBIBYTE, {"answers_bytes_max": 16 * MEBIBYTE}
    async with (
        limited(tmp_path, settings) as made,
        grpc.aio.insecure_channel(made.address, options=UNREAD) as unread,
    ):
        run = ingest_pb2.PublishRun(payloads=[bytes(MEBIBYTE)] * 8, headers={"queue": "q"})
        published = await made.stub.Publish(
            ingest_pb2.PublishRequest(runs=[run]), metadata=made.proofs["shop"]
        )
        request = ingest_pb2.BatchGetMessagesRequest(message_ids=published.message_ids)
        servicer: Any = made.process._servicer
        budget, reader = servicer._answers, servicer._shard.reader
        gate, begun_count, held = asyncio.Event(), 0, list[int]()
        read_now, take_for = reader.read, budget.take_for

        async def read_behind_gate(*args: Any, **options: Any) -> Any:
            nonlocal begun_count
            begun_count += 1
            await gate.wait()
            return await read_now(*args, **options)

        def noted(principal: str, size_bytes: int) -> None:
            take_for(principal, size_bytes)
            held.append(budget.used_by(principal))

        monkeypatch.setattr(reader, "read", read_behind_gate)
        monkeypatch.setattr(budget, "take_for", noted)

        # When more have begun than half has shares for before the first has an answer
        read: Any = unread.unary_stream("/slatemq.v1.IngestService/BatchGetMessages")
        proof = made.proofs["shop"]
        calls = [read(request.SerializeToString(), metadata=proof) for _ in range(READS)]

        def done_count() -> int:
            return sum(call.done() for call in calls)

        await eventually(lambda: begun_count + done_count() > SHARES)
        gate.set()
        await eventually(lambda: len(held) + done_count() >= READS)

        # Then they hold half, and what is refused says so
        assert 0 < max(held) <= budget_bytes // 2 + MEBIBYTE
        for call in calls:
            if call.done():
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert from_rpc_error(refused.value).reason == "UNREAD_ANSWERS"
        # and another principal's read has its share
        answer = await made.stub.BatchGetMessages(request, metadata=made.proofs["other"])
        assert len(messages_of(answer.runs)) >= 1
