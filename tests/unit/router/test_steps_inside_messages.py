"""A message that many filters are evaluated for is judged in steps, by rules that may change."""

from __future__ import annotations

import pytest

from libs.filters import Allowance, TooSlow
from libs.storage.records.log_runs import LogRun
from libs.storage.records.metadata import NO_DELAY
from services.router.entries import LogEntry
from services.router.pieces import PieceLimits
from services.router.route import Route
from services.router.routing import STEP_NS, BrokerRules, Columns, Judgement, QueueRule

TOOK_NS = 100_000
"""What an evaluation takes by the tests' clock: too little to be charged."""

LIMITS = PieceLimits()


@pytest.fixture(scope="module", autouse=True)
def _whole_steps() -> None:
    """Here they end by the clock of the tests."""


class Clock:
    """Goes on by half an evaluation with each look at it: there are two for each evaluation."""

    def __init__(self) -> None:
        self.now_ns = self.looks_count = 0
        self.look_ns = TOOK_NS // 2

    def look(self) -> int:
        self.looks_count += 1
        self.now_ns += self.look_ns
        return self.now_ns


def evaluated(count: int) -> list[QueueRule]:
    """Queues with filters that only the library can judge."""
    return [QueueRule(f"q{n:03}", f"size + {n} >= 0") for n in range(count)]


def entry(*sizes: int) -> LogEntry:
    runs: list[LogRun] = [((1, 0, 0, 0, 0), {"a": "b"}, NO_DELAY, sizes, "")]
    return LogEntry(runs, 10)


def in_steps(rules: BrokerRules, one: LogEntry, columns: Columns) -> list[Judgement]:
    """Judge an entry to its end."""
    found = [rules.judge(one, columns)]
    while (last := found[-1]).left_at is not None:
        assert len(found) < 1_000, "it does not go on"
        found.append(rules.judge(one, columns, last.left_at, last.rest))
    return found


def test_a_step_ends_inside_a_message_and_goes_on_with_the_next_queue() -> None:
    clock, columns = Clock(), Columns()
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns))
    rules.change(evaluated(200))

    steps = in_steps(rules, entry(5), columns)

    evaluations_max = STEP_NS // TOOK_NS + 1
    assert len(steps) >= 200 // evaluations_max
    assert clock.looks_count <= 2 * 200 + 3 * len(steps), "queues were asked again"
    assert [step.matches_count for step in steps] == [0] * (len(steps) - 1) + [200]
    assert all(len(one.message_ids) == 1 for one in columns.values())


def test_messages_of_different_sizes_go_on_inside_their_run() -> None:
    clock, columns = Clock(), Columns()
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns))
    rules.change(evaluated(120))

    steps = in_steps(rules, entry(5, 6, 7), columns)

    assert sum(step.matches_count for step in steps) == 3 * 120
    assert clock.looks_count <= 2 * 3 * 120 + 3 * len(steps), "messages were judged again"
    assert {tuple(one.message_ids) for one in columns.values()} == {(1, 2, 3)}


def test_plain_filters_do_not_look_at_the_clock() -> None:
    clock, columns = Clock(), Columns()
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns))
    rules.change(QueueRule(f"q{n}", 'headers["a"] != "c"') for n in range(1_000))

    assert len(in_steps(rules, entry(5), columns)) == 1
    assert len(columns) == 1_000
    assert clock.looks_count == 1


@pytest.mark.parametrize("in_entry", [0, 1])
def test_queues_that_change_while_a_message_is_judged_judge_it_once(in_entry: int) -> None:
    clock, route = Clock(), Route()
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns))
    fails = QueueRule("q000", "size > 0", "100 / (size - 5)", fallback_priority=3)
    rules.change([*evaluated(120)[1:], fails], 1)
    rules.revision = 1
    route.offer(0, [entry(*([6] * in_entry), 5)])
    route.judge(rules, 0, LIMITS)
    assert route.judged is not None
    is_left_inside = route.judged.is_inside_an_entry
    assert is_left_inside
    assert route.due_ms(LIMITS) is None, "half a message may not be sent"

    last = QueueRule("q119", "size < 0")
    gone = [QueueRule(queue_id, deleted=True) for queue_id in ("q000", "q001", "q118")]
    rules.change([*gone, last, QueueRule("q002", "size < 0"), QueueRule("new", "size > 0")], 2)
    rules.revision = 2
    while route.judged.is_inside_an_entry:
        route.judge(rules, 0, LIMITS)
    route.judged.catch_up(rules)
    while route.judged.is_catching_up:
        route.judge(rules, 0, LIMITS)

    piece = route.send()
    assert piece.revision == 2
    ids = list(range(1, in_entry + 2))
    expected = {"new", *(f"q{n:03}" for n in range(3, 118))}
    assert {name: one.message_ids for name, one in piece.columns.items()} == dict.fromkeys(
        expected, ids
    )


def test_a_fallback_of_a_queue_that_took_too_long_is_not_looked_for_in_the_next_message() -> None:
    clock, columns = Clock(), Columns()
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns, debt_max_ns=0))
    slow = QueueRule("slow", 'headers["a"] == "b"', "100 / (size - 5)", fallback_priority=3)
    rules.change([slow, QueueRule("other", 'headers["a"] == "c"')])
    clock.look_ns = 10_000_000
    with pytest.raises(TooSlow):
        rules.judge(entry(5), Columns())

    rules.change([slow._replace(quarantine="it took too long")])
    runs: list[LogRun] = [((2, 0, 0, 0, 0), {"a": "c"}, NO_DELAY, (1,), "")]
    rules.judge(LogEntry(runs, 10), columns)
    assert list(columns) == ["other"]


def test_what_catches_up_goes_on_inside_its_entry() -> None:
    clock, route = Clock(), Route()
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns))
    rules.change([QueueRule(f"q{n:03}", "false") for n in range(60)], 1)
    rules.revision = 1
    route.offer(0, [entry(5, 6, 7)])
    assert route.judge(rules, 0, LIMITS) == 3
    rules.change(evaluated(60), 2)
    rules.revision = 2

    route.catch_up(rules)
    counts = []
    while route.judging_revision(rules) and route.can_judge(LIMITS):
        counts.append(route.judge(rules, 0, LIMITS))

    assert len(counts) > 3, "it was judged in one step"
    assert sum(counts) == 3
    piece = route.send()
    assert piece.matches_count == 3 * 60
    assert {tuple(one.message_ids) for one in piece.columns.values()} == {(1, 2, 3)}
