"""What shells complete of `slatemq instance set`."""

from __future__ import annotations

import click
import pytest

from slatemq.cli.instance import SETTINGS, set_


@pytest.mark.parametrize(
    ("begun", "names"),
    [
        ("re", ["retention_s=", "request_id_window_s=", "replay_window_s="]),
        ("purge_grace_s=", []),
        ("x", []),
        ("", [f"{name}=" for name in SETTINGS]),
    ],
)
def test_the_names_of_settings_are_completed(begun: str, names: list[str]) -> None:
    (changes,) = (one for one in set_.params if isinstance(one, click.Argument))

    found = changes.shell_complete(click.Context(set_), begun)

    assert [item.value for item in found] == names
