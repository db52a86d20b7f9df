"""Which queues a publish reaches, as far as routers answer quickly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slatemq.cli.output import note
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    SlateMQError,
    Unavailable,
)

if TYPE_CHECKING:
    from slatemq.client import Client
    from slatemq.models import Explanation

ANSWER_S = 2.0
"""How long a publish waits for brokers and routers, which it does not need."""

LOOKUPS_MAX = 20
"""With more queues, a publish with a delay does not check whether any is a delayed queue."""


async def check_queue(client: Client, queue: str) -> None:
    """Raises NotFound, with what to do, where the brokers say in time that no such queue exists.

    A caller that may publish but not inspect publishes unchecked. Where they say nothing, a note
    does.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.get_queue(queue)
    except PermissionDenied:
        return
    except (Unavailable, DeadlineExceeded, TimeoutError):
        note(f"no broker says whether the queue {queue!r} exists: publishing unchecked")
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
    """The queues that match such a message; None where no router answers in time.

    With `queues`, only of those: a router that does not know them yet looks them up.
    """
    judged = await _judged(client, headers, payload_bytes, *queues, **options)
    return None if judged is None else sorted(one.queue_id for one in judged if one.matched)


async def _judged(
    client: Client, headers: Mapping[str, str], payload_bytes: int, *queues: str, **options: Any
) -> list[Explanation] | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.explain(
                headers,
                payload_bytes=payload_bytes,
                queue_ids=queues,
                **{**options, "retention": options.get("retention") or 0},
            )
    except (SlateMQError, TimeoutError):
        return None


def _not_matched(queue: str) -> str:
    return (
        f"queue {queue!r} exists, but its filter does not match these headers: "
        f"`slatemq explain --to {queue}` shows why"
    )


async def check_taken(
    client: Client, queue: str, headers: Mapping[str, str], payload_bytes: int, **options: Any
) -> None:
    """Raises FailedPrecondition where the filter of an existing queue does not match a message.

    A note says where the queue is in quarantine.
    """
    judged = await _judged(client, headers, payload_bytes, queue, **options)
    if any(one.waits for one in judged or ()):
        note(f"queue {queue!r} is in quarantine: the message waits until that ends")
    elif judged is not None and not any(one.matched for one in judged):
        raise FailedPrecondition(
            "NOT_TAKEN",
            f"{_not_matched(queue)}; nothing was published (--allow-unrouted publishes it)",
        )


async def note_lines_reach(
    client: Client, queue: str | None, headers: Mapping[str, str], is_delayed: bool
) -> None:
    """Note that no queue matches an empty message with these headers, or applies its delay.

    `queue` exists, and is asked for by name: routers may not know it yet.
    """
    reached = await queues_reached(client, headers, 0)
    if reached is None:
        return
    if queue is not None and queue not in reached:
        judged = await _judged(client, headers, 0, queue)
        if judged is not None and not any(one.matched or one.waits for one in judged):
            note(_not_matched(queue))
        else:
            reached = [*reached, queue]
    elif not reached:
        note(
            "no queue matches an empty line with these headers: lines that no queue matches are "
            "stored, and only queues created with --start-from will get them"
        )
    if is_delayed:
        await note_unused_delay(client, reached)


def note_reach(queues: list[str] | None) -> None:
    if queues is None:
        return
    if not queues:
        note(
            "no queue matches: it is stored, and only queues created with --start-from will get it"
        )
    elif len(queues) == 1:
        note(f"goes to the queue {queues[0]}")
    else:
        note(f"goes to {len(queues)} queues")


async def note_unused_delay(client: Client, queues: list[str]) -> None:
    """Note that none of these queues is a delayed queue: only those apply a delay."""
    if not queues or len(queues) > LOOKUPS_MAX:
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            found = await asyncio.gather(*map(client.get_queue, queues))
    except (SlateMQError, TimeoutError):
        return
    if not any(queue.default_delay_ms for queue in found):
        note(
            "--delay has no effect: only delayed queues (created with --default-delay) apply it, "
            "and none of these is delayed; --visible-at +5m delays in any queue"
        )
