"""What jobs need of the machine."""

from __future__ import annotations

import tempfile

import pytest

from services.janitor.spark.packages import lacking_temporary_folder


def test_a_janitor_without_a_folder_for_temporary_files_says_what_to_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lacking_temporary_folder() is None

    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", none_usable)

    assert lacking_temporary_folder() == (
        "No usable temporary directory found in ['/tmp']; mount one at /tmp, such as a tmpfs"
    )
