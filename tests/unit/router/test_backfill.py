"""Pieces of replays: how far they go, and who shares them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from libs.filters import TooSlow
from libs.serving.peers.calls import PeerFailed, PeerUnstorable
from libs.storage.records.metadata import NO_DELAY
from services.router import backfill
from services.router.backfill import Backfills, LogReader, ReplayingQueue, SharedPiece, Span
from services.router.entries import LogEntry
from services.router.pieces import PieceLimits
from services.router.routing import BrokerRules, Judgement
from services.router.tails import Buffer, Log
from slatemq._byte_budget import ByteBudget
from slatemq.v1 import ingest_pb2, queue_pb2
from tests import log_entries

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
    return LogEntry([run], 10)


def test_only_what_is_left_of_a_replay_is_wanted() -> None:
    queue = replaying("q", "true", end=9, cursor=4)
    assert {shard: (span.cursor, span.end) for shard, span in queue.spans.items()} == {7: (4, 9)}


def test_queues_at_the_same_place_are_judged_together_each_by_its_own_rule() -> None:
    queues = [
        replaying("a", 'headers["k"] == "a"'),
        replaying("late", "true", default_delay_ms=50, end=2),
    ]
    piece = SharedPiece(queues, 7, LIMITS)

    list(piece.add(entry(1, k="a")))
    list(piece.add(entry(2, k="b")))

    assert piece.is_complete()  # The second queue's replay ends here.
    assert (piece.previous, piece.last, piece.messages_count) == (0, 2, 2)
    assert [list(columns) for columns in piece.columns] == [["a"], ["late"]]
    assert piece.columns[0]["a"].message_ids == [1]
    assert piece.columns[1]["late"].message_ids == [1, 2]
    assert piece.columns[1]["late"].visible_at_ms == [2_050, 2_050]


@pytest.mark.parametrize(("source", "complete_at"), [("false", 6), ("true", 4)])
def test_a_piece_is_complete_with_enough_messages_or_matches(source: str, complete_at: int) -> None:
    piece = SharedPiece([replaying("q", source)], 7, LIMITS)
    for sequence in range(1, complete_at + 1):
        assert not piece.is_complete()
        list(piece.add(entry(sequence)))
    assert piece.is_complete()
    assert piece.last == complete_at


def test_an_entry_behind_the_end_is_not_judged_and_ends_the_piece() -> None:
    piece = SharedPiece([replaying("q", "true", end=5)], 7, LIMITS)
    list(piece.add(entry(3)))
    list(piece.add(entry(6)))
    assert (piece.is_complete(), piece.last) == (True, 5)
    assert piece.columns[0]["q"].message_ids == [3]


def test_a_large_entry_is_never_parted() -> None:
    piece = SharedPiece([replaying("q", "true")], 7, LIMITS)
    list(piece.add(entry(1, count=50)))
    assert piece.is_complete()
    assert len(piece.columns[0]["q"].message_ids) == 50


def test_what_was_removed_up_to_the_end_is_passed_over() -> None:
    piece = SharedPiece([replaying("q", "true", end=5)], 7, LIMITS)
    piece.finish()
    assert (piece.is_complete(), piece.last, piece.columns) == (True, 5, [{}])


def test_the_parts_of_a_log_are_brought_in_one_after_the_other() -> None:
    queue = queue_pb2.Queue(queue_id="q", filter="true", revision=3)
    for cursor, end in ((4, 9), (20, 30), (50, 50)):
        queue.replay.ranges.add(
            ingest_shard=7, start_sequence=cursor, cursor=cursor, end_sequence=end
        )
    replaying = ReplayingQueue(queue)

    assert replaying.spans == {7: Span(4, 9)}
    replaying.finish_span(7)
    assert replaying.spans == {7: Span(20, 30)}
    replaying.finish_span(7)
    assert replaying.spans == {}


class Tail:
    """A log's stream that answers with these entries, one in each response."""

    def __init__(self, *entries: ingest_pb2.LogEntry) -> None:
        self.responses = [
            ingest_pb2.TailLogResponse(entries=[one], durable_sequence=100) for one in entries
        ]

    async def read(self) -> ingest_pb2.TailLogResponse:
        return self.responses.pop(0)

    def cancel(self) -> None:
        self.responses.clear()


UNCONNECTED: Any = SimpleNamespace(doubt=None)
"""No test calls through it."""


UNUSED: Any = None


def is_live() -> bool:
    return True


async def unused(*asked: object) -> Any:
    raise AssertionError("nothing is sent")


class ReadLog(Log):
    """A log whose ingest answers with this stream."""

    def __init__(self, tail: Tail) -> None:
        super().__init__(7, UNCONNECTED, asyncio.create_task, Buffer(), ByteBudget(1 << 30))
        self._stream = tail

    async def open(self) -> Any:
        return SimpleNamespace(TailLog=lambda request: self._stream)

    def answer(self, tail: Tail) -> None:
        self._stream = tail


def logged(sequence: int, count: int) -> ingest_pb2.LogEntry:
    messages = [log_entries.logged(sequence + n) for n in range(count)]
    return log_entries.DecodedEntry(sequence, messages).encoded()


async def test_a_reader_inside_an_entry_passes_over_what_a_purge_has_left_of_it() -> None:
    tail = Tail(logged(1, 4), logged(9, 2))
    log = ReadLog(tail)
    reader = LogReader(log, await log.open())
    await reader.begin(5)

    found = await reader.next(100)

    assert found is not None
    assert (found.first, found.last) == (9, 10)


