"""Pieces of replays: how far they go, and who shares them."""

from __future__ import annotations

import pytest

from services.router.backfill import ReplayingQueue, SharedPiece
from services.router.route import PieceLimits
from services.router.routing import NO_DELAY, LogEntry
from slatemq.v1 import queue_pb2

LIMITS = PieceLimits(messages_max=6, matches_max=4)


def replaying(
    queue_id: str, source: str, end: int = 100, cursor: int = 0, **settings: int
) -> ReplayingQueue:
    queue = queue_pb2.Queue(queue_id=queue_id, filter=source, revision=3)
    for name, value in settings.items():
        setattr(queue, name, value)
    queue.replay.ranges.add(ingest_shard=7, start_sequence=0, cursor=cursor, end_sequence=end)
    queue.replay.ranges.add(ingest_shard=8, start_sequence=0, cursor=5, end_sequence=5)
    return ReplayingQueue(queue)


def entry(sequence: int, count: int = 1, **headers: str) -> LogEntry:
    run = ((sequence, 1_000, 2_000, 0, 0), headers, NO_DELAY, (5,) * count, "")
    return LogEntry(sequence, [run], 10)


def test_only_what_is_left_of_a_replay_is_wanted() -> None:
    queue = replaying("q", "true", end=9, cursor=4)
    assert {shard: (span.cursor, span.end) for shard, span in queue.spans.items()} == {7: (4, 9)}


def test_queues_at_the_same_place_are_judged_together_each_by_its_own_rule() -> None:
    queues = [
        replaying("a", 'headers["k"] == "a"'),
        replaying("late", "true", default_delay_ms=50, end=2),
    ]
    piece = SharedPiece(queues, 7, LIMITS)

    piece.add(entry(1, k="a"))
    piece.add(entry(2, k="b"))

    assert piece.is_complete()  # The second queue's replay ends here.
    assert (piece.previous, piece.last) == (0, 2)
    assert [list(columns) for columns in piece.columns] == [["a"], ["late"]]
    assert piece.columns[0]["a"].message_ids == [1]
    assert piece.columns[1]["late"].message_ids == [1, 2]
    assert piece.columns[1]["late"].visible_at_ms == [2_050, 2_050]


@pytest.mark.parametrize(("source", "complete_at"), [("false", 6), ("true", 4)])
def test_a_piece_is_complete_with_enough_messages_or_matches(source: str, complete_at: int) -> None:
    piece = SharedPiece([replaying("q", source)], 7, LIMITS)
    for sequence in range(1, complete_at + 1):
        assert not piece.is_complete()
        piece.add(entry(sequence))
    assert piece.is_complete()
    assert piece.last == complete_at


def test_an_entry_behind_the_end_is_not_judged_and_ends_the_piece() -> None:
    piece = SharedPiece([replaying("q", "true", end=5)], 7, LIMITS)
    piece.add(entry(3))
    piece.add(entry(6))
    assert (piece.is_complete(), piece.last) == (True, 5)
    assert piece.columns[0]["q"].message_ids == [3]


def test_a_large_entry_is_never_parted() -> None:
    piece = SharedPiece([replaying("q", "true")], 7, LIMITS)
    piece.add(entry(1, count=50))
    assert piece.is_complete()
    assert len(piece.columns[0]["q"].message_ids) == 50


def test_what_was_removed_up_to_the_end_is_passed_over() -> None:
    piece = SharedPiece([replaying("q", "true", end=5)], 7, LIMITS)
    piece.finish()
    assert (piece.is_complete(), piece.last, piece.columns) == (True, 5, [{}])
