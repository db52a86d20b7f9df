"""A list without entries is said to be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slatemq.cli.janitor import _show_runs
from slatemq.cli.publish.tasks import _show_failed, _show_pending


@pytest.mark.parametrize("show", [_show_failed, _show_pending, _show_runs])
def test_a_list_without_entries_is_a_note_and_no_heading(
    show: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show([])

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("slatemq: no ")
