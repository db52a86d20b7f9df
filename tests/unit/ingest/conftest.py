"""A root in memory, and its objects, held back at a gate."""

from __future__ import annotations

import pytest

from libs.storage.database.roots import Root, open_root
from tests.unit.ingest.shards import GatedObjects


@pytest.fixture
def root() -> Root:
    return open_root("memory:///")


@pytest.fixture
def store(root: Root) -> GatedObjects:
    gated = GatedObjects(root.objects)
    root.objects = gated
    return gated
