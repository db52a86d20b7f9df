"""Completing a message and pushing the next happen together, once, whatever is killed."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.chains import Chains
from tests.acceptance.local_stack import LocalStack
from tests.acceptance.mishaps import SERVICES, kill_along
from tests.acceptance.stubs import Stubs

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,  # What an unanswered claim holds comes back only after its lease.
]

ROUNDS = 3
"""How often each service is killed."""

COMMIT_INTERVAL_MS = 60
"""What is durable in one service waits so long for the next: most kills strike between the two."""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    monkeypatch.setenv("SLATEMQ_COMMIT_INTERVAL_MS", str(COMMIT_INTERVAL_MS))
    with LocalStack(tmp_path) as running:
        yield running


async def test_complete_and_push_is_exactly_once_while_every_service_is_killed(
    stack: LocalStack, stubs: Stubs
) -> None:
    # Given workers that hand messages on from queue to queue
    chains = Chains(1_500)
    await chains.begin(stubs)

    # When every service is killed again and again, at any point of the work
    victims = random.sample(SERVICES * ROUNDS, k=len(SERVICES) * ROUNDS)
    await asyncio.gather(chains.work(stubs), kill_along(stack, chains, victims))
    await chains.judge(stubs)

    # Then each message came out of each queue once
    assert chains.faults() == [], victims
    assert stack.said.count("SIGKILL") == len(victims)
