"""The three roots of a backup and its restore."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.storage.database.roots import Root, open_root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root((tmp_path / "data").as_uri(), sync=False)


@pytest.fixture
def backups(tmp_path: Path) -> Root:
    return open_root((tmp_path / "backups").as_uri(), sync=False)


@pytest.fixture
def fresh(tmp_path: Path) -> Root:
    return open_root((tmp_path / "new").as_uri(), sync=False)
