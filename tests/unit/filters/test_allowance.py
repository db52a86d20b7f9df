"""What expressions may cost: steps of macros when checked, time when evaluated."""

from __future__ import annotations

import pytest

from libs.filters import Allowance, FilterError, RuleSet, TooSlow, check
from libs.filters.allowance import DEBT_MAX_NS, FREE_NS, SHARE
from libs.filters.syntax import SOURCE_BYTES_MAX
from libs.filters.typecheck import STEPS_MAX

HUNDRED = "[" + ",".join("1" * 100) + "]"
NEST = f"{HUNDRED}.all(x, {HUNDRED}.all(y, x == y))"
NO_FIELDS = (0, 0, 0, 0, 0)


def test_the_macros_of_an_expression_share_one_budget() -> None:
    nests, joined = NEST, [NEST]
    while len(nests := f"{nests} && {NEST}") <= SOURCE_BYTES_MAX:
        joined.append(nests)

    check(NEST)
    with pytest.raises(FilterError, match=f"more than {STEPS_MAX} steps"):
        check(joined[-1])
    with pytest.raises(FilterError, match=f"more than {STEPS_MAX} steps"):
        check(f"{NEST} ? 1 : ({NEST} ? 2 : 3)", "int")


@pytest.mark.parametrize("times", [1, 60])
def test_what_stands_inside_a_macro_counts_for_each_turn(times: int) -> None:
    source = "headers.all(k, " + " && ".join(['headers[k] != "a"'] * times) + ")"
    if times == 1:
        check(source)
        return
    with pytest.raises(FilterError, match=f"more than {STEPS_MAX} steps"):
        check(source)


def test_macros_as_people_write_them_are_within_the_budget() -> None:
    check('headers.exists(k, k.startsWith("debug-") && headers[k] in ["on", "1", "true"])')
    check('headers.all(k, ["a", "b", "c", "d"].exists(p, k.startsWith(p) || headers[k] == p))')


class Clocks:
    """Clocks that a test moves."""

    def __init__(self) -> None:
        self.now_ns = self.cpu_ns = 1_000_000_000

    def work(self, ns: int) -> None:
        self.now_ns += ns
        self.cpu_ns += ns


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def allowance(clocks: Clocks) -> Allowance:
    return Allowance(lambda: clocks.now_ns, lambda: clocks.cpu_ns)


def evaluate(allowance: Allowance, clocks: Clocks, ns: int, queue_id: str = "q") -> None:
    began_ns = allowance.now_ns()
    if began_ns - allowance.mark_ns > FREE_NS:
        allowance.mark(began_ns)
    clocks.work(ns)
    if allowance.now_ns() - began_ns > FREE_NS:
        allowance.charge(queue_id)


def test_short_evaluations_are_free_however_many(allowance: Allowance, clocks: Clocks) -> None:
    for _ in range(10_000):
        evaluate(allowance, clocks, FREE_NS)


def test_long_evaluations_end_when_the_debt_is_used_up(
    allowance: Allowance, clocks: Clocks
) -> None:
    took_ns, began_ns = 5_000_000, clocks.now_ns

    def evaluate_on() -> None:
        while True:
            evaluate(allowance, clocks, took_ns)

    with pytest.raises(TooSlow, match="more than 5% of the router's time") as slow:
        evaluate_on()

    assert slow.value.queue_id == "q"
    assert DEBT_MAX_NS <= clocks.now_ns - began_ns <= 1.1 * DEBT_MAX_NS


def test_long_evaluations_that_are_rare_go_on_for_ever(
    allowance: Allowance, clocks: Clocks
) -> None:
    took_ns = 20_000_000
    for _ in range(1_000):
        evaluate(allowance, clocks, took_ns)
        clocks.now_ns += int(took_ns / SHARE)


def test_time_off_the_processor_costs_nothing(allowance: Allowance, clocks: Clocks) -> None:
    for _ in range(1_000):
        allowance.mark(clocks.now_ns)
        clocks.now_ns += DEBT_MAX_NS
        allowance.charge("q")


def test_what_one_queue_took_is_not_charged_to_another(
    allowance: Allowance, clocks: Clocks
) -> None:

    def evaluate_both() -> None:
        while True:
            evaluate(allowance, clocks, DEBT_MAX_NS // 10, "slow")
            evaluate(allowance, clocks, FREE_NS // 2, "fast")

    with pytest.raises(TooSlow, match="queue slow"):
        evaluate_both()
    for _ in range(9):
        evaluate(allowance, clocks, DEBT_MAX_NS // 10, "other")


def test_other_expressions_begin_without_debts(allowance: Allowance, clocks: Clocks) -> None:
    for _ in range(10):
        for _ in range(9):
            evaluate(allowance, clocks, DEBT_MAX_NS // 10)
        allowance.forget("q")


def test_a_pause_in_the_middle_of_an_evaluation_is_not_the_expressions_fault(
    allowance: Allowance, clocks: Clocks
) -> None:
    for _ in range(3):
        evaluate(allowance, clocks, 10 * DEBT_MAX_NS)


def test_routing_stops_at_the_queue_whose_expression_is_too_slow() -> None:
    clocks = Clocks()

    def later() -> int:
        clocks.work(10_000_000)
        return clocks.now_ns

    rules = RuleSet(Allowance(later, lambda: clocks.cpu_ns))
    rules.replace("plain", 'headers["kind"] == "a"')
    rules.replace("slow", "size > 5 || headers.exists(k, k == 'kind')")

    def route_on() -> None:
        for number in range(1_000):
            rules.route({"kind": "a", "n": str(number)}, NO_FIELDS, -1, 1)

    with pytest.raises(TooSlow, match="queue slow"):
        route_on()

    rules.remove("slow")
    assert rules.route({"kind": "a"}, NO_FIELDS, -1, 1) == [("plain", 128)]


def test_a_slow_priority_is_too_slow_as_well() -> None:
    clocks = Clocks()

    def later() -> int:
        clocks.work(10_000_000)
        return clocks.now_ns

    rules = RuleSet(Allowance(later, lambda: clocks.cpu_ns))
    rules.replace("q", 'headers["kind"] == "a"', "size % 256")

    def ask_on() -> None:
        for _ in range(1_000):
            rules.priority("q", {}, NO_FIELDS, -1, 1)

    with pytest.raises(TooSlow, match="queue q"):
        ask_on()
