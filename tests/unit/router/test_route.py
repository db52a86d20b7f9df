"""One log on its way to one broker: when a piece goes, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from libs.filters import Rest, TooSlow
from libs.storage.records.log_runs import LogRun
from libs.storage.records.metadata import NO_DELAY
from services.router import routing
from services.router.entries import LogEntry
from services.router.pieces import THIN, Piece, PieceLimits, Seen
from services.router.route import Route
from services.router.routing import BrokerRules, Columns, Judgement, QueueRule
from services.router.tails import Buffer, Log
from slatemq._byte_budget import ByteBudget
from tests.unit.router.routes import A_ONLY, LIMITS, ReadEntry, changed, entry, rules


def test_a_match_is_due_at_once() -> None:
    route = Route()
    route.offer(0, [entry(1, "a")])

    assert route.judge(rules(q=A_ONLY), 5_000, LIMITS) == 1

    assert route.due_ms(LIMITS) == 0
    assert route.send().columns["q"].message_ids == [1]


def test_what_has_no_match_is_due_when_it_was_held_long_enough() -> None:
    route = Route()
    route.offer(0, [entry(1, "b")])

    route.judge(rules(q=A_ONLY), 5_000, LIMITS)

    assert route.due_ms(LIMITS) == 6_000


def test_what_has_no_match_goes_with_the_next_match() -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(1, "b")])
    route.judge(known, 0, LIMITS)
    route.offer(1, [entry(2, "a")])
    route.judge(known, 0, LIMITS)

    piece = route.send()

    assert (piece.previous, piece.last, piece.unmatched_count) == (0, 2, 1)


def test_a_range_goes_for_what_is_gone_from_the_end_of_a_log() -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [], 7)
    assert route.can_judge(LIMITS)
    route.judge(known, 5_000, LIMITS)

    assert route.due_ms(LIMITS) == 6_000
    piece = route.send()
    assert (piece.previous, piece.last, piece.columns) == (0, 7, {})

    route.answered(7)
    assert not route.is_behind
    assert not route.can_judge(LIMITS)


def test_what_is_judged_takes_in_what_is_gone_behind_it() -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(1, "b")])
    route.judge(known, 0, LIMITS)
    route.offer(1, [], 7)
    route.judge(known, 0, LIMITS)
    assert route.judged is not None
    assert route.judged.last == 7
    route.offer(7, [entry(8, "a")])
    route.judge(known, 0, LIMITS)

    piece = route.send()

    assert (piece.previous, piece.last, piece.messages_count) == (0, 8, 2)


def test_what_is_gone_is_passed_over_again_after_a_lost_answer() -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(1, "a")], 7)
    route.judge(known, 0, LIMITS)
    route.send()

    route.lost()
    route.adopt(1)
    route.judge(known, 0, LIMITS)

    piece = route.send()
    assert (piece.previous, piece.last, piece.messages_count) == (1, 7, 0)


def test_a_long_piece_goes_even_without_a_match() -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(n, "b") for n in range(1, 9)])

    while route.can_judge(LIMITS):
        route.judge(known, 0, LIMITS)

    assert route.due_ms(LIMITS) == 0
    assert route.send().last == 4


def test_a_piece_of_many_matches_is_long() -> None:
    route, known = Route(), rules(x="true", y="true", z="true")
    route.offer(0, [entry(n, "b") for n in range(1, 9)])

    while route.can_judge(LIMITS):
        route.judge(known, 0, LIMITS)

    assert route.send().matches_count == 6


def test_nothing_goes_while_something_is_in_flight_but_it_is_judged_already() -> None:
    route, known = Route(), rules(q="true")
    route.offer(0, [entry(1, "a")])
    route.judge(known, 0, LIMITS)
    route.send()
    route.offer(1, [entry(2, "a")])

    assert route.judge(known, 0, LIMITS) == 1
    assert route.due_ms(LIMITS) is None
    with pytest.raises(ValueError, match="not yet"):
        route.send()
    route.answered(1)

    assert (route.send().previous, route.pending_count) == (1, 1)


def caught_up(route: Route, known: BrokerRules) -> Piece:
    piece = route.next_piece
    assert piece is not None
    piece.catch_up(known)
    while piece.is_catching_up:
        assert route.due_ms(LIMITS) is None
        route.judge(known, 0, LIMITS)
    return piece


def test_only_the_queues_that_changed_judge_again_what_was_judged() -> None:
    route, known = Route(), rules(same=A_ONLY, other="true")
    route.offer(0, [entry(1, "a", "b"), entry(3, "b"), entry(4, "a")])
    for _ in range(3):
        route.judge(known, 0, LIMITS)
    before = caught_up(route, known).columns["same"]

    changed(known, other='headers["kind"] == "b"', new=A_ONLY)
    piece = caught_up(route, known)

    assert piece.revision == 2
    assert piece.columns["same"] is before
    matches = {queue_id: columns.message_ids for queue_id, columns in piece.columns.items()}
    assert matches == {"same": [1, 4], "other": [2, 3], "new": [1, 4]}
    assert piece.matches_count == 6


def test_a_change_that_judges_nothing_otherwise_costs_nothing() -> None:
    stored, route, known = ReadEntry(1, "a"), Route(), rules(q=A_ONLY)
    route.offer(0, [stored.entry])
    route.judge(known, 0, LIMITS)
    changed(known, q=A_ONLY)

    assert caught_up(route, known).revision == 2
    assert stored.reads_count == 0


def test_what_was_judged_by_several_configs_counts_as_judged_by_the_oldest() -> None:
    route, known = Route(), rules()
    route.offer(0, [entry(1, "a", "a"), entry(3, "a", "a")])
    route.judge(known, 0, LIMITS)
    changed(known, q=A_ONLY)
    route.judge(known, 0, LIMITS)

    assert route.revision == 1
    assert caught_up(route, known).columns["q"].message_ids == [1, 2, 3, 4]


def test_an_outdated_piece_catches_up_and_goes_again_with_the_answer_that_counts() -> None:
    route, known = Route(), rules()
    route.offer(0, [entry(1, "a"), entry(2, "b")])
    route.judge(known, 0, LIMITS._replace(step_max=1))
    sent = route.send()
    route.offer(2, [entry(3, "a")])
    assert route.seen_of(sent) is None

    changed(known, q=A_ONLY)
    route.seen = Seen(sent.read_until, 2, 99)
    route.outdated(known)
    assert route.judge(known, 0, LIMITS) == 1
    changed(known, q="false")

    assert route.due_ms(LIMITS) == 0
    assert route.send() is sent
    assert route.next_piece is None
    assert sent.columns["q"].message_ids == [1]
    assert route.seen_of(sent) == Seen(2, 2, 99)


@pytest.mark.parametrize("back", [Route.judge_again, Route.lost, lambda route: route.answered(0)])
def test_an_outdated_piece_that_comes_back_is_judged_and_sent_like_a_new_one(
    back: Callable[[Route], None],
) -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(1, "a")])
    route.judge(known, 0, LIMITS)
    outdated = route.send()
    changed(known, q="true")
    route.outdated(known)

    back(route)
    route.judge(known, 0, LIMITS)

    sent = route.send()
    assert sent is not outdated
    assert sent.columns["q"].message_ids == [1]
    assert route.in_flight is sent
    assert (route.judged, route.next_piece) == (None, None)


def test_what_follows_an_outdated_piece_that_was_applied_is_sent_for_itself() -> None:
    route, known = Route(), rules(q="true")
    route.offer(0, [entry(1, "a")])
    route.judge(known, 0, LIMITS)
    route.send()
    route.outdated(known)
    route.answered(1)

    route.offer(1, [entry(2, "a")])
    route.judge(known, 0, LIMITS)

    assert route.send() is route.in_flight
    assert route.judged is None


def test_a_piece_is_not_sent_before_it_has_caught_up() -> None:
    route, known = Route(), rules(q=A_ONLY)
    with pytest.raises(ValueError, match="nothing to send"):
        route.send()
    route.offer(0, [entry(1, "a")])
    route.judge(known, 0, LIMITS)
    changed(known, q="true")
    route.catch_up(known)

    with pytest.raises(ValueError, match="nothing to send, or not yet"):
        route.send()
    route.judge(known, 0, LIMITS)
    assert route.send().revision == 2


def test_what_was_caught_up_catches_up_again_before_it_is_sent_again() -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(1, "a")])
    route.judge(known, 0, LIMITS)
    piece = route.next_piece
    assert piece is not None
    seen = [piece.is_caught_up]
    route.catch_up(known)
    seen.append(piece.is_caught_up)
    route.send()
    seen.append(piece.is_caught_up)
    assert seen == [False, True, False]


def test_the_cursor_that_is_known_already_leaves_what_is_in_hand() -> None:
    route = Route(5)
    route.offer(5, [entry(6, "a")])

    route.adopt(5)

    assert (route.position, route.pending_count) == (6, 1)


def test_a_refused_piece_is_sent_again() -> None:
    route = Route()
    route.offer(0, [entry(1, "a")])
    route.judge(rules(1), 0, LIMITS)
    route.send()

    route.lost()
    route.judge(rules(2, q=A_ONLY), 0, LIMITS)

    assert route.send().columns["q"].message_ids == [1]


def test_a_cursor_further_on_drops_what_another_router_assigned() -> None:
    route, known = Route(), rules(q="true")
    route.offer(0, [entry(1, "a"), entry(2, "a"), entry(3, "a")])
    route.judge(known, 0, LIMITS)
    route.send()

    route.answered(2)
    route.judge(known, 0, LIMITS)

    assert route.send().columns["q"].message_ids == [3]


def test_a_cursor_that_went_back_wants_the_log_from_there() -> None:
    route = Route(5)
    route.offer(5, [entry(6, "a")])

    route.adopt(2)

    assert (route.position, route.pending_count) == (2, 0)
    with pytest.raises(ValueError, match="join"):
        route.offer(5, [entry(7, "a")])


def test_what_is_in_hand_already_is_not_taken_twice() -> None:
    route = Route()
    route.offer(0, [entry(1, "a"), entry(2, "a")])
    route.offer(0, [entry(1, "a"), entry(2, "a"), entry(3, "a")])

    assert (route.pending_count, route.pending_bytes) == (3, 300)


def test_messages_are_let_go_of_when_every_route_has_judged_them() -> None:
    stored, first, second = ReadEntry(1, "a"), Route(), Route()
    for route in (first, second):
        route.offer(0, [stored.entry])

    first.judge(rules(q=A_ONLY), 0, LIMITS)
    second.judge(rules(q=A_ONLY), 0, LIMITS)

    assert stored.reads_count == 0
    assert stored.entry.runs
    assert stored.reads_count == 1


def test_messages_are_let_go_of_when_the_last_route_does_not_want_them() -> None:
    stored, first, second = ReadEntry(1, "a"), Route(), Route()
    for route in (first, second):
        route.offer(0, [stored.entry])

    first.judge(rules(q=A_ONLY), 0, LIMITS)
    second.forget()

    assert stored.entry.runs
    assert stored.reads_count == 1


def test_messages_stay_for_a_route_that_has_to_judge_them_again() -> None:
    stored, first, second = ReadEntry(1, "a"), Route(), Route()
    for route in (first, second):
        route.offer(0, [stored.entry])

    first.judge(rules(q=A_ONLY), 0, LIMITS)
    first.send()
    first.lost()
    second.judge(rules(q=A_ONLY), 0, LIMITS)
    first.judge(rules(q=A_ONLY), 0, LIMITS)

    assert stored.reads_count == 0


def test_messages_are_let_go_of_when_all_parts_of_their_entry_are_judged() -> None:
    stored, route = ReadEntry(1, *"aaaaa"), Route()
    route.offer(0, [stored.entry])

    while route.can_judge(LIMITS._replace(messages_max=9)):
        route.judge(rules(q=A_ONLY), 0, LIMITS._replace(messages_max=9))

    assert stored.reads_count == 0
    assert stored.entry.runs
    assert stored.reads_count == 1


def test_messages_that_were_let_go_of_are_judged_again_all_the_same() -> None:
    stored, route, known = ReadEntry(1, "a", "b"), Route(), rules(q=A_ONLY)
    route.offer(0, [stored.entry])
    route.judge(known, 0, LIMITS)

    changed(known, q='headers["kind"] == "b"')
    piece = caught_up(route, known)

    assert stored.reads_count == 1
    assert piece.columns["q"].message_ids == [2]


def test_a_route_has_room_again_for_what_costs_much_memory_when_it_has_judged() -> None:
    buffer, route = Buffer(messages_max=100, waiting_max=3), Route()
    route.offer(0, [entry(n, "b") for n in (1, 2, 3)])
    assert buffer.is_full(route)

    route.judge(rules(q=A_ONLY), 0, LIMITS)

    assert (route.pending_count, route.waiting_count) == (3, 1)
    assert not buffer.is_full(route)


def test_a_piece_goes_on_as_long_as_few_of_its_matches_share_a_queue() -> None:
    limits = LIMITS._replace(thin_max=7, matches_max=100)
    known = rules(1, **{f"q{n}": f'headers["kind"] == "k{n}"' for n in range(9)})
    route = Route()
    route.offer(0, [entry(n, f"k{n}") for n in range(1, 9)])

    while route.can_judge(limits):
        route.judge(known, 0, limits)

    assert route.send().last == 7


def test_a_piece_whose_queues_have_many_matches_each_does_not() -> None:
    limits = LIMITS._replace(messages_max=THIN, thin_max=100, matches_max=100)
    route = Route()
    route.offer(0, [entry(n, "a") for n in range(1, 30)])

    while route.can_judge(limits):
        route.judge(rules(q=A_ONLY), 0, limits)

    assert route.send().last == THIN


def thin_route(offered: int, judged: int, limits: PieceLimits) -> Route:
    known = rules(1, **{f"q{n}": f'headers["kind"] == "k{n}"' for n in range(20)})
    route = Route()
    route.offer(0, [entry(n, f"k{n}") for n in range(1, offered + 1)])
    for _ in range(judged):
        route.judge(known, 5_000, limits)
    return route


GATHERS = LIMITS._replace(thin_max=8, matches_max=100, gather_ms=300, queues_per_ms=2, step_max=1)


def test_a_thin_piece_gathers_while_more_waits() -> None:
    assert thin_route(10, 3, GATHERS).due_ms(GATHERS) == 5_300


def test_a_thin_piece_gathers_while_the_log_has_more() -> None:
    route = thin_route(3, 3, GATHERS)

    assert route.due_ms(GATHERS, more=True) == 5_300


def test_a_thin_piece_waits_a_little_for_what_is_not_known_of_yet() -> None:
    assert thin_route(6, 6, GATHERS).due_ms(GATHERS) == 5_003


def test_a_thin_piece_waits_from_when_its_last_messages_were_judged() -> None:
    known = rules(1, **{f"q{n}": f'headers["kind"] == "k{n}"' for n in range(20)})
    route = Route()
    route.offer(0, [entry(n, f"k{n}") for n in range(1, 7)])
    for now_ms in range(5_000, 5_600, 100):
        route.judge(known, now_ms, GATHERS)
    assert route.due_ms(GATHERS) == 5_503


def test_a_thin_piece_of_a_few_queues_goes_at_once() -> None:
    assert thin_route(1, 1, GATHERS).due_ms(GATHERS) == 0


def test_a_thin_piece_that_is_long_goes_whatever_waits_behind_it() -> None:
    assert thin_route(10, 8, GATHERS).due_ms(GATHERS, more=True) == 0


def test_a_piece_that_is_not_thin_goes_whatever_waits_behind_it() -> None:
    limits = GATHERS._replace(messages_max=100, thin_max=100)
    route = Route()
    route.offer(0, [entry(n, "a") for n in range(1, 30)])
    for _ in range(THIN):
        route.judge(rules(q=A_ONLY), 0, limits)

    assert route.due_ms(limits, more=True) == 0


@pytest.mark.parametrize(
    ("durable_sequence", "messages_max", "more"),
    [(3, 100, False), (4, 100, True), (4, 3, False)],
    ids=["all offered", "one is not", "no room for it"],
)
def test_more_is_ready_while_the_log_goes_on_and_the_route_has_room(
    durable_sequence: int, messages_max: int, *, more: bool
) -> None:
    unused: Any = SimpleNamespace(doubt=None)  # Nothing is read here.
    log = Log(
        0, unused, asyncio.create_task, Buffer(messages_max=messages_max), ByteBudget(1 << 30)
    )
    log.advance(durable_sequence)

    assert log.has_more(thin_route(3, 3, GATHERS)) is more


class TooSlowAt(BrokerRules):
    """Rules of which one queue takes too long at its n-th entry, as long as it is asked."""

    def __init__(self, calls_max: int) -> None:
        super().__init__()
        self.calls_left = calls_max

    def judge(
        self, entry: LogEntry, columns: Columns, begin: int = 0, rest: Rest | None = None
    ) -> Judgement:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise TooSlow("slow", "took 9 ms")
        return super().judge(entry, columns, begin, rest)


def test_what_was_judged_beside_a_filter_that_took_too_long_is_judged_again_in_its_order() -> None:
    route, slow = Route(), TooSlowAt(2)
    slow.change([QueueRule("q", "true")])
    route.offer(0, [entry(1, "a"), entry(2, "a"), entry(3, "a")])
    route.judge(slow, 0, LIMITS)
    with pytest.raises(TooSlow):
        route.judge(slow, 0, LIMITS)

    route.judge_again()
    slow.calls_left = 99
    assert [route.judge(slow, 0, LIMITS) for _ in range(2)] == [2, 1]

    piece = route.send()
    assert [one.first for one in piece.entries] == [1, 2, 3]
    assert len(piece.columns["q"].message_ids) == 3


def test_what_is_on_its_way_stays_there_when_the_rest_is_judged_again() -> None:
    route, known = Route(), rules(q="true")
    route.offer(0, [entry(1, "a"), entry(2, "a"), entry(3, "a")])
    route.judge(known, 0, LIMITS)
    sent = route.send()
    route.judge(known, 0, LIMITS)

    route.judge_again()

    assert route.in_flight is sent
    assert route.judged is None
    route.answered(2)
    route.judge(known, 0, LIMITS)
    assert [one.first for one in route.send().entries] == [3]


def test_the_oldest_message_is_the_first_that_is_not_answered() -> None:
    route, known = Route(), rules(q=A_ONLY)
    seen = [route.oldest_received_ms]
    runs = [((n, 0, 100 * n, 0, 0), {"kind": "a"}, NO_DELAY, (0,), "") for n in (1, 2, 3)]
    route.offer(0, [LogEntry([run], 100) for run in runs])
    one = LIMITS._replace(messages_max=1, step_max=1)
    for _ in runs:
        seen.append(route.oldest_received_ms)
        route.judge(known, 0, one)
        seen.append(route.oldest_received_ms)
        sent = route.send()
        seen.append(route.oldest_received_ms)
        route.answered(sent.last)
    seen.append(route.oldest_received_ms)
    assert seen == [None, 100, 100, 100, 200, 200, 200, 300, 300, 300, None]


def test_what_waits_for_its_first_match_catches_up_with_a_change() -> None:
    route, known = Route(), rules(q="false")
    route.offer(0, [entry(1, "a"), entry(2, "a")])
    route.judge(known, 0, LIMITS)
    changed(known, q="true")

    route.refresh_waiting(known, LIMITS)
    route.judge(known, 0, LIMITS)

    assert route.revision == 2
    assert route.send().columns["q"].message_ids == [1, 2]


@pytest.mark.parametrize("kinds", ["aa", "bbb"])
def test_what_has_matches_or_is_much_catches_up_only_when_it_is_sent(kinds: str) -> None:
    route, known = Route(), rules(q=A_ONLY)
    route.offer(0, [entry(1, *kinds)])
    while route.can_judge(LIMITS):
        route.judge(known, 0, LIMITS)
    changed(known, q="true")

    route.refresh_waiting(known, LIMITS)

    assert not route.can_judge(LIMITS)
    assert route.revision == 1


def test_what_catches_up_names_the_revision_by_which_it_is_judged_not_the_newest() -> None:
    route, known = Route(), BrokerRules()
    known.change([QueueRule("q", "false")], 1)
    known.revision = 1
    route.offer(0, [entry(1, "a"), entry(2, "a")])
    route.judge(known, 0, LIMITS)
    route.send()
    known.change([QueueRule("q", "true")], 2)
    known.revision = 2
    assert route.judging_revision(known) == 2
    route.outdated(known)
    known.change([QueueRule("q", "1 == 1")], 3)
    known.revision = 3

    assert route.judging_revision(known) == 2
    route.judge_again()
    assert route.judging_revision(known) == 3


def test_a_piece_is_not_sent_in_the_middle_of_an_entry() -> None:
    route, known = Route(), BrokerRules()
    limits = LIMITS._replace(step_max=9, matches_max=100)
    known.change([QueueRule("q", "true")])
    runs: list[LogRun] = [((n, 0, 5, 0, 0), {"n": str(n)}, -1, (7,), "") for n in range(1, 10)]
    route.offer(0, [LogEntry(runs, 10)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "STEP_NS", -1)
        route.judge(known, 0, limits)
        assert route.due_ms(limits) is None
        assert route.can_judge(limits)
        while route.can_judge(limits):
            route.judge(known, 0, limits)
    assert route.due_ms(limits) == 0
    assert route.send().columns["q"].message_ids == list(range(1, 10))
