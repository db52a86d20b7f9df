"""One log on its way to one broker: when a piece goes, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest

from libs.storage.log_runs import LogRun
from services.router.route import THIN, PieceLimits, Route
from services.router.routing import NO_DELAY, BrokerRules, LogEntry, QueueRule
from services.router.tails import Buffer, Log

LIMITS = PieceLimits(messages_max=4, matches_max=6, step_max=2, hold_ms=1_000)


def rules(revision: int = 1, /, **filters: str) -> BrokerRules:
    made = BrokerRules()
    made.change(QueueRule(queue_id, source) for queue_id, source in filters.items())
    made.revision = revision
    return made


def entry(sequence: int, *kinds: str) -> LogEntry:
    runs: list[LogRun] = [
        ((sequence + n, 0, 0, 0, 0), {"kind": kind}, NO_DELAY, (0,), "")
        for n, kind in enumerate(kinds)
    ]
    return LogEntry(sequence, runs, 100)


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


class ReadEntry:
    """An entry whose messages can be read again, and how often they were."""

    def __init__(self, sequence: int, *kinds: str) -> None:
        self.reads_count = 0
        self._runs = entry(sequence, *kinds).runs
        self.entry = LogEntry(sequence, self._runs, 100, self._read)

    def _read(self) -> Sequence[LogRun]:
        self.reads_count += 1
        return self._runs


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


def test_messages_that_were_let_go_of_are_judged_again_all_the_same() -> None:
    stored, route = ReadEntry(1, "a", "b"), Route()
    route.offer(0, [stored.entry])
    route.judge(rules(1, q=A_ONLY), 0, LIMITS)

    route.judge(rules(2, q='headers["kind"] == "b"'), 0, LIMITS)

    assert stored.reads_count == 1
    assert route.send().columns["q"].message_ids == [2]


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
def test_more_is_at_hand_while_the_log_goes_on_and_the_route_has_room(
    durable_sequence: int, messages_max: int, *, more: bool
) -> None:
    async def unused() -> grpc.aio.Channel:
        raise AssertionError("nothing is read here")

    log = Log(0, unused, asyncio.create_task, Buffer(messages_max=messages_max))
    log.told(durable_sequence)

    assert log.has_more(thin_route(3, 3, GATHERS)) is more
