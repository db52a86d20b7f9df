from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.acceptance.local_stack import LocalStack
from tests.acceptance.stubs import Stubs


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path, ready=True) as running:
        yield running


@pytest.fixture
async def stubs(stack: LocalStack) -> AsyncIterator[Stubs]:
    async with Stubs() as connected:
        yield await connected.connect(stack.endpoint)
