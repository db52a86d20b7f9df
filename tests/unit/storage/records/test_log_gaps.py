"""Messages between two places of a log whose IDs jump."""

from hypothesis import given
from hypothesis import strategies as st

from libs.storage.records.log_bounds import LogGap, LogIds

lives = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=6)


@given(lives, st.integers(1, 30), st.integers(0, 150), st.integers(0, 150))
def test_ids_that_a_restart_skipped_are_not_counted(
    lives: list[tuple[int, int]], first_id: int, after: int, last: int
) -> None:
    # Given lives of an ingest that each skip some IDs, then store messages
    ids: list[int] = []
    gaps: list[LogGap] = []
    next_id = end = first_id
    for skipped, count in lives:
        next_id += skipped
        if count and next_id > end:
            gaps.append(LogGap(end - 1, next_id))
        ids += range(next_id, next_id + count)
        next_id += count
        end = next_id if count else end

    # Then only messages count, up to the log's end
    places = (min(after, end - 1), min(last, end - 1))
    expected = sum(places[0] < one <= places[1] for one in ids)
    assert LogIds(first_id, gaps).count(*places) == expected
