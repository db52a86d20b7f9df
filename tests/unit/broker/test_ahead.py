"""More is fetched than is asked for where that pays, and no more where memory is short."""

from __future__ import annotations

from services.broker.desks import AHEAD, AHEAD_BYTES, PAUSE, Ahead
from services.broker.payloads import Held


def held_of(ids: range, payload_bytes: int) -> dict[int, Held]:
    return dict.fromkeys(ids, (b"x" * payload_bytes, b""))


def fetch(ahead: Ahead, first: int, payload_bytes: int = 100) -> int:
    """As a step does that misses the messages from `first` on, of which 100 are asked for."""
    count = max(100, ahead.count(first))
    ids = range(first, first + count)
    ahead.fetched(ids, held_of(ids, payload_bytes))
    return count


def test_small_messages_are_fetched_by_the_thousand_once_their_size_is_known() -> None:
    ahead = Ahead()
    assert [fetch(ahead, 1), fetch(ahead, 101), fetch(ahead, 1101)] == [100, AHEAD, AHEAD]


def test_of_large_messages_a_megabyte_is_fetched() -> None:
    ahead = Ahead()
    fetch(ahead, 1, 10_000)
    assert AHEAD_BYTES // 2 < ahead.count(101) * 10_000 <= AHEAD_BYTES
    fetch(ahead, 1001, AHEAD_BYTES)
    assert ahead.count(5000) == 0


def test_what_was_forgotten_before_its_turn_is_not_fetched_ahead_for_long() -> None:
    ahead = Ahead()
    fetched = [fetch(ahead, first) for first in range(1, 100 * 200, 100)]  # nothing is kept
    assert sum(fetched) < 1.5 * 100 * 200
    assert fetched.count(AHEAD) <= len(fetched) // PAUSE + 1


def test_messages_that_did_not_come_tell_nothing_of_sizes() -> None:
    ahead = Ahead()
    ahead.fetched(range(1, 101), {})
    assert ahead.count(101) == 0
