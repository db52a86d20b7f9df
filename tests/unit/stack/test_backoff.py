from services.stack.process import Backoff


def test_each_death_waits_twice_as_long_up_to_a_bound() -> None:
    backoff = Backoff(first=1, longest=5, healthy=60)

    assert [backoff.after(0) for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_healthy_minute_makes_the_next_death_a_first_one() -> None:
    backoff = Backoff(first=1, longest=5, healthy=60)
    for _ in range(3):
        backoff.after(59.9)

    assert backoff.after(60) == 1
    assert backoff.after(0) == 2
