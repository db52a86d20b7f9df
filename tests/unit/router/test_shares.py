"""Filters that are each within bounds, and hold up a log together: the costliest are left out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from libs.filters import Allowance, RuleSet
from libs.filters.allowance import CHARGE_MAX_NS
from libs.storage.records.log_runs import LogRun
from libs.storage.records.metadata import NO_DELAY
from services.router.entries import LogEntry
from services.router.routing import BrokerRules, Columns, QueueRule
from services.router.shares import (
    BEHIND_MS,
    MESSAGE_NS,
    SHARE,
    STEP,
    WINDOW_NS,
    WINDOWS,
    FilterShare,
)

NO_FIELDS = (0, 0, 0, 0, 0)

ROUTING_NS = 50_000
"""What a message takes beside filters."""

BEHIND = {0: 10 * BEHIND_MS}


def left_out(
    costs_ns: Mapping[str, int],
    per_s: float = 1_000,
    others_ns: int = 0,
    seconds: int = 3_600,
    behind_ms: int = 0,
) -> list[str]:
    """Which queues go, one after the other, with filters that cost so much for each message.

    Messages come `per_s`, and other work takes `others_ns` for each. At the beginning the oldest
    one has waited for `behind_ms`.
    """
    costs_ns, gone = dict(costs_ns), list[str]()
    wait_ms, share = float(behind_ms), FilterShare({})
    for _ in range(seconds * 1_000_000_000 // WINDOW_NS):
        share = FilterShare({7: int(wait_ms)}, share)
        filters_ns = sum(costs_ns.values())
        own_ns = filters_ns + ROUTING_NS
        at_most = WINDOW_NS // own_ns  # As many as there is time for, without the other work.
        judged = min(at_most, int(per_s * WINDOW_NS / 1e9)) if not wait_ms else at_most
        wall_s = max(judged * (own_ns + others_ns), WINDOW_NS) / 1e9
        share.add_judging(judged, WINDOW_NS, WINDOW_NS)
        wait_ms = max(0.0, wait_ms + (wall_s - judged / per_s) * 1_000)
        assert share.is_over
        spent_ns = {queue_id: judged * cost for queue_id, cost in costs_ns.items()}
        for slow in share.too_slow(spent_ns, {7: int(wait_ms)} if wait_ms else {}):
            gone.append(slow.queue_id)
            del costs_ns[slow.queue_id]
    return gone


def twenty(cost_ns: int) -> dict[str, int]:
    return {f"q{n:02}": cost_ns for n in range(20)}


def test_of_many_filters_within_bounds_so_many_go_that_the_log_catches_up() -> None:
    fine = {"fine": 80_000}
    gone = left_out(twenty(900_000) | fine, per_s=300)
    assert "fine" not in gone
    assert 10 <= len(gone) < 20
    # The rest takes a millisecond for each message at most, or leaves time for all that come.
    left_ns = 900_000 * (20 - len(gone)) + fine["fine"]
    assert left_ns <= MESSAGE_NS or (left_ns + ROUTING_NS) * 300 <= 1e9


def test_two_hundred_filters_that_stop_all_routing_go_within_minutes() -> None:
    costs_ns = {f"q{n:03}": 900_000 for n in range(200)} | {"fine": 80_000}
    gone = left_out(costs_ns, per_s=300, seconds=300)
    assert "fine" not in gone
    assert len(gone) > 190


def test_the_costliest_go_first() -> None:
    costs_ns = {f"q{n}": 100_000 * n for n in range(1, 11)}
    gone = left_out(costs_ns, per_s=400)
    assert gone == [f"q{n}" for n in range(10, 10 - len(gone), -1)]
    assert gone


def test_a_log_that_catches_up_costs_no_queue_its_place() -> None:
    assert left_out(twenty(100_000), per_s=400, behind_ms=600_000) == []


def test_more_messages_than_a_router_can_route_are_no_fault_of_cheap_filters() -> None:
    assert left_out(twenty(MESSAGE_NS // 25), per_s=100_000) == []


def test_filters_that_leave_half_of_the_time_unused_stay() -> None:
    share = FilterShare({0: 0})
    share.add_pause(int(WINDOW_NS * (1 - SHARE)))
    judging_ns = int(WINDOW_NS * SHARE)
    share.add_judging(10, judging_ns, judging_ns)
    spent_ns = {"q": judging_ns}
    assert share.too_slow(spent_ns, BEHIND) == []
    assert share.too_slow({"q": spent_ns["q"] + 1}, BEHIND)


@pytest.mark.parametrize(("processor_part", "stay"), [(0.25, True), (1, False)])
def test_filters_that_seldom_have_the_processor_stay(processor_part: float, stay: bool) -> None:
    messages_count = int(WINDOW_NS / 1.2 / MESSAGE_NS)
    share = FilterShare({0: 0})
    share.add_judging(messages_count, WINDOW_NS, int(WINDOW_NS * processor_part))
    assert bool(share.too_slow({"q": WINDOW_NS}, BEHIND)) is not stay


def test_time_that_replays_take_does_not_hide_what_filters_take() -> None:
    gone = left_out(twenty(900_000), per_s=300, others_ns=100_000_000)
    assert len(gone) >= 10


@pytest.mark.parametrize(
    ("waits_ms", "is_behind"),
    [
        ([0, BEHIND_MS + 1], True),
        ([0, BEHIND_MS], False),
        ([0, 60_000, 60_000], True),
        ([0, 60_000, 59_999], False),
        ([0, None, 60_000], False),
        ([0, None, 60_000, 60_000], True),
    ],
    ids=str,
)
def test_a_log_is_behind_that_waits_for_long_and_no_less_than_before(
    waits_ms: list[int | None], is_behind: bool
) -> None:
    assert is_behind_at_last(waits_ms) is is_behind


def test_a_backlog_from_before_a_router_started_costs_no_queue_its_place() -> None:
    # Not at the end of a window that began without it, nor if it becomes no less for a while
    assert not is_behind_at_last([None, 590_000])
    assert not is_behind_at_last([None, 590_000, 590_000 + BEHIND_MS])
    # But once more and more of it waits
    assert is_behind_at_last([None, 590_000, 590_001 + BEHIND_MS])


@pytest.mark.parametrize("skew_ms", [-60_000, 60_000])
def test_a_clock_that_differs_from_that_of_ingest_makes_no_log_behind_nor_hides_one(
    skew_ms: int,
) -> None:
    assert not is_behind_at_last([skew_ms + 20, skew_ms + 10, skew_ms + 500])
    assert is_behind_at_last([skew_ms, skew_ms + 5_000, skew_ms + 9_000])


def test_a_clock_that_was_set_makes_no_log_behind_for_ever_nor_hides_one() -> None:
    set_long_ago = [20, 20, *[3_020] * 70]
    assert not is_behind_at_last([*set_long_ago, 3_025])
    assert is_behind_at_last([*set_long_ago, 3_020 + BEHIND_MS, 3_021 + BEHIND_MS])


def test_windows_that_ended_early_let_no_log_that_is_behind_pass_for_one_that_was_always_so() -> (
    None
):
    assert is_behind_at_last([20, *[40_000] * 70, 40_000], window_ns=0)
    assert not is_behind_at_last([20, *[40_000] * 70, 40_000])


@pytest.mark.parametrize(("windows_count", "is_behind"), [(WINDOWS, True), (2 * WINDOWS, False)])
def test_the_least_wait_of_five_minutes_counts_for_as_long_again(
    windows_count: int, is_behind: bool
) -> None:
    assert is_behind_at_last([20, *[40_000] * windows_count, 40_000]) is is_behind


def is_behind_at_last(waits_ms: list[int | None], window_ns: int = WINDOW_NS) -> bool:
    """Whether a log counts as behind that has waited so long at each window's begin, and end.

    All but the last window last for `window_ns`.
    """
    share, at = FilterShare({}), [{} if one is None else {3: one} for one in waits_ms]
    for begin in at[:-1]:
        share.add_judging(1, window_ns, window_ns)
        share = FilterShare(begin, share)
    share.add_judging(1, WINDOW_NS, WINDOW_NS)
    return bool(share.too_slow({"q": WINDOW_NS}, at[-1]))


def test_no_more_go_at_once_than_make_up_a_step() -> None:
    share = FilterShare({0: 0})
    share.add_judging(1, WINDOW_NS, WINDOW_NS)
    spent_ns = {f"q{n:03}": WINDOW_NS // 100 for n in range(100)}
    assert len(share.too_slow(spent_ns, BEHIND)) == STEP * 100


def test_the_reason_names_what_filters_took_together_and_the_part_of_this_one() -> None:
    share = FilterShare({0: 0})
    share.add_judging(1_000, WINDOW_NS, WINDOW_NS)
    (slow,) = share.too_slow({"a": WINDOW_NS * 3 // 5, "b": WINDOW_NS // 5}, BEHIND)
    assert slow.queue_id == "a"
    assert "8.0 ms for each message, 80% of the router's time" in slow.reason
    assert "75% of that was this queue's" in slow.reason


class Clock:
    """Goes on by as much as a test says with each look at it."""

    def __init__(self, step_ns: int) -> None:
        self.now_ns, self.step_ns = 0, step_ns

    def look(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


def test_short_evaluations_count_for_their_queues_and_plain_filters_for_none() -> None:
    clock = Clock(1_000)
    rules = RuleSet(Allowance(clock.look, lambda: clock.now_ns))
    rules.replace("plain", 'headers["kind"] == "a"')
    rules.replace("some", 'headers["kind"] == "a" && size > 5')
    rules.replace("all", "size > 5", "size % 256")

    for number in range(10):
        rules.route({"kind": "a" if number < 3 else "b", "n": str(number)}, NO_FIELDS, -1, 9)
    rules.priority("all", {}, NO_FIELDS, -1, 9)

    assert rules.take_spent() == {"some": 3_000, "all": 11_000}
    assert rules.take_spent() == {}


def test_an_evaluation_that_was_interrupted_counts_for_no_more_than_one_can_take() -> None:
    allowance = Allowance(lambda: 0, lambda: 0)
    allowance.spend("q", 100 * CHARGE_MAX_NS)
    assert allowance.take_spent() == {"q": CHARGE_MAX_NS}


def test_other_expressions_begin_with_nothing_spent() -> None:
    allowance = Allowance(lambda: 0, lambda: 0)
    allowance.spend("q", 5)
    allowance.forget("q")
    assert allowance.take_spent() == {}


def test_what_catches_up_counts_with_the_rules_that_it_is_judged_by() -> None:
    clock = Clock(1_000)
    rules = BrokerRules(Allowance(clock.look, lambda: clock.now_ns))
    rules.change([QueueRule("a", "size > 5"), QueueRule("b", "size > 6")])
    runs: list[LogRun] = [((1, 0, 0, 0, 0), {}, NO_DELAY, (9,), "")]

    rules.only(["a"]).judge(LogEntry(runs, 10), Columns())

    assert rules.take_spent() == {"a": 1_000}
