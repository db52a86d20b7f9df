"""Several files as one queue."""

from pathlib import Path

import pytest

from slatemq.textqueue import SplitQueue


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
    got = []
    while (claim := reader.claim()) is not None:
        with claim:
            got.append(claim.text)
    assert got == ["a", "d", "b", "c"]
    assert (tmp_path / "jobs.1.tq").read_bytes() == b"=a\n=b\n=c\n"
    assert (tmp_path / "jobs.2.tq").read_bytes() == b"=d\n\\v=1\n"


def test_without_a_file_of_its_own_nobody_appends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a writer"):
        SplitQueue(tmp_path / "*.tq").append("a")
