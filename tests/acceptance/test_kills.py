"""Killing services while messages flow."""

import asyncio
import random

import pytest

from tests.acceptance.local_stack import LocalStack
from tests.acceptance.mishaps import SERVICES, kill_along
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import Run, make_lines

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,  # What an unanswered claim holds comes back only after its lease.
]


async def test_killing_each_service_loses_nothing_and_routes_nothing_twice(
    stack: LocalStack, stubs: Stubs
) -> None:
    # Given a run in full swing
    run = Run(make_lines(6_000))
    await run.create_queues(stubs)

    # When every service is killed once, in any order
    victims = random.sample(SERVICES, k=len(SERVICES))
    await asyncio.gather(run.publish(stubs), run.consume(stubs), kill_along(stack, run, victims))
    await run.find_nothing_more(stubs)

    # Then everything came once, but for what was claimed without an answer
    assert run.faults() == [], victims
    assert stack.said.count("SIGKILL") == len(victims)
