"""What tests of the client share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.client.peers import Instance


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    async with Instance() as running:
        yield running
