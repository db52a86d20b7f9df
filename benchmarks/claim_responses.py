"""What a response of a thousand claimed messages costs a broker and a client (decision 0028).

python -m benchmarks.claim_responses
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from libs.storage.layout.buckets import BucketKind
from libs.storage.records.queues import AvailableMessage
from services.broker.core.leases import Claimed, Terms
from services.broker.core.waiting.scan import Segment
from services.broker.delivery import responses
from services.broker.delivery.waiters import ClaimBatch
from slatemq._consume.delivered import Origin, claimed_of, received
from slatemq._consume.finishing import rows_among
from slatemq.v1.consumer_pb2 import ClaimResponse
from slatemq.v1.message_pb2 import Message
from tests.stored_messages import cached

MESSAGES = 1000
BLOCK = 200
"""Leases of a bucket, whose tokens are in a row."""

ROUNDS = 30
"""The fastest one counts: it is the least disturbed by other work on the machine."""


def claimed(payload_bytes: int, *, alike: bool) -> ClaimBatch:
    """Messages with two headers; those that are not alike have a header of their own."""
    messages = [
        Message(
            message_id=number,
            payload=bytes(payload_bytes),
            headers={"type": "order", "region": "eu" if alike else f"region-{number}"},
            created_at_ms=1_700_000_000_000,
            received_at_ms=1_700_000_000_000,
            retention_s=604_800,
        )
        for number in range(1, MESSAGES + 1)
    ]
    items = [AvailableMessage(message.message_id, 128, 0, 0, 0) for message in messages]
    terms = Terms(cast("Any", None), "c", 0, 1_700_000_030_000, 30_000)
    batch = Claimed(terms, [Segment(items, BucketKind.READY, 1, range(MESSAGES))])
    for block, start in enumerate(range(0, MESSAGES, BLOCK), 1):
        batch.tokens += range(block << 8, (block << 8) + BLOCK)
        batch.parts.append((cast("Any", None), start, start + BLOCK))
    return ClaimBatch(batch, [cached(message) for message in messages])


def encode(batch: ClaimBatch) -> bytes:
    """A response with these messages; only one part, so the event loop has no turn."""
    encoding = responses.encode_messages(0, [batch])
    try:
        encoding.send(None)
    except StopIteration as done:
        return bytes(done.value)
    raise RuntimeError("one batch was encoded in several turns")


def read(response: bytes, origin: Origin) -> list[str]:
    """As a consumer does: each message, its payload, ID and token. Returns the tokens."""
    messages = received(claimed_of(ClaimResponse.FromString(response)), origin)
    for message in messages:
        message.payload  # noqa: B018
        message.message_id  # noqa: B018
    return [message.lease_token for message in messages]


def best_us(work: Callable[..., object], *arguments: object) -> float:
    """µs of the fastest round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work(*arguments)
        rounds.append((time.perf_counter() - began) * 1e6)
    return min(rounds)


async def main() -> None:
    origin = Origin("q", cast("Any", None))
    for payload_bytes in (100, 1024):
        for name, alike, run_min in (
            ("all differ", False, 8),
            ("all alike, runs of one", True, MESSAGES + 1),
            ("all alike, long runs", True, 8),
        ):
            responses.RUN_MIN = run_min
            batch = claimed(payload_bytes, alike=alike)
            response = encode(batch)
            tokens = read(response, origin)
            print(
                f"{payload_bytes:>5} B, {name:<23}: encode {best_us(encode, batch):6,.0f} µs, "
                f"read {best_us(read, response, origin):6,.0f} µs, {len(response):,} bytes, "
                f"look for rows of tokens {best_us(rows_among, tokens):.0f} µs"
            )


if __name__ == "__main__":
    asyncio.run(main())
