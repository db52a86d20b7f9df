"""The rows that a queue takes along to another shard, page by page.

They do not change any more once the queue has left. Rows before the head of a list are garbage and
stay behind; so a scan begins at the heads, not at the deleted rows before them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord
from libs.storage.layout.buckets import lane_order, last_lane_order, last_order, order_of
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import (
    RecordType,
    attempts_range,
    config_key,
    done_range,
    failed_range,
    queue_state_key,
    waiting_range,
)
from libs.storage.layout.own_keys import archived_range, delayed_range, replay_key
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.catalogue import KINDS
from libs.storage.records.replay_records import encode_replay
from libs.storage.records.states import QueueStateRecord, decode_queue_state
from slatemq.v1.move_pb2 import ArrivalHeader, StoredRow

PAGE_ROWS_MAX: Final = 500
PAGE_BYTES_MAX: Final = 1 << 20
"""A page ends with the row that reaches one of these; a row alone may have some megabytes."""

TAKEN_ALONG: Final = frozenset(
    {
        RecordType.ACTIVE,
        RecordType.DONE,
        RecordType.FAILED,
        RecordType.ARCHIVED,
        RecordType.ATTEMPTS,
        RecordType.DELAYED,
    }
)


async def header_of(database: Database, queue_id: str) -> ArrivalHeader:
    """The single records of a queue that has left. Raises CorruptRecord where one is missing."""
    config = await database.get(config_key(queue_id))
    state = await database.get(queue_state_key(queue_id))
    replay = await database.get(replay_key(queue_id))
    if config is None or state is None:
        raise CorruptRecord("queue state", f"queue {queue_id} has left, and has no record")
    return ArrivalHeader(config=config, state=state, replay=replay or encode_replay(()))


async def pages_of(
    database: Database, queue_id: str, header: ArrivalHeader
) -> AsyncIterator[list[StoredRow]]:
    """All other rows of a queue, in pages; none is empty."""
    page: list[StoredRow] = []
    size_bytes = 0
    for span in _spans_of(queue_id, decode_queue_state(header.state)):
        async for rows in database.scan(span.start, span.end):
            for key, value in rows:
                page.append(StoredRow(key=key, value=value))
                size_bytes += len(key) + len(value)
                if len(page) == PAGE_ROWS_MAX or size_bytes >= PAGE_BYTES_MAX:
                    yield page
                    page, size_bytes = [], 0
    if page:
        yield page


def _spans_of(queue_id: str, state: QueueStateRecord) -> Iterator[KeyRange]:
    epoch = state.epoch
    lane_epoch = state.purges.lane_epoch if state.purges else epoch
    last = last_order(epoch)
    for lane in state.lanes:
        if lane.waiting_count:
            first_of_lane = lane_order(lane.kind, lane.head_order)
            last_of_lane = last_lane_order(lane.kind, last_order(lane_epoch))
            yield waiting_range(queue_id, lane.priority, lane.kind, first_of_lane, last_of_lane)
    if state.done_count:
        yield done_range(queue_id, state.oldest_done_order, last)
    if state.failed_count:
        yield failed_range(queue_id, state.oldest_failed_order, last)
    if state.archived:
        yield archived_range(queue_id, state.archived.oldest_order, last)
    yield delayed_range(queue_id, order_of(lane_epoch, 1, 0), last_order(lane_epoch))
    yield attempts_range(queue_id, 0, MAX_MESSAGE_ID)


def is_taken_along(key: bytes, queue_id: str) -> bool:
    """Whether a row with this key can be one of a queue that arrives."""
    if len(key) < 2 or key[1] not in TAKEN_ALONG:
        return False
    try:
        parsed: Sequence[object] = KINDS[RecordType(key[1])].parse_key(key)
    except CorruptRecord:
        return False
    return parsed[0] == queue_id
