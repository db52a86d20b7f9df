"""Completing a message and pushing the next happen together, once, also under kills."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.chains import Chains
from tests.acceptance.local_stack import LocalStack
from tests.acceptance.mishaps import SERVICES, kill_along
from tests.acceptance.stubs import Stubs
from tests.forms import proof

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,  # What an unanswered claim holds comes back only after its lease.
]

MESSAGES = 500
"""For each round of kills."""

COMMIT_INTERVAL_MS = 60
"""What is durable in one service waits so long for the next: most kills strike between the two."""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    monkeypatch.setenv("SLATEMQ_COMMIT_INTERVAL_MS", str(COMMIT_INTERVAL_MS))
    with LocalStack(tmp_path, ready=True) as running:
        yield running


@pytest.mark.parametrize("rounds", [1, proof(3)])
async def test_complete_and_push_is_exactly_once_while_every_service_is_killed(
    stack: LocalStack, stubs: Stubs, rounds: int
) -> None:
    """The short form kills each service once."""
    # Given workers that hand messages on from queue to queue
    chains = Chains(MESSAGES * rounds)
    await chains.begin(stubs)

    # When every service is killed again and again, at any point of the work
    victims = random.sample(SERVICES * rounds, k=len(SERVICES) * rounds)
    await asyncio.gather(chains.work(stubs), kill_along(stack, chains, victims))
    await chains.judge(stubs)

    # Then each message came out of each queue once
    assert chains.faults() == [], victims
    assert stack.said.count("SIGKILL") == len(victims)
