"""Which queues a publish reaches, as far as a quick question tells."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slatemq.cli.output import note
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    SlateMQError,
    Unavailable,
)

if TYPE_CHECKING:
    from slatemq.client import Client

ANSWER_S = 2.0
"""How long a publish waits for what brokers and routers say of it: it needs neither."""

LOOKED_AT_MAX = 20
"""Queues of which a publish with a delay looks whether they are delayed queues."""


async def check_queue(client: Client, queue: str) -> None:
    """Raises NotFound with what to do, where no queue of that name exists.

    Where the brokers do not say so in time, the queue may exist: a publish needs none of them.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.get_queue(queue)
    except (Unavailable, DeadlineExceeded, TimeoutError):
        return
    except NotFound as error:
        raise NotFound(
            "queue",
            queue,
            f"{error.message}; nothing was published (--allow-unrouted publishes without a queue)",
            reason=error.reason,
        ) from None


async def queues_reached(
    client: Client, headers: Mapping[str, str], payload_bytes: int, *queues: str, **options: Any
) -> list[str] | None:
    """The queues whose filters take such a message; None where no router says so in time.

    Of `queues` only, where some are named: a router that does not know them yet looks them up.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            judged = await client.explain(
                headers,
                payload_bytes=payload_bytes,
                queue_ids=queues,
                **{**options, "retention": options.get("retention") or 0},
            )
    except (SlateMQError, TimeoutError):
        return None
    return sorted(one.queue_id for one in judged if one.matched)


def not_taken(queue: str) -> str:
    """What is said where a publish names a queue whose filter passes it over."""
    return (
        f"queue {queue!r} exists, but its filter does not take what has these headers: "
        f"`slatemq explain --to {queue}` says why"
    )


async def check_taken(
    client: Client, queue: str, headers: Mapping[str, str], payload_bytes: int, **options: Any
) -> None:
    """Raises FailedPrecondition where the filter of an existing queue does not take a message."""
    reached = await queues_reached(client, headers, payload_bytes, queue, **options)
    if reached is not None and queue not in reached:
        raise FailedPrecondition(
            "NOT_TAKEN",
            f"{not_taken(queue)}; nothing was published (--allow-unrouted publishes it)",
        )


async def note_lines_reach(
    client: Client, queue: str | None, headers: Mapping[str, str], is_delayed: bool
) -> None:
    """Says so where no queue takes an empty message of these headers, or heeds its delay.

    `queue` exists, and is asked about by name: routers may not know it yet.
    """
    reached = await queues_reached(client, headers, 0)
    if reached is None:
        return
    if queue is not None and queue not in reached:
        if await queues_reached(client, headers, 0, queue) == []:
            note(not_taken(queue))
        else:
            reached = [*reached, queue]
    elif not reached:
        note(
            "no queue takes an empty line with these headers: lines that none takes are stored, "
            "and only queues that start in the past will get them"
        )
    if is_delayed:
        await note_unheeded_delay(client, reached)


def note_reach(queues: list[str] | None) -> None:
    """Says how many queues take a message, where that is known."""
    if queues is None:
        return
    if not queues:
        note("no queue takes it: it is stored, and only queues that start in the past will get it")
    elif len(queues) == 1:
        note(f"goes to the queue {queues[0]}")
    else:
        note(f"goes to {len(queues)} queues")


async def note_unheeded_delay(client: Client, queues: list[str]) -> None:
    """Says so where none of these queues is a delayed queue, which alone heed a delay."""
    if not queues or len(queues) > LOOKED_AT_MAX:
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            found = await asyncio.gather(*map(client.get_queue, queues))
    except (SlateMQError, TimeoutError):
        return
    if not any(queue.default_delay_ms for queue in found):
        note(
            "--delay holds nothing back: only delayed queues (created with --default-delay) heed "
            "it, and none of these is one; --visible-at +5m holds back in any queue"
        )
