"""The state record of a queue, from its lists: it goes with each commit that touches the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libs.storage.records.states import ArchivedRecord, PurgesRecord, QueueStateRecord

if TYPE_CHECKING:
    from services.broker.core.queue_entries import QueueEntries


def state_of(queue: QueueEntries) -> QueueStateRecord:
    """The record of the queue as it is now."""
    in_flight, done, failed = queue.in_flight, queue.done, queue.failed
    return QueueStateRecord(  # by place: a commit may make ten thousand, names cost a third
        queue.epoch,
        False,  # deleted
        queue.last_order,
        queue.garbage_epochs,
        queue.created_revision,
        in_flight.count,
        done.count,
        failed.count,
        in_flight.first_order,
        done.oldest_order,
        failed.oldest_order,
        queue.available.records(),
        _purges(queue),
        _archived(queue),
    )


def numbers_of(state: QueueStateRecord) -> tuple[int, ...] | None:
    """For `encode_usual_state`, but for the lane: its numbers; None where it is not usual."""
    if state.garbage_epochs or state.purges or state.archived:
        return None
    return state[4:11]


def _purges(queue: QueueEntries) -> PurgesRecord | None:
    lane_epoch, lane_epochs = queue.lane_epoch, queue.garbage_lane_epochs
    done, failed = queue.done.garbage, queue.failed.garbage
    if lane_epoch == queue.epoch and not (lane_epochs or done.last or failed.last):
        return None
    return PurgesRecord(lane_epoch, lane_epochs, done, failed)


def _archived(queue: QueueEntries) -> ArchivedRecord | None:
    archived = queue.archived
    if not (archived.count or archived.garbage.last):
        return None
    return ArchivedRecord(archived.count, archived.oldest_order, archived.garbage)
