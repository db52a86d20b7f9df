"""The three queues: each filter once as CEL for SlateMQ, once as Python for the judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

HEADER_FIELDS = ("type", "region", "tier", "amount_cents")

MAX_ATTEMPTS = 5
LEASE_MS = 2_000
"""Short, so that what a consumer forgot comes back while you watch."""


@dataclass(frozen=True)
class DemoQueue:
    """A queue. `matches` looks at the event in the JSONL, never at the headers made from it."""

    queue_id: str
    filter: str
    matches: Callable[[Event], bool]
    priority: str = ""


QUEUES = (
    DemoQueue(
        "payments",
        filter='headers["type"] in ["order.paid", "refund.requested"]',
        matches=lambda event: event["type"] in ("order.paid", "refund.requested"),
        priority='headers["type"] == "refund.requested" ? 0 : 10',
    ),
    DemoQueue(
        "europe",
        filter='headers["region"] == "eu"',
        matches=lambda event: event["region"] == "eu",
    ),
    DemoQueue(
        "big-spenders",
        filter='headers["tier"] == "gold" || int(headers["amount_cents"]) >= 20000',
        # Of an event without an amount the second half is an error in CEL: no match, unless gold.
        matches=lambda event: event["tier"] == "gold" or event.get("amount_cents", 0) >= 20_000,
        priority='headers["tier"] == "gold" ? 0 : 5',
    ),
)


def headers_of(event: Event) -> dict[str, str]:
    """What is published beside an event, for the filters: strings, and none for what it lacks."""
    return {name: str(event[name]) for name in HEADER_FIELDS if name in event}


def is_poison(event: Event) -> bool:
    """Whether every consumer fails on it: an amount without its currency."""
    return "amount_cents" in event and event["currency"] is None
