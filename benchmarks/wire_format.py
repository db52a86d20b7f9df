"""What writing protobuf by hand saves, beside protobuf's own library, at each place that does it.

python -m benchmarks.wire_format

Each place encodes 1,000 messages that share their headers, in long runs and in runs of one, by hand
and by the generated classes: the median processor time of rounds in turn, per message. The broker
by hand also finds where runs begin; the generated classes are given that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

from libs.storage.layout.buckets import BucketKind
from libs.storage.records.queues import AvailableMessage
from services.broker.core.leases import Claimed, Terms
from services.broker.core.waiting.scan import Segment
from services.broker.delivery.responses import encode_messages
from services.broker.delivery.waiters import ClaimBatch
from services.broker.requests.tokens import token_text
from services.ingest.read.message_runs import ReadResult
from slatemq._publish.wire import Runs
from slatemq.models import OutgoingMessage
from slatemq.v1 import consumer_pb2, ingest_pb2
from slatemq.v1.message_pb2 import Message

COUNT = 1_000
ROUNDS = 40
FIRST_ID = 3 << 48 | 1 << 20
HEADERS = {"kind": "order", "region": "eu"}


Calls = tuple[Callable[[], bytes], Callable[[], bytes]]


def publish(payload: bytes, lengths: int) -> Calls:
    runs = Runs()
    for at in range(COUNT):
        runs.add(OutgoingMessage(payload, HEADERS, created_at_ms=at // lengths), "")

    def by_library() -> bytes:
        request = ingest_pb2.PublishRequest()
        for common, payloads in zip(runs._commons, runs._payloads, strict=True):
            added = request.runs.add()
            added.MergeFromString(common)
            added.payloads.extend(payloads)
        return request.SerializeToString()

    return runs.encoded, by_library


def common_of(at: int) -> bytes:
    return Message(headers=HEADERS, created_at_ms=at + 1, received_at_ms=5).SerializeToString()


def read(payload: bytes, lengths: int) -> Calls:
    result = ReadResult([], [], [], [])
    for first in range(0, COUNT, lengths):
        ids = list(range(FIRST_ID + first, FIRST_ID + first + lengths))
        result.add(common_of(first), ids, [payload] * lengths, ())

    def by_library() -> bytes:
        response = ingest_pb2.BatchGetMessagesResponse()
        for common, message_ids, payloads, _ in result.runs:
            response.runs.add(common=common, message_ids=message_ids, payloads=payloads)
        return response.SerializeToString()

    return result.encode, by_library


def claim(payload: bytes, lengths: int) -> Calls:
    commons = [common_of(at // lengths) for at in range(COUNT)]
    items = [AvailableMessage(FIRST_ID + at, 128, 0, 0, 0) for at in range(COUNT)]
    terms = Terms(cast("Any", None), "c", 0, 1 << 41, 30_000)
    claimed = Claimed(terms, [Segment(items, BucketKind.READY, 1, range(COUNT))])
    claimed.tokens += [at // 250 << 8 | at % 250 for at in range(COUNT)]
    claimed.parts += [(cast("Any", None), at, at + 250) for at in range(0, COUNT, 250)]
    batch = ClaimBatch(claimed, [(payload, common) for common in commons], cast("Any", None))

    def by_hand() -> bytes:
        encoding = encode_messages(0, [batch])
        try:
            encoding.send(None)
        except StopIteration as done:
            return cast("bytes", done.value)
        raise AssertionError("one batch is encoded in one turn")

    def by_library() -> bytes:
        response = consumer_pb2.ClaimResponse()
        step = min(lengths, 250)
        for first in range(0, COUNT, step):
            run = response.runs.add(
                message_ids=range(FIRST_ID + first, FIRST_ID + first + step),
                payloads=[payload] * step,
                lease_token=token_text(0, claimed.tokens[first]),
                lease_deadline_ms=1 << 41,
                attempts_count=1,
                priority=128,
                lease_ms=30_000,
            )
            run.common.MergeFromString(commons[first])
        return response.SerializeToString()

    return by_hand, by_library


def measure(calls: Calls) -> list[float]:
    """Median nanoseconds a message."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            began = time.process_time_ns()
            call()
            taken.append((time.process_time_ns() - began) / COUNT)
    return [median(taken) for taken in times]


def main() -> None:
    print(f"{'':38}by hand   protobuf")
    for name, place in (
        ("client, publish", publish),
        ("ingest, read", read),
        ("broker, claim", claim),
    ):
        for size in (100, 1024, 16_384):
            for lengths in (COUNT, 1):
                hand, library = place(b"x" * size, lengths)
                assert len(hand()) > COUNT * size
                nanoseconds = measure((hand, library))
                what = f"{name}, {size} B, runs of {lengths}"
                print(f"{what:38}{nanoseconds[0]:4.0f} ns   {nanoseconds[1]:5.0f} ns")


if __name__ == "__main__":
    main()
