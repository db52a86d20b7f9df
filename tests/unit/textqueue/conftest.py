"""A queue file in a folder of its own, and a clock."""

from pathlib import Path

import pytest

from slatemq.textqueue import TextQueue
from tests.unit.textqueue.claims import Clock, Make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.tq"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(path: Path, clock: Clock) -> Make:
    def queue(content: bytes) -> TextQueue:
        path.write_bytes(content)
        return TextQueue(path, clock_ms=clock)

    return queue
