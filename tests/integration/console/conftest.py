"""Chromium, and a stack with TLS and a policy whose console it looks at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.integration.console.looking import Console
from tests.integration.stack.test_secured_stack import Secured

VERBS = ["publish", "consume", "inspect", "edit", "administer", "operate"]

POLICY = {
    "roles": {"all": [{"verbs": VERBS}], "reader": [{"verbs": ["inspect"]}]},
    "bindings": [
        {"principals": ["ops"], "roles": ["all"]},
        {"principals": ["reader"], "roles": ["reader"]},
    ],
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's, without a window."""
    program = shutil.which("chromium")
    if program is None:
        message = "chromium is absent: the console is not tried in a browser"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def console(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    secured = Secured(tmp_path_factory.mktemp("console"), POLICY, ("ops", "reader", "stranger"))
    with secured.running() as stack, Console(chromium, secured, stack) as console:
        yield console
