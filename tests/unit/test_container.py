"""What images run: the service of the environment, on the image's ports, without a shell."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libs.serving.process.config import ServingConfig, load
from libs.serving.process.process_config import ProcessConfig, load_own
from services import container
from services.broker.config import BrokerConfig
from services.console.config import ConsoleConfig
from services.ingest.config import IngestConfig
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from services.scaler.config import ScalerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()

CONFIGS: dict[str, type[ServingConfig]] = {
    "broker": BrokerConfig,
    "ingest": IngestConfig,
    "janitor": JanitorConfig,
    "router": RouterConfig,
}
OWN_CONFIGS: dict[str, type[ProcessConfig]] = {"console": ConsoleConfig, "scaler": ScalerConfig}

KUBERNETES = {"SLATEMQ_PORT": "tcp://10.0.0.1:7420", "SLATEMQ_ROOT": "memory:///"}


def started(monkeypatch: pytest.MonkeyPatch, service: str) -> list[str]:
    """The arguments with which it is run."""
    ran: list[str] = []
    monkeypatch.setenv("SERVICE", service)
    monkeypatch.setattr(sys, "argv", ["container.py", "--drain-ms", "1"])

    def run_module(name: str, **_: Any) -> None:
        ran.append(name)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    container.main()
    assert ran == [f"services.{service}"]
    return sys.argv[1:]


@pytest.mark.parametrize("service", CONFIGS)
def test_a_service_is_run_on_both_ports_whatever_kubernetes_sets(
    monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    config = load(CONFIGS[service], service, started(monkeypatch, service), KUBERNETES)

    assert (config.port, config.peer_port, config.drain_ms) == (7420, 7419, 1)


@pytest.mark.parametrize("service", OWN_CONFIGS)
def test_what_knows_the_instance_as_clients_do_has_one_port(
    monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    config = load_own(OWN_CONFIGS[service], service, started(monkeypatch, service), KUBERNETES)

    assert config.port == 7420


def test_a_container_that_is_stopped_before_its_service_has_begun_ends() -> None:
    # Given a service that is still being imported, which as PID 1 gets no signal without a handler
    importing = """
import os, runpy, signal, time
from services import container

def run_module(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

runpy.run_module = run_module
container.main()
"""
    command, environ = [sys.executable, "-c", importing], {**os.environ, "SERVICE": "ingest"}

    ended = subprocess.run(command, cwd=REPOSITORY, env=environ, check=False)

    assert ended.returncode == 0


@pytest.mark.parametrize(("service", "scheme"), [("broker", ""), ("console", "http://")])
def test_the_probe_asks_as_the_service_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str, scheme: str
) -> None:
    assert (REPOSITORY / container.PROBE).is_file()
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import sys\nsys.exit(' '.join(sys.argv[1:]) if __name__ == '__main__' else 'imported')"
    )
    monkeypatch.setattr(container, "PROBE", str(probe))
    monkeypatch.setenv("SERVICE", service)
    monkeypatch.setattr(sys, "argv", ["container.py", "probe"])

    with pytest.raises(SystemExit) as ended:
        container.main()

    assert ended.value.code == f"{scheme}127.0.0.1:7420"


def test_the_image_runs_and_probes_it_without_a_shell() -> None:
    commands = [json.loads(found) for found in re.findall(r"\bCMD (\[.*\])", DOCKERFILE)]

    assert commands == [
        ["python", "-S", "-E", "services/container.py", "probe"],
        ["python", "-m", container.__name__],
    ]
    assert not re.search(r"^\s*(CMD|ENTRYPOINT) (?!\[)", DOCKERFILE, re.MULTILINE)
