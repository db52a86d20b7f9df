"""Makes `events.jsonl`, what the demo publishes: a shop's events, the same ones at every run.

python -m examples.make_events > examples/events.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

EVENTS_COUNT = 4_000
SEED = 20_260_101
BEGIN_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z

REGIONS = {"eu": 45, "us": 35, "apac": 20}
TIERS = {"bronze": 60, "silver": 28, "gold": 12}
TYPES = {
    "order.created": 40,
    "order.paid": 30,
    "order.shipped": 14,
    "order.cancelled": 4,
    "refund.requested": 4,
    "customer.registered": 8,
}
GOODS = ("lamp", "chair", "desk", "mug", "rug", "shelf", "clock", "vase", "sofa", "kettle")
NAMES = ("Ana Souza", "Björn Åkesson", "Chloé Martin", "Dev Patel", "Emre Yılmaz", "Mei Chen 陈")

POISON_SHARE = 0.008
"""Events that no consumer can process: without a currency an amount means nothing."""


def _pick(random_: random.Random, weights: dict[str, int]) -> str:
    return random_.choices(list(weights), list(weights.values()))[0]


def events(count: int = EVENTS_COUNT, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The events, in the order in which they happened."""
    random_ = random.Random(seed)
    happened_ms = BEGIN_MS
    for number in range(1, count + 1):
        happened_ms += random_.randint(20, 9_000)
        kind = _pick(random_, TYPES)
        event: dict[str, Any] = {
            "id": f"evt-{number:06d}",
            "type": kind,
            "region": _pick(random_, REGIONS),
            "tier": _pick(random_, TIERS),
            "happened_at_ms": happened_ms,
            "customer": {"id": random_.randint(1_000, 1_999), "name": random_.choice(NAMES)},
        }
        if kind != "customer.registered":
            lines = [
                {"sku": random_.choice(GOODS), "count": random_.randint(1, 4)}
                for _ in range(random_.randint(1, 3))
            ]
            event["order"] = {"id": random_.randint(100_000, 999_999), "lines": lines}
            event["amount_cents"] = int(random_.lognormvariate(8.8, 0.9))
            event["currency"] = None if random_.random() < POISON_SHARE else "EUR"
        yield event


def main() -> None:
    """Write them to stdout, one JSON object per line."""
    for event in events():
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        sys.stdout.buffer.write(line.encode() + b"\n")


if __name__ == "__main__":
    main()
