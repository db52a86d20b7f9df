"""The containers of docker-compose.yml, under a project, on ports and in volumes of their own."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from libs.serving.process.healthprobe import probe
from services.stack.ports import choose_ports
from slatemq.cli.access.dev_certificates import SERVICE_NAME
from tests.acceptance.local_stack import REPOSITORY, wait_until

SERVICES = ("ingest", "router", "broker", "janitor", "console")
BACKENDS = ("redis", "rabbitmq", "kafka")
OBSERVABILITY = ("prometheus", "grafana")
HTTP_PORTS = {name: 7430 + place for place, name in enumerate(SERVICES)}
"""Where metrics are on this machine, as deploy/observability/prometheus.yml has it."""

PROBE_FILES = {"ca": "ca.crt", "cert": "client.crt", "key": "client.key"}
PROJECT = f"slatemq-compose-test-{os.getpid()}"
START_S = 240
IMAGES_S = 1800
"""A test ends by then, which may be the first one, and has to build all images."""


def missing() -> str:
    """What keeps containers from running here; empty when nothing does."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if not _compose_command():
        return "neither docker-compose nor docker's compose plugin is installed"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return "" if asked.returncode == 0 else "no container engine runs here (docker info fails)"


def image_missing(image: str) -> str:
    """Why an image of others is not on this machine; empty when it is, maybe since now."""
    for command in (["image", "inspect", image], ["pull", "--quiet", image]):
        done = subprocess.run(["docker", *command], capture_output=True, check=False)
        if done.returncode == 0:
            return ""
    return f"{image} is neither here nor can it be pulled"


def _compose_command() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else []


def output_of(*command: str, given: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises AssertionError with it if it fails."""
    done = subprocess.run(
        command,
        input=given,
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}"
    return done.stdout


class Compose:
    """One project.

    Attributes:
        access: What clients need of the generated files.
        command: Of Compose, with the flags of the project.
        ports: Of each container on this machine.
        http_ports: Of the metrics of each service.
        settings: The variables that docker-compose.yml reads.
    """

    def __init__(
        self, folder: Path, backend: str = "", *, consistency: str = "", is_observed: bool = False
    ) -> None:
        """`backend` is the profile that the services read; empty: none."""
        self.access = folder / "access"
        names = (*SERVICES, *BACKENDS, *OBSERVABILITY)
        self.ports = choose_ports(None, names)
        self.http_ports = choose_ports(None, SERVICES, self.ports.values())
        self._folder = folder
        self.settings = (
            {f"SLATEMQ_{name.upper()}_PORT": str(port) for name, port in self.ports.items()}
            | {f"SLATEMQ_{n.upper()}_HTTP_PORT": str(port) for n, port in self.http_ports.items()}
            | {"SLATEMQ_HTTP_PORT": "7430"}
            | ({"COMPOSE_PROFILES": backend} if backend else {})
            | ({"SLATEMQ_QUEUE_CONSISTENCY": consistency} if consistency else {})
        )
        files = ["-f", str(REPOSITORY / "docker-compose.yml")]
        if is_observed:
            files += ["-f", str(self._observability())]
        # A flag makes Compose ignore COMPOSE_PROFILES.
        flagged = ["observability", *filter(None, [backend])] if is_observed else []
        flags = [part for name in flagged for part in ("--profile", name)]
        self.command = [*_compose_command(), "-p", PROJECT, *files, *flags]

    @property
    def endpoint(self) -> str:
        """Where clients outside connect to."""
        return f"127.0.0.1:{self.ports['ingest']}"

    @property
    def environ(self) -> dict[str, str]:
        """Of the compose commands."""
        others = {name: value for name, value in os.environ.items() if name != "COMPOSE_PROFILES"}
        return others | self.settings

    def __call__(self, *arguments: str) -> str:
        """Run one compose command; its output. Raises AssertionError with it if it fails."""
        return self._run(*self.command, *arguments)

    def _run(self, *command: str) -> str:
        return output_of(*command, env=self.environ)

    def up(self) -> None:
        """Start what is not running, and wait until clients are served and containers healthy."""
        self("up", "-d")
        backends = [name for name in BACKENDS if self.settings.get("COMPOSE_PROFILES") == name]
        wait_until(lambda: all(map(self._is_healthy, (*SERVICES, *backends))), START_S)
        shutil.rmtree(self.access, ignore_errors=True)
        # As the how-to says it: not every docker-compose has a command for it.
        self._run("docker", "cp", f"{self.container('ingest')}:/access/current", str(self.access))
        wait_until(lambda: not any(map(self._probe, self._addresses())), START_S)

    def _probe(self, address: str) -> str:
        files = {name: str(self.access / file) for name, file in PROBE_FILES.items()}
        return probe(address, files | {"identity": SERVICE_NAME})

    @property
    def client_environ(self) -> dict[str, str]:
        """What makes a client of this machine trust the services, and be trusted."""
        token = self.access / "operator.token"
        return {"SLATEMQ_CA": str(self.access / "ca.crt"), "SLATEMQ_TOKEN_FILE": str(token)}

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        token = (self.access / "operator.token").read_text().strip()
        return grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials((self.access / "ca.crt").read_bytes()),
            grpc.access_token_call_credentials(token),
        )

    def container(self, service: str) -> str:
        """ID of the container of a service."""
        return self("ps", "-q", service).split()[-1]

    def inspect(self, service: str, form: str) -> str:
        """One fact about a container, in Docker's template language."""
        return self._run("docker", "inspect", "--format", form, self.container(service)).strip()

    def health(self, service: str) -> dict[str, Any]:
        """What a service says of itself over HTTP, in trouble, too."""
        url = f"https://127.0.0.1:{self.http_ports[service]}/health"
        try:
            answer: dict[str, Any] = self.get_json(url)
        except urllib.error.HTTPError as error:
            with error:
                answer = json.load(error)
        return answer

    def get_json(self, url: str, body: Mapping[str, object] | None = None) -> Any:
        """An answer in JSON; raises OSError where none comes."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10, context=self._trust) as answer:
            return json.load(answer)

    @property
    def _trust(self) -> ssl.SSLContext:
        """By which certificates are checked."""
        return ssl.create_default_context(cafile=str(self.access / "ca.crt"))

    def page(self, path: str) -> str:
        """A page of the console, whose certificate is checked."""
        url = f"https://127.0.0.1:{self.ports['console']}{path}"
        with urllib.request.urlopen(url, timeout=10, context=self._trust) as answer:
            return str(answer.read(), "utf-8")

    def _is_healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}") == "healthy"

    def _addresses(self) -> list[str]:
        return [f"127.0.0.1:{self.ports[name]}" for name in SERVICES if name != "console"]

    def _observability(self) -> Path:
        """A compose file whose Prometheus scrapes the ports of this project."""
        copy = self._folder / "observability"
        shutil.copytree(REPOSITORY / "deploy/observability", copy)
        scraped = copy / "prometheus.yml"
        text = scraped.read_text()
        for name, port in self.http_ports.items():
            text = text.replace(f'"127.0.0.1:{HTTP_PORTS[name]}"', f'"127.0.0.1:{port}"')
        scraped.write_text(text)
        file = self._folder / "observability.yml"
        service = {"prometheus": {"volumes": [f"{copy}:/etc/prometheus:ro"]}}
        file.write_text(json.dumps({"version": "3.8", "services": service}))
        return file
