"""What judging a message costs, by the number of queues and by the shape of their filters.

python -m benchmarks.filter_index
"""

from __future__ import annotations

import time
from collections.abc import Callable

from libs.filters import RuleSet

MESSAGES = 2000
HEADERS = {"type": "order", "region": "eu", "tenant": "t7", "amount": "1200"}

SHAPES: dict[str, Callable[[int], str]] = {
    "equality": lambda n: f'headers.tenant == "t{n}" && int(headers.amount) > 1000',
    "no equality": lambda n: f"int(headers.amount) > {n}",
}


def main() -> None:
    for shape, filter_of in SHAPES.items():
        for count in (10, 100, 1000, 10_000):
            rules = RuleSet()
            for n in range(count):
                rules.replace(f"q{n}", filter_of(n), "")
            messages = MESSAGES if shape == "equality" else MESSAGES * 10 // count
            began = time.perf_counter()
            for _ in range(max(messages, 5)):
                rules.route(HEADERS, 0, 0, 100)
            took_us = (time.perf_counter() - began) * 1e6 / max(messages, 5)
            print(f"{shape:>11}, {count:>6,} queues: {took_us:9.1f} µs a message")


if __name__ == "__main__":
    main()
