"""What the benchmarks count on: changed payloads are noticed, and so are lost messages."""

from pathlib import Path

import pytest

from benchmarks.suite import payloads, tally


def test_a_payload_tells_its_number_and_whether_it_is_whole() -> None:
    # Given
    payload = payloads.make(7, 100)

    # When, then
    assert payloads.read(payload, 100)[0] == 7
    for at in (0, 20, 99):
        changed = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        with pytest.raises(ValueError, match="came back"):
            payloads.read(changed, 100)
    with pytest.raises(ValueError, match="100 bytes came back with 99"):
        payloads.read(payload[:-1], 100)


def test_consumers_count_together_what_came_and_what_was_acked(tmp_path: Path) -> None:
    # Given two consumers of ten messages
    path = tmp_path / "tally"
    tally.make(path, workers=2, count=10)
    first, second = (tally.Tally(path, 2, worker) for worker in range(2))

    # When one message is lost, and another comes to both
    first.acked(first.see(range(5)))
    second.acked(second.see([4, *range(6, 10)]))

    # Then
    assert first.total() == second.total() == 9
    assert tally.seen(path, 2) == 9
    assert second.repeated == 1
