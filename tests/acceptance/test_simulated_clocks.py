"""By whose clock a simulated world judges: that of the brokers that may have had a queue."""

from __future__ import annotations

from functools import partial

from libs.storage.database.clocks import STEP_HOLD_S, HybridClock
from tests.simulation.broker_clocks import BrokerClocks, Life
from tests.simulation.chance import BEGIN_S
from tests.simulation.judge import Apart
from tests.simulation.places import ANYWHERE, Places, Stay

BEGIN_MS = int(BEGIN_S * 1000)


def test_the_clock_of_a_broker_counts_as_ahead_while_a_message_waits() -> None:
    # Given a broker whose wall clock goes 4 s ahead for a while, which its own clock keeps
    now_s, wrong_s = BEGIN_S, 0.0
    clock = HybridClock(0, lambda: now_s + wrong_s, lambda: now_s - BEGIN_S)
    life = Life(shard=0, clock=clock)
    clocks = BrokerClocks(least_ms=-3000, most_ms=15_000)
    clocks.lives.append(life)

    def pass_by(seconds: float) -> int:
        nonlocal now_s
        now_s += seconds
        clock.now_ms()
        life.look(int(now_s * 1000))
        return int(now_s * 1000)

    before_ms = pass_by(1.0)
    wrong_s = 4.0
    pass_by(1.0)
    pass_by(STEP_HOLD_S)
    after_ms = pass_by(1.0)
    wrong_s = 0.0
    pass_by(1.0)

    # Then what began before saw it step, what began later did not, and other shards are right
    assert clocks.apart([Stay(0)], before_ms) == Apart(0, 4000)
    assert clocks.apart([Stay(0)], after_ms) == Apart(4000, 4000)
    assert clocks.apart(ANYWHERE, before_ms) == Apart(0, 4000)
    assert clocks.apart([Stay(1)], before_ms) == Apart(0, 0)


def clocks_apart(ahead_ms: dict[int, int]) -> BrokerClocks:
    """Of brokers that run from the beginning, each ahead by this."""
    clocks = BrokerClocks(least_ms=-3000, most_ms=15_000)
    for shard, ahead in ahead_ms.items():
        wall_s = BEGIN_S + ahead / 1000
        clock = HybridClock(0, partial(float, wall_s), lambda: 0.0)
        life = Life(shard, clock)
        life.look(BEGIN_MS)
        life.seen_ms = BEGIN_MS + 100_000
        clocks.lives.append(life)
    return clocks


def test_of_a_moved_queue_each_broker_counts_while_it_may_have_it() -> None:
    # Given a queue that moves from a broker to another, and later to a third
    clocks = clocks_apart({0: -3000, 1: 2000, 2: 15_000})
    places = Places()
    places.created("all", [0])

    def apart(since_ms: int) -> Apart:
        return clocks.apart(places.of("all", 0), BEGIN_MS + since_ms)

    assert apart(0) == Apart(-3000, -3000)
    places.moving("all", 0, 1, BEGIN_MS + 1000)
    assert apart(0) == Apart(-3000, 2000)
    assert apart(1500) == Apart(-3000, 2000), "it may not have gone yet"
    places.moved("all", 0, 1, BEGIN_MS + 2000)
    places.moving("all", 0, 2, BEGIN_MS + 3000)
    places.moved("all", 0, 2, BEGIN_MS + 4000)

    # Then what is judged since a time meets the clocks of the brokers from that time on
    assert apart(0) == Apart(-3000, 15_000)
    assert apart(2500) == Apart(2000, 15_000)
    assert apart(4001) == Apart(15_000, 15_000)


def test_a_move_without_a_target_may_pass_any_broker_until_it_is_answered() -> None:
    clocks = clocks_apart({0: 0, 1: 2000, 2: 15_000})
    places = Places()
    places.created("all", [0])
    places.moving("all", 0, None, BEGIN_MS + 1000)
    places.moved("all", 0, 1, BEGIN_MS + 2000)
    assert clocks.apart(places.of("all", 0), BEGIN_MS + 1500) == Apart(0, 15_000)
    assert clocks.apart(places.of("all", 0), BEGIN_MS + 2001) == Apart(2000, 2000)


def test_a_move_to_where_a_queue_is_changes_nothing() -> None:
    clocks = clocks_apart({0: 0, 1: 2000})
    places = Places()
    places.created("all", [0])
    places.moving("all", 0, 0, BEGIN_MS + 1000)
    places.moved("all", 0, 0, BEGIN_MS + 2000)
    assert clocks.apart(places.of("all", 0), BEGIN_MS + 2001) == Apart(0, 0)


def test_each_partition_goes_by_the_clock_of_its_own_broker() -> None:
    clocks = clocks_apart({0: 0, 1: 2000, 2: 15_000})
    places = Places()
    places.created("all", [0, 1])
    places.moving("all", 1, 2, BEGIN_MS + 1000)
    places.moved("all", 1, 2, BEGIN_MS + 2000)
    assert clocks.apart(places.of("all", 0), BEGIN_MS) == Apart(0, 0)
    assert clocks.apart(places.of("all", 1), BEGIN_MS) == Apart(2000, 15_000)
    assert clocks.apart(places.of("all"), BEGIN_MS) == Apart(0, 15_000)


def test_a_queue_whose_place_is_not_known_may_be_anywhere() -> None:
    places = Places()
    assert places.of("late") == ANYWHERE
    places.created("late", [None])
    assert places.of("late", 0) == [Stay(None)]
    places.moving("late", 0, 1, 1000)
    places.moved("late", 0, 1, 2000)
    assert places.of("late", 0) == [Stay(None, 0, 2000), Stay(1, 1000)]
