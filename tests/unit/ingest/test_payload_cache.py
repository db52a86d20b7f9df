from hypothesis import given
from hypothesis import strategies as st

from services.ingest.batches import Columns
from services.ingest.read.payload_cache import CachedRun, PayloadCache


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=60), st.integers(0, 400))
def test_the_newest_payloads_are_kept_within_the_bound(
    runs: list[tuple[int, int]], bytes_max: int
) -> None:
    cache = PayloadCache(bytes_max)
    kept: list[dict[int, bytes]] = []
    next_id = 1
    for count, gap in runs:
        run = {next_id + n: b"%d" % (next_id + n) for n in range(count)}
        cache.add(CachedRun(next_id, 0, list(run.values()), Columns()), size_bytes=20 * count)
        next_id += count + gap
        if 20 * count <= bytes_max:
            kept.append(run)
        while 20 * sum(map(len, kept)) > bytes_max:
            kept.pop(0)
        assert cache.size_bytes == 20 * sum(map(len, kept))

    expected = {message_id: payload for run in kept for message_id, payload in run.items()}
    found = {message_id: cache.get(message_id) for message_id in range(next_id + 5)}
    assert {i: payload for i, payload in found.items() if payload is not None} == expected
