"""How much a stream may have on its way, by how soon it came."""

from __future__ import annotations

from slatemq._consume.credit import FIRST_BYTES, TRANSIT_S, CreditWindow

LIMIT_BYTES = 8 * FIRST_BYTES


def test_it_doubles_each_time_that_all_that_was_granted_comes_soon() -> None:
    window = CreditWindow(LIMIT_BYTES)
    for size_bytes in (FIRST_BYTES, 2 * FIRST_BYTES, 4 * FIRST_BYTES):
        assert window.size_bytes == size_bytes
        window.granted(size_bytes, 10.0)
        window.received(size_bytes - 1, 10.0)
        assert window.size_bytes == size_bytes
        window.received(1, 10.0 + TRANSIT_S)
    assert window.size_bytes == LIMIT_BYTES
    window.granted(LIMIT_BYTES, 20.0)
    window.received(LIMIT_BYTES, 20.0)
    assert window.size_bytes == LIMIT_BYTES


def test_it_is_no_larger_at_first_than_it_may_ever_be() -> None:
    assert CreditWindow(100).size_bytes == 100


def test_it_stays_where_what_was_granted_comes_late() -> None:
    window = CreditWindow(LIMIT_BYTES)
    now_s = 0.0
    for _ in range(5):
        window.granted(FIRST_BYTES, now_s)
        now_s += 2 * TRANSIT_S
        window.received(FIRST_BYTES, now_s)
    assert window.size_bytes == FIRST_BYTES


def test_what_was_on_its_way_before_does_not_count_as_soon() -> None:
    # Given a link on which a part of what was granted has come late
    window = CreditWindow(LIMIT_BYTES)
    window.granted(FIRST_BYTES, 0.0)
    window.received(FIRST_BYTES // 2, 10.0)
    # When credit for that part is granted again, and the other part comes at once
    window.granted(FIRST_BYTES // 2, 10.0)
    window.received(FIRST_BYTES // 2, 10.0)
    # Then nothing is known of the new credit; until it has come, too
    window.granted(FIRST_BYTES // 2, 10.0)
    window.received(FIRST_BYTES // 2, 10.0)
    assert window.size_bytes == FIRST_BYTES
    window.received(FIRST_BYTES // 2, 10.0)
    assert window.size_bytes == 2 * FIRST_BYTES
