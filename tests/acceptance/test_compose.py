"""The services as containers: `make compose-test`. Needs Docker and docker-compose."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from libs.serving.process.healthprobe import probe
from services.stack.ports import choose_ports
from slatemq.cli.access.dev_certificates import SERVICE_NAME
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import Run, make_lines

pytestmark = [pytest.mark.compose, pytest.mark.slow]

SERVICES = ("ingest", "router", "broker", "janitor")
PROBE_FILES = {"ca": "ca.crt", "cert": "client.crt", "key": "client.key"}
PROJECT = f"slatemq-compose-test-{os.getpid()}"


def missing() -> str:
    """What keeps this test from running here; empty when nothing does."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if not _compose_command():
        return "neither docker-compose nor docker's compose plugin is installed"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return "" if asked.returncode == 0 else "no container engine runs here (docker info fails)"


def _compose_command() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else []


class Compose:
    """The project of docker-compose.yml under a name, and on ports, of its own."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for what clients need of the generated files."""
        self.access = folder / "access"
        self.ports = choose_ports(None, SERVICES)
        settings = {f"SLATEMQ_{name.upper()}_PORT": str(p) for name, p in self.ports.items()}
        self._environ = dict(os.environ) | settings
        self._command = [*_compose_command(), "-p", PROJECT]

    @property
    def endpoint(self) -> str:
        """Where clients outside connect to."""
        return f"127.0.0.1:{self.ports['ingest']}"

    def __call__(self, *arguments: str) -> str:
        """Run one compose command; its output. Raises AssertionError with it if it fails."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=REPOSITORY,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout[-4000:]}"
        return done.stdout

    def up(self) -> None:
        """Start what is not running, and wait until clients are served and containers healthy."""
        self("up", "-d")
        wait_until(lambda: all(map(self._healthy, SERVICES)), 180)
        shutil.rmtree(self.access, ignore_errors=True)
        self("cp", "ingest:/access/current", str(self.access))
        wait_until(lambda: not any(self._probe(address) for address in self._addresses()), 90)

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
        command = ["docker", "inspect", "--format", form, self.container(service)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def _healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}") == "healthy"

    def _addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports.values()]


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    project = Compose(tmp_path)
    project("build")
    try:
        project.up()
        yield project
    finally:
        project("down", "-v", "--remove-orphans")


def test_containers_serve_clients_outside_and_lose_nothing_when_killed(compose: Compose) -> None:
    # Given containers that serve, none of them as root, nor able to write outside of its volumes
    assert {compose.inspect(name, "{{.Config.User}}") for name in SERVICES} == {"1000"}
    assert {compose.inspect(name, "{{.HostConfig.ReadonlyRootfs}}") for name in SERVICES} == {
        "true"
    }
    run = Run(make_lines(5_000))

    # And the quick start works from outside
    quick = [sys.executable, "examples/quickstart.py", compose.endpoint]
    environ = os.environ | compose.client_environ
    ended = subprocess.run(
        quick, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False
    )
    assert "processed 'anvil'" in ended.stdout, ended.stderr

    # When the broker's container is killed in the middle of a run from outside
    asyncio.run(_run_with_a_kill(compose, run))

    # Then nothing is lost
    assert run.faults() == []
    assert run.acked_count == run.entries_count

    # And what was stored survives the containers
    compose("down")
    compose.up()
    assert asyncio.run(_queues(compose)) == ["eu-orders", *sorted(run.expected)]


async def _run_with_a_kill(compose: Compose, run: Run) -> None:
    async with Stubs(compose.credentials) as stubs:
        await stubs.connect(compose.endpoint)
        await run.create_queues(stubs)

        async def kill_half_way() -> None:
            while run.progress < 0.5:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(compose, "kill", "-s", "SIGKILL", "broker")
            await asyncio.to_thread(compose.up)

        await asyncio.gather(run.publish(stubs), run.consume(stubs), kill_half_way())
        await run.find_nothing_more(stubs)


async def _queues(compose: Compose) -> list[str]:
    async with Stubs(compose.credentials) as stubs:
        await stubs.connect(compose.endpoint)
        return [queue.queue_id for queue in await stubs.list_queues()]
