"""uvloop as services run on it, and ended by the time limit of a test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop


class Loop(uvloop.Loop):
    """pytest-timeout raises in the handler of a signal. What is raised there while uvloop waits
    for events it only logs, and the test would wait for ever."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, pytest.fail.Exception):
            super().call_exception_handler(context)
            return
        for task in asyncio.all_tasks(self):
            task.cancel(str(error))
