"""The janitor's process, as its server starts and ends it."""

from __future__ import annotations

from libs.serving.process.config import load
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.janitor.config import JanitorConfig
from services.janitor.service import JanitorProcess


async def test_a_janitor_that_is_stopped_while_it_starts_drains() -> None:
    config = load(JanitorConfig, "janitor", ["--root", "memory:///"], {})
    process = JanitorProcess(config, Telemetry(), open_root("memory:///"))

    await process.drain()

    await process.stop()
