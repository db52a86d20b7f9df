"""Variables with our prefix that nothing reads are named by every process, and by the command."""

import re
from pathlib import Path

import pytest

from libs.events.settings import keys, variable_of
from libs.serving.process.config import load
from libs.serving.process.instance import InstanceSettings
from libs.serving.process.settings import settings_of
from services.broker.config import BrokerConfig
from services.console.config import ConsoleConfig
from services.ingest.config import IngestConfig
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from services.scaler.config import ScalerConfig
from services.stack import launcher
from slatemq.cli.app import invoke
from slatemq.credentials import VARIABLES
from slatemq.variables import KNOWN, is_service_link, unknown_variables

CONFIGS = (BrokerConfig, IngestConfig, JanitorConfig, RouterConfig)
HOLDERS = (*CONFIGS, ConsoleConfig, InstanceSettings, ScalerConfig)
COMMAND = {
    *(f"SLATEMQ_{name}" for name in ("ENDPOINT", "MESSAGE_ID", "QUEUE", "ATTEMPTS", "HEADERS")),
    *(f"SLATEMQ_{name}" for name in ("PROFILE", "PROFILES", "TLS")),
    *VARIABLES.values(),
}
COMPOSE = Path(__file__).parents[3] / "docker-compose.yml"

LINKS = {
    "SLATEMQ_PORT": "tcp://10.0.0.1:7420",
    "SLATEMQ_SERVICE_HOST": "10.0.0.1",
    "SLATEMQ_SERVICE_PORT": "7420",
    "SLATEMQ_SERVICE_PORT_GRPC": "7420",
    "SLATEMQ_PORT_7420_TCP": "tcp://10.0.0.1:7420",
    "SLATEMQ_PORT_7420_TCP_ADDR": "10.0.0.1",
    "SLATEMQ_PORT_7420_TCP_PORT": "7420",
    "SLATEMQ_PORT_7420_TCP_PROTO": "tcp",
    "SLATEMQ_PORT_53_UDP": "udp://[fd00::1]:53",
    "SLATEMQ_EU_INGEST_PORT": "tcp://10.0.0.1:7420",
    "SLATEMQ_EU_INGEST_SERVICE_HOST": "10.0.0.1",
    "SLATEMQ_EU_INGEST_PORT_7420_TCP_PROTO": "tcp",
}


def test_the_variables_of_all_processes_are_known_and_no_others() -> None:
    settings = {f"SLATEMQ_{field.name.upper()}" for one in HOLDERS for field in settings_of(one)}
    compose = set(re.findall(r"SLATEMQ_[A-Z_]+", COMPOSE.read_text()))

    assert settings | COMMAND | compose | {variable_of(key) for key in keys()} == KNOWN


def test_unknown_variables_are_named_with_what_they_resemble() -> None:
    environ = {"SLATEMQ_RETENTON_S": "1", "SLATEMQ_WHISTLE": "", "OTHER": "", **LINKS}

    assert unknown_variables(environ | dict.fromkeys(KNOWN, "1")) == (
        "unknown environment variables are ignored: SLATEMQ_RETENTON_S (did you mean "
        "SLATEMQ_RETENTION_S?), SLATEMQ_WHISTLE"
    )
    assert unknown_variables({"OTHER": "", "SLATEMQ_ENDPOINT": "127.0.0.1:1"}) == ""


def test_what_kubernetes_sets_for_a_service_of_our_name_is_passed_over() -> None:
    assert unknown_variables(LINKS) == ""
    assert not any(is_service_link(name, "7420") for name in KNOWN)
    # But not what merely looks like it
    for name in ("SLATEMQ_PORT_7420", "SLATEMQ_SERVICE", "SLATEMQ_HOST_SERVICE_HOSTS"):
        assert name in unknown_variables({name: "x"})


def test_the_command_warns_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLATEMQ_ENDPOINTS", "127.0.0.1:1")

    assert invoke(["--version"]) == 0

    assert capsys.readouterr().err == (
        "slatemq: warning: unknown environment variables are ignored: "
        "SLATEMQ_ENDPOINTS (did you mean SLATEMQ_ENDPOINT?)\n"
    )


def test_a_required_setting_that_is_misspelt_is_named_with_the_refusal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load(BrokerConfig, "broker", [], {"SLATEMQ_ROOTS": "memory:///"})

    err = capsys.readouterr().err
    assert "SLATEMQ_ROOT is required" in err
    assert "SLATEMQ_ROOTS (did you mean SLATEMQ_ROOT?)" in err


def test_the_launcher_warns_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    # Given a folder that cannot be made, so that the launcher ends at once
    argv = ["--data", str(tmp_path / "file" / "data")]

    assert launcher.run(argv, {"SLATEMQ_LEASE_SECONDS": "1"}) == 1

    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(
        "warning: unknown environment variables are ignored: SLATEMQ_LEASE_SECONDS"
    )
    assert "cannot write to" in second
