"""What routes hold together, and how each goes on when that is too much."""

from __future__ import annotations

from services.router.entries import LogEntry
from services.router.route import Route
from services.router.tails import Buffer
from slatemq._byte_budget import ByteBudget
from tests.unit.router.routes import LIMITS, ReadEntry, entry, rules

BUFFER = Buffer()


def through(route: Route, *, revision: int = 1) -> None:
    """Judge and send all that waits; the broker takes it."""
    known = rules(revision, q="true")
    while route.pending_count:
        while route.can_judge(LIMITS):
            route.judge(known, 0, LIMITS)
        route.answered(route.send().last)


def test_beyond_the_budget_a_route_is_full_as_long_as_it_holds_anything() -> None:
    budget = ByteBudget(1)
    holds, other = Route(0, budget), Route(0, budget)
    holds.offer(0, [entry(1, "a")])

    assert BUFFER.is_full(holds)
    assert not BUFFER.is_full(other)

    through(holds)
    assert not BUFFER.is_full(holds)


def test_what_a_route_lets_go_of_is_given_back_to_the_budget() -> None:
    budget, entries = ByteBudget(1 << 30), [entry(1, *"aab"), entry(4, "b"), entry(5, *"ab")]
    routes = [Route(0, budget) for _ in range(4)]
    for route in routes:
        route.offer(0, entries)
    assert budget.used_bytes == sum(route.memory_bytes for route in routes) > 4 * 600
    assigned, forgotten, adopted, lost = routes

    through(assigned)
    forgotten.forget()
    adopted.adopt(2)
    assert 0 < adopted.memory_bytes < lost.memory_bytes
    adopted.adopt(6)
    lost.judge(rules(q="true"), 0, LIMITS)
    lost.send()
    assert budget.used_bytes == lost.memory_bytes > 0
    lost.lost()
    assert budget.used_bytes == lost.memory_bytes > 0
    lost.adopt(6)

    assert budget.used_bytes == 0


def test_matches_count_as_memory_until_they_are_assigned() -> None:
    route = Route(0, ByteBudget(1 << 30))
    route.offer(0, [entry(1, "a")])
    limits = LIMITS._replace(matches_max=10_000)
    route.judge(rules(**{f"q{n}": "true" for n in range(1_000)}), 0, limits)

    assert route.memory_bytes > 1_000 * 500


def test_beyond_the_budget_what_has_no_match_goes_at_once() -> None:
    budget, unmatched = ByteBudget(1 << 30), rules(q="false")
    route = Route(0, budget)
    route.offer(0, [entry(1, "a")])
    route.judge(unmatched, 0, LIMITS)
    assert route.due_ms(LIMITS) == LIMITS.hold_ms

    budget.take(1 << 30)

    assert route.due_ms(LIMITS) == 0


def test_beyond_the_budget_pieces_are_small() -> None:
    limits = LIMITS._replace(messages_max=8_192, matches_max=65_536, step_max=512)
    route, known = Route(0, ByteBudget(1)), rules(**{f"q{n}": "true" for n in range(1_000)})
    route.offer(0, [entry(1, *"a" * 100)])

    while route.can_judge(limits):
        route.judge(known, 0, limits)

    piece = route.send()
    assert 0 < piece.matches_count <= 2 * limits.matches_max // 16


def test_where_memory_is_short_an_entry_is_read_for_each_route_and_let_go_of_after_it() -> None:
    stored = ReadEntry(1, *"ab")
    small = LogEntry(stored.entry.runs, 100, stored.read)
    before = small.memory_bytes
    small.discard_runs()
    assert small.memory_bytes < before
    routes = [Route(), Route()]
    for route in routes:
        route.offer(0, [small])

    for reads, route in enumerate(routes, 1):
        through(route)
        assert (stored.reads_count, route.cursor) == (reads, 2)


def test_a_long_entry_is_judged_whole_and_in_order_where_memory_is_short() -> None:
    stored = ReadEntry(1, *"a" * 3_000)
    stored.entry.discard_runs()
    route, known, got = Route(), rules(q="true"), list[int]()
    route.offer(0, [stored.entry])

    while route.pending_count:
        while route.can_judge(LIMITS):
            route.judge(known, 0, LIMITS)
        piece = route.send()
        got += piece.columns["q"].message_ids
        route.answered(piece.last)

    assert got == list(range(1, 3_001))
    assert stored.reads_count < 10  # Not once for each part.
