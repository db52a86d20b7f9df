"""What removals cost beside many leases: these are looked at once for a command, not once a row."""

from __future__ import annotations

import pytest

from libs.storage.records.queues import DoneMessage, FailedMessage
from services.broker.core.batches.remove import (
    DeadLetter,
    DoneRow,
    Outcome,
    StoredRow,
    prune_done,
    take_dead_letters,
)
from services.broker.core.leases import InFlight
from tests.unit.broker.core.shards import START_MS, Rig

ROWS = 50


class Looks:
    """How often all leases of queues were looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        message_ids = InFlight.message_ids

        def counted(in_flight: InFlight) -> set[int]:
            self.count += 1
            return message_ids(in_flight)

        monkeypatch.setattr(InFlight, "message_ids", counted)


async def test_dead_letters_of_many_rows_are_taken_with_one_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    queue = rig.create()
    rows: list[StoredRow[FailedMessage]] = []
    for n in range(ROWS):
        dead_letter = FailedMessage(n + 1, START_MS, 3, 0, 0, "no")
        queue.failed.add((dead_letter,))
        queue.touch()
        rig.shard.drain(START_MS)
        rows.append(StoredRow(queue.orders.last, [dead_letter], [DeadLetter(n + 1, START_MS)]))
    looks = Looks(monkeypatch)

    outcomes, taken = take_dead_letters(rig.shard, queue, rows)

    assert outcomes == [[Outcome.REMOVED]] * ROWS
    assert [one.message_id for one in taken] == list(range(1, ROWS + 1))
    assert queue.failed.count == 0
    assert looks.count == 1


async def test_done_entries_of_many_rows_are_pruned_with_one_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    queue = rig.create()
    rows: list[DoneRow] = []
    for n in range(ROWS):
        queue.done.add((DoneMessage(n + 1, START_MS, 2, "c"),))
        queue.touch()
        rig.shard.drain(START_MS)
        rows.append(DoneRow(queue.orders.last, 1, [], [n + 1]))
    looks = Looks(monkeypatch)

    assert prune_done(rig.shard, queue, rows) == ROWS
    assert queue.done.count == 0
    assert looks.count == 1
