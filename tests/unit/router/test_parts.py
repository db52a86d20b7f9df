"""Entries with more matches than one piece may have."""

from __future__ import annotations

from itertools import combinations, pairwise

from libs.storage.records.log_runs import LogRun
from services.router.entries import LogEntry
from services.router.pieces import Piece, PieceLimits
from services.router.route import Route
from services.router.routing import BrokerRules
from tests.unit.router.routes import LIMITS, ReadEntry, changed, entry, rules


def sent_through(route: Route, known: BrokerRules, limits: PieceLimits) -> list[Piece]:
    """All pieces, each answered as applied."""
    pieces = []
    while route.pending_count:
        while route.can_judge(limits):
            route.judge(known, 0, limits)
        pieces.append(route.send())
        route.answered(pieces[-1].last)
    return pieces


def test_an_entry_with_many_matches_is_sent_in_pieces_of_a_size_that_can_be_sent() -> None:
    limits = LIMITS._replace(messages_max=1000, matches_max=100, step_max=64)
    known = rules(1, **{f"q{n}": "true" for n in range(30)})
    route = Route()
    route.offer(0, [entry(1, *"a" * 500), entry(501, "a")])

    pieces = sent_through(route, known, limits)

    assert max(piece.matches_count for piece in pieces) < 200
    assert all(one.previous == before.last for before, one in pairwise(pieces))
    for queue_id in known.queue_ids:
        got = [i for piece in pieces for i in piece.columns[queue_id].message_ids]
        assert got == list(range(1, 502))
    assert (route.pending_count, route.pending_bytes) == (0, 0)


def test_what_grew_too_large_by_a_change_is_split() -> None:
    limits = LIMITS._replace(messages_max=400, matches_max=100, step_max=64)
    route, known = Route(), rules()
    route.offer(0, [entry(1, *"a" * 400)])
    while route.can_judge(limits):
        route.judge(known, 0, limits)
    route.send()
    changed(known, **{f"q{n}": "true" for n in range(30)})

    route.outdated(known)
    while route.can_judge(limits):
        route.judge(known, 0, limits)

    assert max(piece.matches_count for piece in sent_through(route, known, limits)) < 200
    assert route.cursor == 400


def test_a_cursor_inside_an_entry_leaves_the_rest_of_it() -> None:
    route, known = Route(), rules(q="true")
    route.offer(0, [entry(1, *"aaaaa"), entry(6, "a")])

    route.adopt(3)
    assert (route.pending_count, route.position) == (3, 6)
    again = Route(3)
    again.offer(3, [entry(1, *"aaaaa"), entry(6, "a")])

    for one in (route, again):
        got = [
            i for piece in sent_through(one, known, LIMITS) for i in piece.columns["q"].message_ids
        ]
        assert got == [4, 5, 6]


def test_a_cursor_at_the_end_of_an_entry_leaves_the_next_one() -> None:
    route, known = Route(), rules(q="true")
    route.offer(0, [entry(1, *"aaaaa"), entry(6, "a")])

    route.adopt(5)

    assert (route.pending_count, route.pending_bytes, route.position) == (1, 100, 6)
    [piece] = sent_through(route, known, LIMITS)
    assert piece.columns["q"].message_ids == [6]


def test_parts_of_an_entry_can_be_read_again() -> None:
    stored = ReadEntry(1, *"abcde")
    parts = stored.entry.parts(2)
    for part in parts:
        part.hold()
        part.release()

    assert [(part.first, part.last, part.messages_count) for part in parts] == [
        (1, 2, 2),
        (3, 4, 2),
        (5, 5, 1),
    ]
    assert sum(part.size_bytes for part in parts) == 100
    kinds = [headers["kind"] for part in parts for _, headers, *_ in part.runs]
    assert kinds == list("abcde")


def test_a_part_of_an_entry_has_the_messages_between_two_ids() -> None:
    whole = entry(1, *"aabcdd")
    assert len(whole.runs) > 2

    for after, last in combinations(range(7), 2):
        part = whole.between(after, last)
        ids = [run[0][0] + place for run in part.runs for place in range(len(run[3]))]
        assert ids == list(range(after + 1, last + 1))


def run(first_id: int, *sizes: int) -> LogRun:
    """Messages that have all but their sizes in common, and nothing with other runs."""
    numbers = (first_id, 100 + first_id, 200 + first_id, 300 + first_id, 400 + first_id)
    return numbers, {"first": str(first_id)}, 500 + first_id, sizes, f"queue {first_id}"


def messages_of(one: LogEntry) -> list[tuple[object, ...]]:
    return [
        (first_id + place, *rest, headers, delay, size, queue)
        for (first_id, *rest), headers, delay, sizes, queue in one.runs
        for place, size in enumerate(sizes)
    ]


def test_a_cut_inside_a_run_leaves_each_message_as_it_is() -> None:
    whole = LogEntry([run(1, 11, 12, 13), run(4, 14), run(5, 15, 16, 17, 18)], 160)
    every = messages_of(whole)
    assert len(every) == whole.messages_count == 8

    for after, last in combinations(range(9), 2):
        part = whole.between(after, last)
        assert messages_of(part) == every[after:last]
        assert (part.first, part.last) == (after + 1, last)
        assert part.messages_count == last - after
    for count in range(1, 9):
        parts = whole.parts(count)
        assert [messages_of(part) for part in parts] == [
            every[start : start + count] for start in range(0, 8, count)
        ]


def test_a_part_of_an_entry_that_is_not_kept_in_memory_is_not_kept_either() -> None:
    # Given
    stored = ReadEntry(1, *"abcde")
    stored.entry.discard_runs()

    # When
    part = stored.entry.between(1, 3)

    # Then each look reads it, and so does one at the whole
    assert part.memory_bytes == part.stored_bytes
    for reads_count in (2, 3):
        assert [headers["kind"] for _, headers, *_ in part.peek()] == ["b", "c"]
        assert stored.reads_count == reads_count


def test_an_entry_that_was_cut_lets_go_of_its_messages_once_it_is_judged() -> None:
    # Given
    stored = ReadEntry(1, *"abcde")
    stored.entry.parts(2)
    assert stored.reads_count == 0

    # When
    stored.entry.peek()
    stored.entry.hold()
    stored.entry.release()
    stored.entry.peek()

    # Then
    assert stored.reads_count == 2
