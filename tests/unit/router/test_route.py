"""One log on its way to one broker: when a piece goes, and what is kept of it."""

from __future__ import annotations

import pytest

from services.router.route import THIN, PieceLimits, Route
from services.router.routing import BrokerRules, LogEntry, LogMessage, QueueRule

LIMITS = PieceLimits(messages_max=4, matches_max=6, step_max=2, hold_ms=1_000)


def rules(revision: int = 1, **filters: str) -> BrokerRules:
    made = BrokerRules()
    made.change(QueueRule(queue_id, source) for queue_id, source in filters.items())
    made.revision = revision
    return made


def entry(sequence: int, *kinds: str) -> LogEntry:
    messages = [
        LogMessage(sequence + n, {"kind": kind}, 0, 0, 0, 0, 0) for n, kind in enumerate(kinds)
    ]
    return LogEntry(sequence, messages, 100)


A_ONLY = 'headers["kind"] == "a"'


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


def test_new_configs_judge_again_what_was_judged() -> None:
    route = Route()
    route.offer(0, [entry(1, "a")])
    route.judge(rules(1), 0, LIMITS)

    route.judge(rules(2, q=A_ONLY), 0, LIMITS)

    piece = route.send()
    assert (piece.revision, list(piece.columns)) == (2, ["q"])


def test_a_refused_piece_is_sent_again() -> None:
    route = Route()
    route.offer(0, [entry(1, "a")])
    route.judge(rules(1), 0, LIMITS)
    route.send()

    route.answered(0)
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


def test_a_piece_goes_on_as_long_as_few_of_its_matches_share_a_queue() -> None:
    limits = LIMITS._replace(thin_max=7, matches_max=100)
    known = rules(**{f"q{n}": f'headers["kind"] == "k{n}"' for n in range(9)})
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
