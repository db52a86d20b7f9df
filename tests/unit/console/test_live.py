"""What the console remembers of the instance while someone looks."""

from __future__ import annotations

from services.console.live import SAMPLES_KEPT, History, event, together
from slatemq import Counts
from slatemq._admin.rates import UNKNOWN, QueueRates


def test_charts_have_the_rates_of_each_sample_that_has_some() -> None:
    history = History()
    history.add(Counts(available_count=10), UNKNOWN)
    history.add(Counts(available_count=30, in_flight_count=4), QueueRates(22.0, 5.0, 10.0, 0.0))
    assert history.rates.in_per_s == 22.0

    # The broker was restarted: its totals begin again.
    history.add(Counts(available_count=30), UNKNOWN)

    assert list(history.depth) == [10, 34, 30]
    assert (list(history.arrived), list(history.finished)) == ([22.0], [10.0])
    assert history.rates.in_per_s is None


def test_a_history_is_bounded() -> None:
    history = History()
    for second in range(3 * SAMPLES_KEPT):
        history.add(Counts(available_count=second), QueueRates(1.0, 1.0, 1.0, 1.0))

    assert len(history.depth) == len(history.arrived) == SAMPLES_KEPT
    assert history.depth[-1] == 3 * SAMPLES_KEPT - 1


def test_all_queues_together_have_the_oldest_age() -> None:
    counts = together(
        [Counts(available_count=1, oldest_claimable_age_ms=5), Counts(failed_count=2),
         Counts(delayed_count=3, oldest_claimable_age_ms=9)]
    )  # fmt: skip

    assert (counts.available_count, counts.delayed_count, counts.failed_count) == (1, 3, 2)
    assert counts.oldest_claimable_age_ms == 9


def test_an_event_has_each_line_of_its_text() -> None:
    assert event("update", "a\nb\r\nc") == b"event: update\ndata: a\ndata: b\ndata: c\n\n"
