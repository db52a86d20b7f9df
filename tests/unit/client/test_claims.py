"""What a claim does with the request of its caller."""

from __future__ import annotations

from typing import Any

from slatemq._consume.claims import claim
from slatemq._consume.delivered import claimed_of
from slatemq.v1 import consumer_pb2


async def test_a_claim_leaves_the_request_of_its_caller_for_the_next_one() -> None:
    class Locations:
        async def call(self, *_: object, **__: object) -> Any:
            return claimed_of(consumer_pb2.ClaimResponse())

    locations: Any = Locations()
    request = consumer_pb2.ClaimRequest(queue_id="q", wait_ms=5)
    await claim(locations, finisher=None, request=request, call_s=1)  # type: ignore[arg-type]
    assert request == consumer_pb2.ClaimRequest(queue_id="q", wait_ms=5)
