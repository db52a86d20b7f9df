"""What was logged in a test."""

from __future__ import annotations

import logging

import pytest

from libs.serving.process import watchdog
from libs.storage.database import opening


def logged_besides(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """All besides lines that a busy machine alone can cause."""
    busy = {watchdog.__name__, opening.__name__}
    return [record for record in caplog.records if record.name not in busy]
