"""What the benchmarks count on: changed payloads are noticed, and so are lost messages."""

import zlib
from pathlib import Path

import pytest

from benchmarks.suite import payloads, tally


@pytest.mark.parametrize("kind", [payloads.EVENTS, payloads.RANDOM])
def test_a_payload_shows_its_number_and_whether_it_is_whole(kind: str) -> None:
    # Given
    payload = payloads.make(7, 100, kind)

    # When, then
    assert payloads.read(payload, 100, kind)[0] == 7
    for at in (0, 20, 24, 99):
        changed = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        with pytest.raises(ValueError, match="came back"):
            payloads.read(changed, 100, kind)
    with pytest.raises(ValueError, match="100 bytes came back with 99"):
        payloads.read(payload[:-1], 100, kind)
    other = payload[: payloads.BYTES_MIN] + payloads.make(8, 100, kind)[payloads.BYTES_MIN :]
    with pytest.raises(ValueError, match="other content"):
        payloads.read(other, 100, kind)


def test_contents_are_as_alike_as_what_programs_send() -> None:
    # Given what is stored together
    events = [payloads.make(number, 1024) for number in range(16)]
    unlike = [payloads.make(number, 1024, payloads.RANDOM) for number in range(16)]

    # When, then
    assert {len(one) for one in [*events, *unlike]} == {1024}
    assert len({one[payloads.BYTES_MIN :] for one in events}) == 16
    assert 2 < 16 * 1024 / len(zlib.compress(b"".join(events), 1)) < 5
    assert len(zlib.compress(b"".join(unlike))) > 16 * 1000


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
