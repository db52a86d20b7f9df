"""A whole stack on S3 whose store does not let tables be read."""

from pathlib import Path

import pytest

from tests.faults.failing_reads import run_failing_reads
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.s3]


@pytest.mark.parametrize(("messages", "seconds"), [(600, 0.0), proof(6_000, 60.0)])
def test_failing_reads_of_tables_end_no_owner_stop_no_publish_and_cost_no_attempt(
    tmp_path: Path, messages: int, seconds: float
) -> None:
    run, found = run_failing_reads(tmp_path, messages, seconds)

    assert (run.faults(), found) == ([], [])
    assert {note.attempt for notes in run.notes.values() for note in notes} == {1}
