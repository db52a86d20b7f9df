"""A file of access that a running process refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import slatemq
from tests.integration.stack.secured import Secured
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow


async def test_the_status_says_that_a_file_of_access_is_refused(tmp_path: Path) -> None:
    made = Secured(tmp_path)
    with made.running() as stack:
        await _refuse_and_mend(made, stack.endpoint)


async def _refuse_and_mend(made: Secured, endpoint: str) -> None:
    async with (
        asyncio.timeout(WAIT_SECONDS),
        slatemq.connect(endpoint, credentials=made.credentials("ops")) as ops,
    ):

        async def until_noted(*names: str) -> None:
            while True:
                services = (await ops.status()).services
                if all(one.serving for one in services) and all(
                    (f"{name!r} is refused" in one.detail) == (name in names)
                    for one in services
                    for name in ("policy.yaml", "tokens.yaml")
                ):
                    return
                await asyncio.sleep(0.1)

        try:
            (made.folder / "tokens.yaml").write_text("tokens: [")
            await until_noted("tokens.yaml")
        finally:
            made.write_tokens(*made.tokens.values())
        await until_noted()
