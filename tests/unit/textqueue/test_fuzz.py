"""The short form of `python -m tests.conformance.fuzz_textqueue`."""

import math
from pathlib import Path

import pytest

from tests.conformance.fuzz_textqueue import fuzz
from tests.forms import examples


@pytest.mark.repeated
@pytest.mark.parametrize("seed", range(4))
def test_both_readers_agree_on_mangled_files_and_changes_stay_in_their_bytes(
    seed: int, tmp_path: Path
) -> None:
    assert fuzz(seed, math.inf, examples(500), tmp_path) == examples(500)
