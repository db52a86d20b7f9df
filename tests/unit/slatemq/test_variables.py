"""Variables that are almost a setting are reported, by servers and by the command."""

from dataclasses import dataclass, fields

import pytest

from libs.serving.config import load, setting
from services.broker.config import BrokerConfig
from services.ingest.config import IngestConfig
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from slatemq.cli.app import invoke
from slatemq.variables import misspelt

CONFIGS = (BrokerConfig, IngestConfig, JanitorConfig, RouterConfig)
COMMAND = {f"SLATEMQ_{name}" for name in ("ENDPOINT", "MESSAGE_ID", "QUEUE", "ATTEMPTS", "HEADERS")}


def variables(config: type) -> set[str]:
    return {f"SLATEMQ_{field.name.upper()}" for field in fields(config)}


@dataclass(frozen=True)
class Config:
    """A service's settings."""

    retention_s: int = setting("How long messages live.", default=1)


@pytest.mark.parametrize(
    "name", ["SLATEMQ_RETENTON_S", "SLATEMQ_RETENTION", "SLATEMQ_RETENTION_MS"]
)
def test_a_service_reports_a_variable_that_is_almost_one_of_its_settings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(Config, "service", [], {name: "5", "SLATEMQ_OTHER": "x"}).retention_s == 1
    assert capsys.readouterr().err == (
        f"{name} is not a setting: ignored; SLATEMQ_RETENTION_S is one\n"
    )


def test_the_command_reports_a_variable_that_is_almost_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLATEMQ_ENDPOINTS", "127.0.0.1:1")
    assert invoke(["--version"]) == 0
    assert "SLATEMQ_ENDPOINTS is ignored; did you mean SLATEMQ_ENDPOINT?" in capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS)
def test_no_setting_of_one_process_is_taken_for_a_misspelt_one_of_another(config: type) -> None:
    every = COMMAND.union(*map(variables, CONFIGS))
    assert list(misspelt(every, variables(config))) == []
    assert list(misspelt(every, {"SLATEMQ_ENDPOINT"})) == []
