"""What a claim and its ack cost in a queue of some depth: time of the core, bytes for the commit.

python -m benchmarks.claim_depth [--per-claim 1000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from libs.storage.records.queues import AvailableMessage
from services.broker.core.queue import Choice
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Assignment, Range, Shard
from services.broker.core.waiting.scan import Selector

NOW_MS = 1_767_225_600_000
DEPTHS = (10_000, 100_000, 1_000_000, 4_000_000)
CLAIMED = 8_000
PER_RANGE = 1000


def filled(depth: int) -> Shard:
    shard = Shard()
    shard.create_queue("q", QueueSettings('headers.type == "order"'))
    for first in range(1, depth, PER_RANGE):
        ids = range(first, first + PER_RANGE)
        assignment = Assignment("q", ids)
        application = shard.begin(Range(0, first - 1, ids[-1], [assignment]))
        while application is not None and not application.is_done:
            application.step(NOW_MS + first // PER_RANGE)
        committed(shard)
    return shard


def committed(shard: Shard) -> int:
    rows = shard.drain(NOW_MS + 10_000_000)
    shard.durable()
    return sum(len(key) + len(value or b"") for key, value in rows)


class First(Selector):
    """Chooses the first messages, all at once as a broker does that has their payloads."""

    def __init__(self, count: int) -> None:
        self.left = count

    def room(self) -> int:
        return self.left

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        self.left -= len(items)
        return True

    def choose(self, _: AvailableMessage) -> Choice:
        self.left -= 1
        return Choice.TAKE if self.left >= 0 else Choice.STOP


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claim_depth")
    parser.add_argument("--per-claim", type=int, default=100)
    per_claim = parser.parse_args().per_claim
    claims = CLAIMED // per_claim
    print(f"{claims} claims of {per_claim} messages, each committed, acked, committed")
    for depth in DEPTHS:
        shard = filled(depth)
        queue = shard.queues["q"]
        written = 0
        began = time.perf_counter()
        for turn in range(claims):
            now_ms = NOW_MS + 10_000_000 + turn
            first = First(per_claim)
            claimed = shard.leases.claim(queue, first, 30_000, "bench", now_ms)
            written += committed(shard)
            shard.leases.ack(claimed.tokens, now_ms)
            written += committed(shard)
        took_us = (time.perf_counter() - began) * 1e6 / (claims * per_claim)
        print(
            f"depth {depth:>9,}: {took_us:5.1f} µs and {written / claims / per_claim:5.0f} bytes "
            "a message"
        )


if __name__ == "__main__":
    main()
