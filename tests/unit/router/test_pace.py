"""How large pieces are: smaller while larger ones are too much, and as large as before later."""

from __future__ import annotations

from services.router.pieces import GROW_EVERY, Pace, Piece, PieceLimits

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
    assert LEAST.doubled(MOST) == PieceLimits(messages_max=2, thin_max=2, matches_max=2)


def test_a_piece_leaves_less_room_in_the_call_that_has_it() -> None:
    piece = Piece(0, 1, 0)
    piece.messages_count, piece.matches_count = 3, 2

    room = MOST.less(piece)
    assert (room.messages_max, room.thin_max, room.matches_max) == (5, 29, 2)
    assert not room.are_used_up
    assert room.less(piece).are_used_up  # of matches
    piece.matches_count = 0
    assert MOST.less(piece).less(piece).less(piece).are_used_up  # of messages


def test_a_shard_that_must_drain_gets_pieces_of_a_step() -> None:
    large = PieceLimits(messages_max=800, thin_max=900, matches_max=240, step_max=100)
    assert large.small() == large._replace(messages_max=100, thin_max=100, matches_max=15)
    little = PieceLimits(messages_max=8, thin_max=9, matches_max=4, step_max=100)
    assert little.small() == little._replace(matches_max=1)
