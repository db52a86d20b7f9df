"""A real broker and plain queues are told the same random history, with restarts, and agree.

`make proofs` has some of a thousand commands, of which `make test` has one; the long form is
`python -m tests.faults histories --commands 100000`.
"""

from pathlib import Path

import pytest

from tests.forms import seeds
from tests.integration.broker.core.histories_run import run_history


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3))
async def test_a_random_history_leaves_the_lists_that_it_should(tmp_path: Path, seed: int) -> None:
    # Real commits and reads, a thousand commands and about ten restarts each
    done = await run_history(tmp_path, seed, commands=1_000, restarts=10)
    assert done == 1_000
