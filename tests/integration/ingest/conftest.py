"""What all tests of the ingest have."""

from __future__ import annotations

import pytest

from libs.serving.requests import arrivals


@pytest.fixture(autouse=True)
def _patient_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is refused for its wait in line, however slow the machine is."""
    monkeypatch.setattr(arrivals, "LINE_S", 60.0)
