"""Rates of arrivals, from samples of totals that begin again with each start of a broker."""

from __future__ import annotations

import pytest

from services.scaler.rates import RATE_S, SAMPLES_KEPT_S, Rates, Sample


def rates_of(*looks: tuple[float, int], created_at_ms: int = 1) -> Rates:
    rates = Rates()
    for at_s, entered_count in looks:
        rates.add("orders", Sample(at_s, created_at_ms, entered_count))
    return rates


def test_one_look_is_no_rate_nor_are_two_within_a_second() -> None:
    assert rates_of((10, 500)).rate("orders") is None
    assert rates_of((10, 500), (10.5, 600)).rate("orders") is None


def test_two_looks_are_the_rate_between_them() -> None:
    assert rates_of((10, 500), (12, 600)).rate("orders") == 50


def test_of_many_looks_the_last_minute_counts() -> None:
    idle = [(float(second), 0) for second in range(600)]
    busy = [(600.0 + second, 10 * second) for second in range(1, 61)]

    assert rates_of(*idle, *busy).rate("orders") == pytest.approx(10, rel=0.02)
    gone = [(660.0 + second, 600) for second in range(1, 62)]
    assert rates_of(*idle, *busy, *gone).rate("orders") == 0


def test_looks_that_are_further_apart_than_a_minute_are_a_rate_too() -> None:
    assert rates_of((0, 0), (300, 3_000)).rate("orders") == 10


def test_a_look_whose_answer_comes_late_is_no_restart() -> None:
    rates = rates_of((0, 0), (10, 100), (20, 200), (15, 150))

    assert rates.rate("orders") == 10


def test_few_looks_are_kept_however_many_there_were() -> None:
    rates = rates_of(*((float(second), second) for second in range(10_000)))

    assert len(rates._samples["orders"]) <= RATE_S + 2


def test_a_restarted_broker_gives_no_rate_until_there_are_two_looks_again() -> None:
    restarted = rates_of((0, 5_000), (10, 20))

    assert restarted.rate("orders") is None
    restarted.add("orders", Sample(12, 1, 40))
    assert restarted.rate("orders") == 10


def test_a_queue_that_was_created_again_is_another_one() -> None:
    rates = rates_of((0, 100))
    rates.add("orders", Sample(10, 2, 5_000))

    assert rates.rate("orders") is None


def test_queues_that_were_not_looked_at_for_long_are_forgotten() -> None:
    rates = Rates()
    for number in range(100):
        rates.add(f"old-{number}", Sample(0, 1, 0))
    rates.add("new", Sample(SAMPLES_KEPT_S + 1, 1, 0))

    assert len(rates) == 1
