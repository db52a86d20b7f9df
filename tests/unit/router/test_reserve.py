"""Which router is the first one of a log, and when another one steps in."""

from __future__ import annotations

from collections import Counter

import pytest

from services.router.reserve import LOOK_S, LOOKS, WAITS, Reserve, is_first


class Clock:
    """Goes on when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def look(self) -> float:
        return self.now_s


def test_each_log_has_one_first_router_and_each_router_about_as_many_logs() -> None:
    routers, logs = range(4), range(1_000)

    firsts = Counter(router for log in logs for router in routers if is_first(router, routers, log))

    assert sum(firsts.values()) == len(logs)
    assert all(200 < firsts[router] < 300 for router in routers)


def test_a_router_that_comes_or_goes_changes_the_first_router_of_its_own_logs_alone() -> None:
    before, after = range(4), range(3)

    for log in range(1_000):
        if not is_first(3, before, log):
            firsts = [
                [one for one in after if is_first(one, routers, log)] for routers in (before, after)
            ]
            assert firsts[0] == firsts[1]


def test_a_router_that_the_topology_does_not_have_leaves_no_log_to_others() -> None:
    assert all(is_first(7, routers, 0) for routers in ((), (1, 2, 3)))


def test_a_router_steps_in_where_a_log_stands_still_and_back_where_another_gets_on() -> None:
    reserve = Reserve(looks_after_loss=20)

    # Given a log that moves now and then
    for _ in range(3):
        assert not any(reserve.stands(0) for _ in range(LOOKS - 1))
        reserve.moved(0)
    assert reserve.has(0)

    # When it stands still, then this router steps in
    assert [reserve.stands(0) for _ in range(LOOKS)] == [*[False] * (LOOKS - 1), True]
    assert not reserve.has(0)
    assert reserve.has(1)

    # And steps back once another one gets on
    reserve.moved(0)
    assert reserve.has(0)


def test_a_log_that_stood_still_when_the_broker_was_lost_is_left_alone_for_longer() -> None:
    reserve = Reserve(looks_after_loss=20)
    waiting = [False] * (20 + LOOKS - 1)

    # Given a log that has stood still for one look, and another one for none
    reserve.stands(0)
    # When the broker is lost, then the first one has to stand still for longer
    reserve.link_lost()
    assert [reserve.stands(0) for _ in waiting] == waiting
    assert [reserve.stands(1) for _ in range(LOOKS)] == [*[False] * (LOOKS - 1), True]

    # And a move makes it like any other, for which a loss counts
    reserve.moved(0)
    reserve.stands(0)
    reserve.link_lost()
    assert [reserve.stands(0) for _ in waiting] == waiting
    reserve.moved(0)
    assert [reserve.stands(0) for _ in range(LOOKS)] == [*[False] * (LOOKS - 1), True]


def test_a_broker_that_was_lost_counts_until_a_log_moves() -> None:
    # Given a router that has just begun, and may not have seen a loss
    reserve = Reserve(looks_after_loss=20)
    assert reserve.is_after_loss(0)
    reserve.moved(1)
    assert [reserve.is_after_loss(log) for log in (0, 1)] == [True, False]

    # When the broker is lost, and a log moves, then the loss counts for the other
    reserve.link_lost()
    assert reserve.is_after_loss(1)
    reserve.moved(1)
    assert [reserve.is_after_loss(log) for log in (0, 1)] == [True, False]

    reserve.link_lost()
    assert reserve.is_after_loss(1)


@pytest.mark.parametrize("looks_between", [1, 10, 19, 22])
def test_a_router_steps_in_after_some_waits_although_the_broker_is_lost_again_and_again(
    looks_between: int,
) -> None:
    clock = Clock()
    reserve = Reserve(20, clock.look)

    # Given a log without a first router, and a broker that is lost more often than others wait
    looks_count = 1
    assert not reserve.stands(0)
    while reserve.has(0) and looks_count < 1_000:
        if (looks_count - 1) % looks_between == 0:
            reserve.link_lost()
        looks_count += 1
        clock.now_s += LOOK_S
        reserve.stands(0)

    # Then losses prolong its wait, and not for ever
    assert WAITS * 20 < looks_count <= 1 + (WAITS + 1) * 20 + LOOKS


def test_time_without_looks_counts_as_waited_for_the_first_loss() -> None:
    clock = Clock()
    reserve = Reserve(20, clock.look)
    assert not reserve.stands(0)
    reserve.link_lost()

    # When the broker is down for all of the time in which losses prolong a wait
    clock.now_s += WAITS * 20 * LOOK_S
    waiting = [reserve.stands(0) for _ in range(20)]
    reserve.link_lost()

    # Then another loss does not
    waiting += [reserve.stands(0) for _ in range(LOOKS)]
    assert waiting == [*[False] * (20 + LOOKS - 1), True]


def test_a_log_that_moved_while_the_broker_was_lost_is_like_any_other_again() -> None:
    reserve = Reserve(looks_after_loss=20)
    reserve.moved(0)
    assert not reserve.stands(0)
    reserve.link_lost()

    reserve.moved_unseen(0)

    assert [reserve.stands(0) for _ in range(LOOKS)] == [*[False] * (LOOKS - 1), True]
    assert reserve.is_after_loss(0)  # It may be over what came behind.


def test_a_router_that_steps_back_from_a_log_steps_in_again_later() -> None:
    reserve = Reserve(looks_after_loss=20)
    assert [reserve.stands(0) for _ in range(LOOKS)][-1]

    reserve.step_back(0)
    reserve.link_lost()

    assert reserve.has(0)
    steps = [reserve.stands(0) for _ in range(20 + LOOKS)]
    assert steps == [*[False] * (20 + LOOKS - 1), True]


def test_a_log_that_was_stepped_back_from_stands_still_for_all_looks_again() -> None:
    reserve = Reserve(looks_after_loss=20)
    assert [reserve.stands(0) for _ in range(LOOKS)][-1]

    reserve.step_back(0)

    assert reserve.has(0)
    assert [reserve.stands(0) for _ in range(LOOKS)] == [*[False] * (LOOKS - 1), True]


@pytest.mark.parametrize("ends_by", ["a move", "stepping in and back"])
def test_a_loss_counts_as_the_first_one_after_the_wait_for_another_has_ended(ends_by: str) -> None:
    clock = Clock()
    reserve = Reserve(20, clock.look)

    # Given a loss while the log stood still, of which the wait has ended
    reserve.stands(0)
    reserve.link_lost()
    if ends_by == "a move":
        reserve.moved(0)
    else:
        while not reserve.stands(0):
            pass
        reserve.step_back(0)

    # When the broker is lost again, long after
    clock.now_s += 100 * WAITS * 20 * LOOK_S
    reserve.stands(0)
    reserve.link_lost()

    # Then the log is left alone for as long as after the first loss
    waiting = [False] * (20 + LOOKS - 1)
    assert [reserve.stands(0) for _ in waiting] == waiting
    assert reserve.stands(0)
