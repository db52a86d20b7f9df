"""Dead letters as requests name them: by the rows that list them, in a queue of one revision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libs.storage.layout.buckets import MAX_ORDER, MAX_ORDER_MS
from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.broker.core.batches.remove import DeadLetter
from services.broker.core.queue import Queue
from services.broker.dead_letters.mover import ListedDeadLetter
from services.broker.requests.limits import within
from services.broker.shard.owner import ShardOwner
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import removal_pb2

RUN_BYTES_MAX: Final = 255
"""A name with a time and a random part has about 40."""


async def find_queue(owner: ShardOwner, queue_id: str, created_revision: int = 0) -> Queue:
    """The queue of this name; 0: of any revision. Raises NotFound, FailedPrecondition."""
    owner.admit()
    queue = await owner.find(queue_id)
    if created_revision not in (0, queue.created_revision):
        await owner.durable()
        raise FailedPrecondition(
            "QUEUE_CHANGED",
            f"queue {queue_id!r} was deleted and created again since",
            subject=queue_id,
            metadata={"created_revision": str(queue.created_revision)},
        )
    return queue


def listed_dead_letters(
    field: str, rows: Sequence[removal_pb2.FailedRow], rows_max: int
) -> list[ListedDeadLetter]:
    check_count(field, rows, rows_max)
    return [
        listed_dead_letter(f"{field}[{number}]", row.message_id, row.failed_at_ms, row.bucket_order)
        for number, row in enumerate(rows)
    ]


def listed_dead_letter(
    field: str, message_id: int, failed_at_ms: int, order: int
) -> ListedDeadLetter:
    within(f"{field}.message_id", message_id, 1, MAX_MESSAGE_ID)
    within(f"{field}.failed_at_ms", failed_at_ms, 1, MAX_ORDER_MS)
    within(f"{field}.bucket_order", order, 1, MAX_ORDER)
    return ListedDeadLetter(order, DeadLetter(message_id, failed_at_ms))


def checked_run(field: str, run: str) -> str:
    if not 1 <= len(run.encode()) <= RUN_BYTES_MAX:
        raise InvalidArgument(field, f"must have 1 to {RUN_BYTES_MAX} bytes")
    return run


def check_count(field: str, rows: Sequence[object], most: int) -> None:
    if not 1 <= len(rows) <= most:
        raise InvalidArgument(field, f"1 to {most} rows, not {len(rows)}")
