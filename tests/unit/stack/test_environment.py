"""What of the environment reaches the services of a stack, and what is said about the rest."""

from pathlib import Path

import pytest

from libs.serving.process.exits import EXIT_FAILED
from services.stack.launcher import run
from services.stack.options import environment_of_services, variables_without_effect


def test_services_do_not_get_the_settings_that_they_cannot_share() -> None:
    environ = {"SLATEMQ_PORT": "1", "SLATEMQ_READY_FILE": "f", "SLATEMQ_LEASE_MS": "5", "PORT": "2"}

    assert environment_of_services(environ) == {"SLATEMQ_LEASE_MS": "5", "PORT": "2"}


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("SLATEMQ_ROOT", "--data or --store"),
        ("SLATEMQ_HOST", "127.0.0.1"),
        ("SLATEMQ_PORT", "--ports BASE"),
        ("SLATEMQ_HTTP_PORT", "--http-ports BASE"),
        ("SLATEMQ_ADVERTISED_ADDRESS", "127.0.0.1"),
        ("SLATEMQ_PEER_ADDRESS", "127.0.0.1"),
        ("SLATEMQ_READY_FILE", "--ready-file F"),
        ("SLATEMQ_SHARD", "`python -m services.broker`"),
        ("SLATEMQ_PARENT_PID", "end with the stack"),
    ],
)
def test_a_setting_that_is_not_passed_on_is_named_with_what_holds_instead(
    name: str, instead: str
) -> None:
    said = variables_without_effect({name: "7"})
    assert f"{name} (" in said
    assert instead in said
    assert name not in environment_of_services({name: "7"})


def test_nothing_is_said_of_what_has_an_effect_or_comes_from_kubernetes() -> None:
    environ = {"SLATEMQ_PORT": "tcp://10.0.0.1:80", "SLATEMQ_HOST": "", "SLATEMQ_CONFIG": "f"}
    assert variables_without_effect({**environ, "SLATEMQ_LOG_LEVEL": "debug", "PORT": "1"}) == ""


def test_the_launcher_says_it_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").touch()  # no folder, so that it ends
    assert run(["--data", str(tmp_path / "data")], {"SLATEMQ_SHARD": "3"}) == EXIT_FAILED
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "slatemq: warning: environment variables without effect on a stack: SLATEMQ_SHARD (all of "
    )
    assert len(said) == 2
