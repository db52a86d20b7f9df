"""What an ingest says that has no tasks any more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from tests.integration.ingest.server import serving
from tests.integration.waiting import eventually
from tests.logged import logged_besides


async def test_a_direct_ingest_warns_of_bodies_that_tasks_have_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "services.ingest.tasks.bodies")
    root = tmp_path.as_uri()
    objects = open_root(root).objects
    # Given bodies of tasks of two shards, of which only one has an ingest here
    for path in ("tasks/ingest-0/a", "tasks/ingest-0/b", "tasks/ingest-1/c"):
        await objects.put(path, b"body")

    async with serving(root) as ingest:
        await eventually(lambda: logged_besides(caplog))
        assert await ingest.send(b"it serves")

    (record,) = logged_besides(caplog)
    assert "tasks/ingest-0 has 2 bodies" in record.getMessage()
    assert len(await objects.list("tasks")) == 3
