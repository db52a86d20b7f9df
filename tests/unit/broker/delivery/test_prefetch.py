"""More is fetched than is asked for where that pays, and no more where memory is short."""

from __future__ import annotations

import pytest

from services.broker.delivery import message_cache as lines
from services.broker.delivery.message_cache import (
    PAUSE,
    PREFETCH_BYTES,
    PREFETCH_MAX,
    FetchResult,
    PrefetchWindow,
    PrefetchWindows,
)


def fetch(window: PrefetchWindow, first: int, payload_bytes: int = 100) -> int:
    """As a step does that misses the messages from `first` on, of which 100 are asked for."""
    count = max(100, window.count(first))
    ids = range(first, first + count)
    window.fetched(ids, 100, FetchResult(count=count, size_bytes=count * payload_bytes))
    return count


def test_small_messages_are_fetched_by_the_thousand_once_their_size_is_known() -> None:
    window = PrefetchWindow()
    assert [fetch(window, 1), fetch(window, 101), fetch(window, 1101)] == [
        100,
        PREFETCH_MAX,
        PREFETCH_MAX,
    ]


def test_of_large_messages_a_megabyte_is_fetched() -> None:
    window = PrefetchWindow()
    fetch(window, 1, 10_000)
    assert PREFETCH_BYTES // 2 < window.count(101) * 10_000 <= PREFETCH_BYTES
    fetch(window, 1001, PREFETCH_BYTES)
    assert window.count(5000) == 0


def test_what_was_forgotten_before_its_turn_is_not_fetched_ahead_for_long() -> None:
    window = PrefetchWindow()
    fetched = [fetch(window, first) for first in range(1, 100 * 200, 100)]  # nothing is kept
    assert sum(fetched) < 1.5 * 100 * 200
    assert fetched.count(PREFETCH_MAX) <= len(fetched) // PAUSE + 1


def test_messages_that_did_not_come_show_nothing_of_sizes() -> None:
    window = PrefetchWindow()
    window.fetched(range(1, 101), 100, FetchResult())
    assert window.count(101) == 0


def test_messages_of_several_ingests_and_those_that_come_again_are_fetched_ahead() -> None:
    window = PrefetchWindow()
    fetch(window, 1 << 50)
    assert fetch(window, 1) == PREFETCH_MAX
    assert fetch(window, 1 << 51) == PREFETCH_MAX
    assert fetch(window, 50) == PREFETCH_MAX


def test_as_many_queues_as_are_consumed_in_turn_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "WINDOWS_MAX", 3)
    windows = PrefetchWindows()
    queues = "abcd"
    first = [windows.of(queue) for queue in queues]
    assert [windows.of(queue) is first[at] for at, queue in enumerate(queues[1:], 1)] == [True] * 3
    assert windows.of(queues[0]) is not first[0]
