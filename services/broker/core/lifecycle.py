"""How the records of a queue begin and end.

A queue that is created again after a deletion continues with the next epoch, so that its buckets
never mix with those of the former one, which the sweeper removes.
"""

from __future__ import annotations

from itertools import islice

from libs.storage.layout.buckets import MAX_EPOCH, MAX_ORDER_N, order_of, split_order
from libs.storage.layout.keys import active_key, config_key, done_key, failed_key, queue_state_key
from libs.storage.layout.own_keys import FORGOTTEN_REVISION_KEY
from libs.storage.layout.primitives import RowChange
from libs.storage.records.configs import encode_config
from libs.storage.records.queues import encode_active, encode_done, encode_failed
from libs.storage.records.states import QueueStateRecord, encode_forgotten_revision
from services.broker.core.lists.storable import storable
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.waiting.orders import free_epoch

DELETED_KEPT = 10_000
"""Deleted queues remembered at least, for readers that learn late of the deletion."""


def forget_surplus(
    deleted: dict[str, QueueStateRecord], forgotten_revision: int
) -> tuple[int, list[RowChange]]:
    """Forgets the queues deleted first, beyond those kept, if no other row of them is left.

    Returns the revision up to which deletions are forgotten, and the rows to write.
    """
    oldest = list(islice(deleted.items(), max(len(deleted) - DELETED_KEPT, 0)))
    rows: list[RowChange] = []
    for queue_id, state in oldest:
        if not state.garbage_epochs:
            del deleted[queue_id]
            rows.append((queue_state_key(queue_id), None))
            forgotten_revision = max(forgotten_revision, state.created_revision)
    if rows:
        rows.append((FORGOTTEN_REVISION_KEY, encode_forgotten_revision(forgotten_revision)))
    return forgotten_revision, rows


def new_state(before: QueueStateRecord | None, revision: int) -> QueueStateRecord:
    """The state of a queue created at this revision; `before` is what a former one left."""
    if before is None:
        return QueueStateRecord(created_revision=revision)
    return QueueStateRecord(
        epoch=before.epoch,
        last_order=before.last_order,
        garbage_epochs=before.garbage_epochs,
        created_revision=revision,
    )


def deleted_state(queue: Queue, revision: int) -> QueueStateRecord:
    """What stays of a queue deleted at this revision: where the next one continues."""
    garbage = tuple(
        dict.fromkeys(
            (*queue.garbage_epochs, *queue.waiting.garbage_epochs, queue.epoch, queue.waiting.epoch)
        )
    )
    free = free_epoch(queue.waiting.epoch, garbage)
    # If none is free, the next one has to wait for the sweeper: see `epoch_is_free`.
    epoch = (queue.waiting.epoch + 1) % (MAX_EPOCH + 1) if free is None else free
    return QueueStateRecord(
        created_revision=revision,
        deleted=True,
        epoch=epoch,
        last_order=order_of(epoch, split_order(queue.orders.last).ms, MAX_ORDER_N),
        garbage_epochs=garbage,
    )


def config_row(queue_id: str, settings: QueueSettings) -> RowChange:
    """The record of a queue's settings; raises InvalidArgument (UNSTORABLE) if they do not fit."""
    record = storable(f"config of queue {queue_id!r}", encode_config, settings.record())
    return config_key(queue_id), record


def creation_rows(queue: Queue) -> tuple[RowChange, ...]:
    """The RFC's workflow: the config and three empty records, in one batch."""
    return (
        config_row(queue.queue_id, queue.settings),
        (active_key(queue.queue_id, 0), encode_active((), ())),
        (done_key(queue.queue_id, 0), encode_done(())),
        (failed_key(queue.queue_id, 0), encode_failed(())),
    )
