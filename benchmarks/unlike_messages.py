"""Messages that share nothing, and one message alone: `python -m benchmarks.unlike_messages`.

Runs of messages that differ only in their payloads are the fast road; this measures the others, in
microseconds of processor time for each message. Each row ends with the ratio to protobuf's own
objects doing the same work, which depends little on the machine and its load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from services.broker.delivery import responses
from slatemq._consume.delivered import Origin, claimed_of, received
from slatemq._publish.wire import Runs
from slatemq.models import OutgoingMessage
from slatemq.v1.consumer_pb2 import ClaimedRun, ClaimResponse
from slatemq.v1.ingest_pb2 import PublishRequest
from slatemq.v1.message_pb2 import Message

COUNT = 256
ROUNDS = 15
REQUEST_ID = "0123456789abcdef0123456789abcdef-12"
TOKEN = (77 << 8) + 1
UNLIKE = [
    OutgoingMessage(b"x" * 100, {"queue": "orders", "number": str(number)})
    for number in range(COUNT)
]


def spent_us(work: Callable[[], object], count: int) -> float:
    """The least processor time of some rounds, for each of `count` messages."""
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(1 + 5000 // count):
            work()
        least = min(least, (time.process_time() - began) / (1 + 5000 // count))
    return least / count * 1e6


def encode(messages: list[OutgoingMessage]) -> bytes:
    runs = Runs()
    for message in messages:
        runs.add(message, "")
    return runs.encoded(REQUEST_ID)


def encode_by_protobuf(messages: list[OutgoingMessage]) -> bytes:
    request = PublishRequest(request_id=REQUEST_ID)
    for message in messages:
        request.runs.add(payloads=[message.payload]).headers.update(message.headers)
    return request.SerializeToString()


def columns() -> responses._Columns:
    terms = SimpleNamespace(deadline_ms=1_700_000_030_000, length_ms=30_000)
    claimed: Any = SimpleNamespace(tokens=range(TOKEN, TOKEN + COUNT), terms=terms)
    commons = [Message(headers=message.headers).SerializeToString() for message in UNLIKE]
    payloads = [message.payload for message in UNLIKE]
    message_ids = [(3 << 48) + number for number in range(COUNT)]
    return responses._Columns(claimed, payloads, commons, message_ids, [0] * COUNT, [128] * COUNT)


def answer(given: responses._Columns) -> bytes:
    return b"".join(responses._runs_of_one(0, given))


def answer_by_protobuf(given: responses._Columns) -> bytes:
    response = ClaimResponse()
    rows = zip(given.payloads, given.commons, given.message_ids, strict=True)
    for place, (payload, common, message_id) in enumerate(rows):
        run = ClaimedRun(
            common=Message.FromString(common),
            message_ids=[message_id],
            payloads=[payload],
            lease_token=f"0-{TOKEN + place:016x}",
            lease_deadline_ms=1_700_000_030_000,
            attempts_count=1,
            priority=128,
            lease_ms=30_000,
        )
        response.runs.append(run)
    return response.SerializeToString()


def read(encoded: bytes) -> list[str]:
    origin = Origin("q", finisher=None)  # type: ignore[arg-type]  # nothing is acked
    messages = received(claimed_of(ClaimResponse.FromString(encoded)), origin)
    return [message.lease_token for message in messages]


def read_by_protobuf(encoded: bytes) -> list[str]:
    tokens = []
    for run in ClaimResponse.FromString(encoded).runs:
        for _, payload in zip(run.message_ids, run.payloads, strict=True):
            tokens.append(run.lease_token if payload else "")
    return tokens


def row(name: str, count: int, ours: Callable[[], object], protobuf: Callable[[], object]) -> None:
    each_us, by_protobuf_us = spent_us(ours, count), spent_us(protobuf, count)
    print(f"{name:36} {each_us:6.2f} µs  {each_us / by_protobuf_us:5.2f} of protobuf's")


def main() -> None:
    given = columns()
    encoded = answer(given)
    one = UNLIKE[:1]
    row("client encodes one message", 1, lambda: encode(one), lambda: encode_by_protobuf(one))
    row(
        "client encodes unlike messages",
        COUNT,
        lambda: encode(UNLIKE),
        lambda: encode_by_protobuf(UNLIKE),
    )
    row(
        "broker encodes unlike messages",
        COUNT,
        lambda: answer(given),
        lambda: answer_by_protobuf(given),
    )
    row(
        "client reads unlike messages",
        COUNT,
        lambda: read(encoded),
        lambda: read_by_protobuf(encoded),
    )


if __name__ == "__main__":
    main()
