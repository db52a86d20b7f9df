"""Chromium, and a stack with TLS, a policy and event queues whose console it looks at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.integration.console.looking import Console
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.tasks.queued_ingest import queue_settings, write_config
from tests.integration.stack.secured import Secured

VERBS = ["publish", "consume", "inspect", "edit", "administer", "operate"]

POLICY = {
    "roles": {"all": [{"verbs": VERBS}], "reader": [{"verbs": ["inspect"]}]},
    "bindings": [
        {"principals": ["ops"], "roles": ["all"]},
        {"principals": ["reader"], "roles": ["reader"]},
    ],
}


@pytest.fixture(scope="session", autouse=True)
def _patient_looks() -> Iterator[None]:
    expect.set_options(timeout=60_000)
    yield
    expect.set_options(timeout=None)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's, in the form that has no windows: a page takes a third of the processor time."""
    program = shutil.which("chromium-headless-shell")
    if program is None:
        message = "chromium-headless-shell is absent: the console is not tried in a browser"
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
    folder = tmp_path_factory.mktemp("console")
    secured = Secured(folder, POLICY, ("ops", "reader", "stranger"))
    with running(RedisServer(folder, "streams")) as redis:
        settings = queue_settings("redis", redis, max_retries=0)
        arguments = (
            "--data",
            str(folder / "data"),
            "--config",
            str(write_config(folder, settings)),
        )
        with (
            secured.running(*arguments) as stack,
            Console(chromium, secured, stack, settings) as console,
        ):
            yield console
