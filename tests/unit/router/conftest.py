"""Steps of judging end where a test says so, and not where a busy machine does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.router import routing

NEVER_NS = 1 << 60


@pytest.fixture(scope="module", autouse=True)
def _whole_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "STEP_NS", NEVER_NS)
        yield
