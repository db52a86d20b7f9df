"""What would happen to a message, and why; nothing is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from libs.filters import Facts, QueueOutcome
from services.router.router import Router
from slatemq.errors import NotFound, Unavailable

QUEUES_STEP: Final = 4
"""Queues that judge in one step of the event loop: each may take some milliseconds."""


class Explainer:
    """Judges messages by the current queues of all broker shards."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def explain(self, message: Facts, queue_ids: Sequence[str]) -> list[QueueOutcome]:
        """The judgement of these queues, or of all: matches first, each part by queue ID.

        Queues created before this is called are seen; those of a broker that does not answer now
        are judged as they were last known.

        Raises:
            NotFound: A queue asked for does not exist.
            Unavailable: No broker's queues are known, or one asked for may be at a silent broker.
        """
        silent = await self._router.refresh_rules()
        all_rules = [link.rules for link in self._router.links.values()]
        known = frozenset[str]().union(*(rules.queue_ids for rules in all_rules))
        for queue_id in queue_ids:
            if queue_id not in known:
                if silent:
                    raise Unavailable(
                        f"queue {queue_id!r} is not known, and broker {silent[0]} does not answer",
                        reason="QUEUES_UNKNOWN",
                    )
                raise NotFound("queue", queue_id)
        outcomes: list[QueueOutcome] = []
        for rules in all_rules:
            asked = list(queue_ids or rules.queue_ids)
            for begin in range(0, len(asked), QUEUES_STEP):
                outcomes += rules.explain(message, asked[begin : begin + QUEUES_STEP])
                await asyncio.sleep(0)
        return sorted(outcomes, key=lambda outcome: (not outcome.matched, outcome.queue_id))
