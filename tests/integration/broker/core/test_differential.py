"""A real broker and plain queues are told the same random history, with restarts, and agree.

`make proofs` has some of a thousand commands, `make test` one of three hundred; the long form is
`python -m tests.faults histories --commands 100000`.
"""

from pathlib import Path

import pytest

from tests.forms import proof
from tests.integration.broker.core.histories_run import run_history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "commands"), [(0, 300), proof(0, 1_000), proof(1, 1_000), proof(2, 1_000)]
)
async def test_a_random_history_leaves_the_lists_that_it_should(
    tmp_path: Path, seed: int, commands: int
) -> None:
    # Real commits and reads, and a restart after each hundred commands
    done = await run_history(tmp_path, seed, commands, restarts=commands // 100)
    assert done == commands
