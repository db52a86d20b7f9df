"""What judging a message costs, by the number of queues and by the shape of their filters.

python -m benchmarks.filter_index
"""

from __future__ import annotations

import time
from collections.abc import Callable

from libs.filters import RuleSet

MESSAGES = 2000
ROUNDS = 5
"""The fastest run counts: other work on the machine affects it least."""

HEADERS = {"type": "order", "region": "eu", "tenant": "t7", "amount": "1200"}

SHAPES: dict[str, Callable[[int], str]] = {
    "equality": lambda n: f'headers.tenant == "t{n}" && int(headers.amount) > 1000',
    "no equality": lambda n: f"int(headers.amount) > {n}",
    "texts": lambda n: f'headers.tenant == "t{n}" && headers.region != "us"',
    "texts, all match": lambda n: f'headers.type in ["order", "{n}"] && headers.region != "us"',
}


def main() -> None:
    for shape, filter_of in SHAPES.items():
        for count in (10, 100, 1000, 10_000):
            rules = RuleSet()
            for n in range(count):
                rules.replace(f"q{n}", filter_of(n), "")
            messages = MESSAGES if shape in ("equality", "texts") else MESSAGES * 10 // count
            took_us = min(_round(rules, max(messages // ROUNDS, 2)) for _ in range(ROUNDS))
            print(f"{shape:>16}, {count:>6,} queues: {took_us:9.1f} µs a message")


def _round(rules: RuleSet, messages: int) -> float:
    """µs for each of these messages."""
    began = time.perf_counter()
    for _ in range(messages):
        headers = dict(HEADERS)  # The same object would be answered at once.
        rules.route(headers, (1, 0, 0, 0, 0), -1, 100)
    return (time.perf_counter() - began) * 1e6 / messages


if __name__ == "__main__":
    main()
