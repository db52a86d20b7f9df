"""How large pieces are: smaller while larger ones are too much, and as large as before later."""

from __future__ import annotations

from services.router.pieces import GROW_EVERY, Pace, PieceLimits

MOST = PieceLimits(messages_max=8, thin_max=32, matches_max=4)
LEAST = PieceLimits(messages_max=1, thin_max=1, matches_max=1)


def test_pieces_become_half_as_large_each_time_down_to_a_single_message() -> None:
    pace, seen = Pace(MOST), [MOST.messages_max]
    while pace.was_too_much():
        seen.append(pace.limits.messages_max)
    assert seen == [8, 4, 2, 1, 1, 1]  # The last two halve `thin_max` alone.
    assert pace.limits == LEAST
    assert not pace.was_too_much()
    assert pace.limits == LEAST


def test_answers_make_them_as_large_as_before_and_no_larger() -> None:
    pace = Pace(MOST)
    while pace.was_too_much():
        pass
    seen = []
    for _ in range(6 * GROW_EVERY):
        pace.was_answered()
        seen.append(pace.limits.messages_max)
    assert seen[GROW_EVERY - 2 : GROW_EVERY] == [1, 2]
    assert seen == sorted(seen)
    assert pace.limits == MOST
