"""What a workload needs of a system's client. One instance is one connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Delivery = tuple[bytes, Any]
"""A payload, and what `ack` takes for it."""


class Client(Protocol):
    """A client of one system, at its most durable."""

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Disconnect; nothing acked may be lost by it."""

    async def prepare(self, queues: Sequence[str]) -> None:
        """Make these queues, empty; each gets all that is published to the first one's topic.

        With one queue this is a work queue; with several it is a fan-out.
        """

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        """Publish to the topic of `queue`; returns when all of it is durable."""

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        """Up to `count` messages, waiting for a first one for a while; may be empty."""

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        """Ack each of them, on its own account."""
