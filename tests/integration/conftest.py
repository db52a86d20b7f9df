"""A stack for all tests of a module, and the command as users run it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.local_stack import LocalStack
from tests.integration.cli_stack import Cli


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    folder = tmp_path_factory.mktemp("cli")
    with LocalStack(folder / "stack") as stack:
        yield Cli(stack, folder / "state")
