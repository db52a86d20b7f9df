"""The services as containers: `make compose-test`. Needs Docker and docker-compose."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from libs.serving.process.healthprobe import probe
from services.stack.ports import choose_ports
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import Run, make_lines

pytestmark = [pytest.mark.compose, pytest.mark.slow]

SERVICES = ("ingest", "router", "broker", "janitor")
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

    def __init__(self) -> None:
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
        wait_until(lambda: not any(map(probe, self._addresses())), 90)
        wait_until(lambda: all(map(self._healthy, SERVICES)), 90)

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
def compose() -> Iterator[Compose]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    project = Compose()
    project("build")
    try:
        project.up()
        yield project
    finally:
        project("down", "-v", "--remove-orphans")


def test_containers_serve_clients_outside_and_lose_nothing_when_killed(compose: Compose) -> None:
    # Given containers that serve, none of them as root
    assert {compose.inspect(name, "{{.Config.User}}") for name in SERVICES} == {"1000"}
    run = Run(make_lines(5_000))

    # And the quick start works from outside
    quick = [sys.executable, "examples/quickstart.py", compose.endpoint]
    ended = subprocess.run(quick, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "processed 'anvil'" in ended.stdout, ended.stderr

    # When the broker's container is killed in the middle of a run from outside
    asyncio.run(_run_with_a_kill(compose, run))

    # Then nothing is lost
    assert run.faults() == []
    assert run.acked_count == run.entries_count

    # And what was stored survives the containers
    compose("down")
    compose.up()
    assert asyncio.run(_queues(compose.endpoint)) == ["eu-orders", *sorted(run.expected)]


async def _run_with_a_kill(compose: Compose, run: Run) -> None:
    async with Stubs() as stubs:
        await stubs.connect(compose.endpoint)
        await run.create_queues(stubs)

        async def kill_half_way() -> None:
            while run.progress < 0.5:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(compose, "kill", "-s", "SIGKILL", "broker")
            await asyncio.to_thread(compose.up)

        await asyncio.gather(run.publish(stubs), run.consume(stubs), kill_half_way())
        await run.find_nothing_more(stubs)


async def _queues(endpoint: str) -> list[str]:
    async with Stubs() as stubs:
        await stubs.connect(endpoint)
        return [queue.queue_id for queue in await stubs.list_queues()]
