"""What a claim and its ack cost in a queue of some depth: time of the core, bytes for the commit.

python -m benchmarks.claim_depth
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.broker.queue_machine import Choice
from services.broker.queue_settings import QueueSettings
from services.broker.shard_machine import Assignment, Range, Shard

NOW_MS = 1_767_225_600_000
DEPTHS = (10_000, 100_000, 1_000_000, 4_000_000)
PER_CLAIM = 100
CLAIMS = 100
PER_RANGE = 1000


def filled(depth: int) -> Shard:
    shard = Shard()
    shard.create_queue("q", QueueSettings('headers.type == "order"'))
    for first in range(1, depth, PER_RANGE):
        ids = range(first, first + PER_RANGE)
        assignment = Assignment("q", ids)
        shard.assign([Range(0, first - 1, ids[-1], [assignment])], NOW_MS + first // PER_RANGE)
        committed(shard)
    return shard


def committed(shard: Shard) -> int:
    rows = shard.drain(NOW_MS + 10_000_000)
    shard.durable()
    return sum(len(key) + len(value or b"") for key, value in rows)


def bounded(count: int) -> Callable[[object], Choice]:
    left = iter(range(count))
    return lambda _: Choice.TAKE if next(left, None) is not None else Choice.STOP


def main() -> None:
    print(f"{CLAIMS} claims of {PER_CLAIM} messages, each committed, acked, committed")
    for depth in DEPTHS:
        shard = filled(depth)
        queue = shard.queues["q"]
        written = 0
        began = time.perf_counter()
        for turn in range(CLAIMS):
            now_ms = NOW_MS + 10_000_000 + turn
            claimed = shard.claim(queue, bounded(PER_CLAIM), 30_000, "bench", now_ms)
            written += committed(shard)
            shard.ack(claimed.tokens, now_ms)
            written += committed(shard)
        took_us = (time.perf_counter() - began) * 1e6 / (CLAIMS * PER_CLAIM)
        print(
            f"depth {depth:>9,}: {took_us:5.1f} µs and {written / CLAIMS / PER_CLAIM:5.0f} bytes "
            "a message"
        )


if __name__ == "__main__":
    main()
