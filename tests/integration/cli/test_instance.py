"""`slatemq instance`, as people and programs use it."""

from __future__ import annotations

import pytest

from tests.acceptance.local_stack import wait_until
from tests.integration.cli.stack import Cli

pytestmark = pytest.mark.stack


def test_the_settings_are_shown_to_people_and_to_programs(cli: Cli) -> None:
    shown = cli.ok("instance", "show").out.decode()
    (found,) = cli.ok("instance", "show", "--json").objects

    assert f"instance record {found['number']}, written " in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[2:]}
    assert {name: int(cells[0]) for name, cells in rows.items()} == found["settings"]
    assert rows["payload_bytes_max"][1:] == ["64.0", "MiB"]
    assert rows["max_message_delay_ms"][1:] == ["15m"]


def test_settings_are_changed_by_numbers_and_durations(cli: Cli) -> None:
    result = cli.ok("instance", "set", "replay_window_s=0", "dedupe_window_s=20m")

    assert "dedupe_window_s  600 -> 1200" in result.out.decode()
    assert "brokers, routers and janitors first, ingests last" in result.err
    again = cli.ok("instance", "set", "replay_window_s=0")
    assert "has these values already" in again.out.decode()
    assert again.err == ""
    assert "forever" in cli.ok("instance", "show").out.decode()
    (same,) = cli.ok("instance", "set", "dedupe_window_s=1200", "--json").objects
    assert same["settings"]["dedupe_window_s"] == 1200
    # What has to be started again is named
    older = f"older than instance record {same['number']}: restart ingest 0, router 0, broker 0"
    wait_until(lambda: older in cli.ok("status").err, 60)  # once all say what they run with
    status = cli.status()
    assert status["instance_number"] == same["number"]
    assert {one["instance_number"] for one in status["services"]} == {1}


def test_a_change_that_loses_something_needs_a_word(cli: Cli) -> None:
    refused = cli.run("instance", "set", "purge_grace_s=1s")

    assert refused.code == 1
    assert "purge_grace_s from 60 to 1 lets messages be removed" in refused.err
    assert "--accept-loss permits it" in refused.err
    assert "accept_loss" not in refused.err
    cli.ok("instance", "set", "purge_grace_s=1s", "--accept-loss")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("replay_window_s", "is not a valid setting (expected KEY=VALUE)"),
        ("replay_window_s=", "is not a valid setting (expected KEY=VALUE)"),
        ("speed=1", "'speed' is not a setting of the instance"),
        ("payload_bytes_max=1h", "takes a whole number"),
        ("retention_s=500ms", "is in whole seconds"),
        ("retention_s=soon", "is not a valid duration"),
    ],
)
def test_what_is_not_a_change_is_wrong_usage(cli: Cli, change: str, words: str) -> None:
    result = cli.run("instance", "set", change)

    assert result.code == 2
    assert words in " ".join(result.err.split())
