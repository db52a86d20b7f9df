"""A stack for all tests of a module, and the command as users run it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator

import pytest

from libs.serving.process import ownership
from services.broker.shard import lost_time
from tests.acceptance.local_stack import LocalStack
from tests.integration.cli.stack import Cli
from tests.slow_steps import PROPERTY, WatchedLoops, too_long


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    folder = tmp_path_factory.mktemp("cli")
    with LocalStack(folder / "stack", ready=True) as stack, Cli(stack, folder / "state") as cli:
        yield cli


LOOPS = WatchedLoops()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"watched": LOOPS.new_event_loop}


@pytest.fixture(autouse=True)
def no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is held, no answer would come; and where a clock is, leases would go on."""
    monkeypatch.setattr(lost_time, "STANDSTILL_S", math.inf)
    monkeypatch.setattr(ownership, "STANDSTILL_S", math.inf)


@pytest.fixture(autouse=True)
def _slow_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    found = LOOPS.take()
    request.node.user_properties.extend((PROPERTY, one) for one in found)
    if lines := too_long(found):
        pytest.fail("\n".join(lines), pytrace=False)
