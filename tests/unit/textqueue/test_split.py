"""Several files as one queue."""

from pathlib import Path

import pytest

from slatemq.textqueue import FormatError, SplitQueue, State


def test_writers_append_to_their_own_and_all_is_one_queue(tmp_path: Path) -> None:
    # Given two writers, and a reader that was there before the second
    pattern = tmp_path / "jobs.*.tq"
    reader = SplitQueue(pattern)
    one = SplitQueue(pattern, writer=tmp_path / "jobs.1.tq")
    assert reader.claim() is None
    for text in ("a", "b", "c"):
        one.append(text)
    SplitQueue(pattern, writer=tmp_path / "jobs.2.tq").append("d", {"v": "1"})

    # Then it reads them as one, and claims from each in turn
    assert [entry.text for entry in reader] == ["a", "b", "c", "d"]
    assert list(reader.texts()) == ["a", "b", "c", "d"]
    got = []
    while (claim := reader.claim()) is not None:
        with claim:
            got.append(claim.text)
    assert got == ["a", "d", "b", "c"]
    assert list(reader.texts(State.PROCESSED)) == ["a", "b", "c", "d"]
    assert (tmp_path / "jobs.1.tq").read_bytes() == b"=a\n=b\n=c\n"
    assert (tmp_path / "jobs.2.tq").read_bytes() == b"=d\n\\v=1\n"


def test_without_a_file_of_its_own_no_process_appends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no writer's file"):
        SplitQueue(tmp_path / "*.tq").append("a")


def test_a_file_that_is_gone_or_broken_stops_none_of_the_others(tmp_path: Path) -> None:
    # Given a file that is broken, one that someone takes away, and two sound ones
    broken = tmp_path / "jobs.0.tq"
    broken.write_bytes(b" nothing above\n-z\n")
    (tmp_path / "jobs.1.tq").symlink_to("nowhere")
    for number in (2, 3):
        (tmp_path / f"jobs.{number}.tq").write_bytes(b"-a\n-b\n")
    queue = SplitQueue(tmp_path / "jobs.*.tq")

    # When all is claimed, then what can be had comes first, and then the line to repair
    for text in ("a", "a", "b", "b"):
        claim = queue.claim()
        assert claim is not None
        assert claim.text == text
        claim.done()
    with pytest.raises(FormatError, match=r"jobs\.0\.tq:1:1"):
        queue.claim()

    # And once it is repaired it goes on
    broken.write_bytes(b"-z\n")
    assert [entry.text for entry in queue] == ["z"]
    claim = queue.claim()
    assert claim is not None
    assert claim.text == "z"
