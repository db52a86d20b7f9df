"""Processes that start on an S3 server which is there for less time than their start takes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.integration.ingest.server import process
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = [pytest.mark.slow, pytest.mark.s3]

AWAY_S = (3.0, 4.0)
"""It is there for the last second of four."""

REQUEST_S = 0.1
"""A start sends some thirty requests, one after the other."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with moto() as port, faulty_store(port) as before:
        yield before


@pytest.mark.parametrize(
    ("service", "outcome"),
    [("ingest", Outcome.RESET), ("broker", Outcome.REFUSE), ("router", Outcome.RESET)],
)
async def test_a_process_starts_on_a_store_that_is_there_for_less_time_than_its_start(
    store: FaultyStore, tmp_path: Path, service: str, outcome: Outcome
) -> None:
    away = Fault(outcome, window_s=AWAY_S)
    store.set(away, Fault(delay_s=REQUEST_S))
    ready = tmp_path / "ready"

    async with process(root_url(store.port, service), ready, module=f"services.{service}"):
        assert away.happened

    said = ready.with_suffix(".log").read_text()
    assert re.search(r"WARNING .* the start waits for the store, 30 s: ", said)