async def test_a_queue_that_changed_while_it_took_too_long_is_reported_as_it_was_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changed(revision: int) -> list[queue_pb2.QueueChange]:
        queue = queue_pb2.Queue(queue_id="q", filter="true", revision=revision)
        queue.replay.ranges.add(ingest_shard=7, end_sequence=100)
        return [queue_pb2.QueueChange(queue=queue)]

    def too_slow(*asked: object) -> Judgement:
        backfills.learn(changed(revision=4))
        raise TooSlow("q", "took 9 ms")

    running: list[Any] = []
    log = ReadLog(Tail(logged(1, 4)))
    backfills = Backfills(
        *(0, UNCONNECTED, unused, unused, UNUSED, is_live, running.append, LIMITS, UNUSED)
    )
    backfills.add_log(log)
    backfills.learn(changed(revision=3))
    monkeypatch.setattr(BrokerRules, "judge", too_slow)

    slow = await backfills._take_turn(log, "q")

    assert slow is not None
    assert (slow[0].queue_id, slow[1]) == ("q", 3)
    running[0].close()


async def test_a_replay_does_not_rest_for_the_time_in_which_it_waited_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    @asynccontextmanager
    async def alone() -> AsyncIterator[None]:
        nonlocal now_s
        now_s += 30
        yield

    async def send(log: Log, queue: ReplayingQueue, piece: SharedPiece, columns: Any) -> None:
        nonlocal now_s
        now_s += 2
        if len(running) == 1:
            raise PeerUnstorable("record x cannot be encoded")
        queue.finish_span(7)

    # Given a queue over whose piece the broker ended, and that waited for its time
    running: list[Any] = []
    log = ReadLog(Tail(logged(1, 4)))
    backfills = Backfills(
        *(0, UNCONNECTED, unused, unused, alone, is_live, running.append, LIMITS, UNUSED)
    )
    monkeypatch.setattr(backfills, "_send", send)
    backfills.add_log(log)
    queue = queue_pb2.Queue(queue_id="q", filter="true")
    queue.replay.ranges.add(ingest_shard=7, end_sequence=4)
    backfills.learn([queue_pb2.QueueChange(queue=queue)])
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        patch.setattr(asyncio, "sleep", rest)
        with pytest.raises(PeerFailed):
            await backfills._take_turn(log, "q")
        assert not backfills._waiting(7)
        await running[1]
        assert backfills._waiting(7)

        # When its piece goes beside no other work, for which it waits
        log.answer(Tail(logged(1, 4)))
        assert await backfills._take_turn(log, "q") is None

    # Then it rests for as long as its own work took
    assert rests[-1] == 2
    running[0].close()


async def test_a_replay_into_a_broker_that_is_down_reads_nothing_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, was_read = 0, False

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    async def take_turn(log: Log, queue_id: str) -> None:
        nonlocal was_read
        assert looks > 3
        was_read = True
        backfills.close()

    # Given a replay into a broker that is down for some looks
    running: list[Any] = []
    backfills = Backfills(
        *(0, UNCONNECTED, unused, unused, UNUSED, look, running.append, LIMITS, UNUSED)
    )
    monkeypatch.setattr(backfill, "DOWN_LOOK_S", 0)
    monkeypatch.setattr(backfills, "_take_turn", take_turn)
    backfills.add_log(ReadLog(Tail()))
    queue = queue_pb2.Queue(queue_id="q", filter="true")
    queue.replay.ranges.add(ingest_shard=7, end_sequence=4)
    backfills.learn([queue_pb2.QueueChange(queue=queue)])

    # Then its log is read once the broker is back
    await running[0]
    assert was_read


def replay_of(queue_id: str, *, quarantined: bool = False) -> list[queue_pb2.QueueChange]:
    queue = queue_pb2.Queue(queue_id=queue_id, filter="true", revision=3)
    queue.replay.ranges.add(ingest_shard=7, end_sequence=4)
    if quarantined:
        queue.quarantine.SetInParent()
    return [queue_pb2.QueueChange(queue=queue)]


async def test_a_queue_that_takes_too_long_in_its_replay_is_left_out_by_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def too_slow(*_: object) -> Judgement:
        raise TooSlow("q", "took 9 ms")

    async def quarantine(slow: TooSlow, revision: int) -> None:
        asked.append((slow.queue_id, revision))
        backfills.learn(replay_of("q", quarantined=True))

    running: list[Any] = []
    backfills = Backfills(
        *(0, UNCONNECTED, unused, quarantine, UNUSED, is_live, running.append, LIMITS, UNUSED)
    )
    backfills.add_log(ReadLog(Tail(logged(1, 4))))
    backfills.learn(replay_of("q"))
    monkeypatch.setattr(BrokerRules, "judge", too_slow)

    await running[0]

    assert asked == [("q", 3)]


async def test_a_replay_that_fails_is_tried_again_later_each_time_until_it_has_got_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = [PeerFailed("down"), PeerFailed("down"), None, PeerFailed("down"), None]
    waits: list[float] = []

    async def take_turn(log: Log, queue_id: str) -> None:
        failure = turns.pop(0)
        if not turns:
            backfills.close()
        if failure is not None:
            raise failure

    async def note(seconds: float) -> None:
        waits.append(seconds)

    running: list[Any] = []
    backfills = Backfills(
        *(0, UNCONNECTED, unused, unused, UNUSED, is_live, running.append, LIMITS, UNUSED)
    )
    backfills.add_log(ReadLog(Tail()))
    backfills.learn(replay_of("q"))
    monkeypatch.setattr(backfills, "_take_turn", take_turn)
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", note)
        await running[0]

    assert waits == [0.02, 0.04, 0.02]
