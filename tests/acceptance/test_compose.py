"""The services as containers: `make compose-test`. Needs Docker and docker-compose."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.compose_project import (
    HTTP_PORTS,
    IMAGES_S,
    OBSERVABILITY,
    SERVICES,
    START_S,
    Compose,
    image_missing,
    missing,
)
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import Run, make_lines

pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(IMAGES_S)]

IMAGES: dict[str, str] = {
    name: service["image"]
    for name, service in yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())[
        "services"
    ].items()
}

Start = Callable[..., Compose]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those of SlateMQ, built once for all tests."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    Compose(tmp_path_factory.mktemp("build"))("build")
    Compose(tmp_path_factory.mktemp("build-s3"), "s3")("build", "s3")


@pytest.fixture
def start(images: None, tmp_path: Path) -> Iterator[Start]:
    """Starts a project, which ends with the test; needs the images of `others`."""
    started: list[Compose] = []

    def start(*others: str, **arguments: Any) -> Compose:
        for name in others:
            reason = image_missing(IMAGES[name])
            if reason:
                pytest.skip(reason)
        started.append(Compose(tmp_path, **arguments))
        started[0].up()
        return started[0]

    yield start
    for project in started:
        project("down", "-v", "--remove-orphans")


def test_containers_serve_clients_outside_and_lose_nothing_when_killed(start: Start) -> None:
    # Given containers that serve, none of them as root, nor able to write outside of its volumes
    compose = start()
    assert {compose.inspect(name, "{{.Config.User}}") for name in SERVICES} == {"1000"}
    assert {compose.inspect(name, "{{.HostConfig.ReadonlyRootfs}}") for name in SERVICES} == {
        "true"
    }
    run = Run(make_lines(5_000))

    # And the quick start works from outside
    _quick_start(compose)

    # And the console has a page for those who have no session, under a certificate for its address
    assert 'name="token"' in compose.page("/login")

    # When the broker's container is killed in the middle of a run from outside
    asyncio.run(_run_with_a_kill(compose, run))

    # Then nothing is lost
    assert run.faults() == []
    assert run.acked_count == run.entries_count

    # And what was stored survives the containers
    compose("down")
    compose.up()
    assert asyncio.run(_queues(compose)) == ["eu-orders", *sorted(run.expected)]


@pytest.mark.parametrize(
    ("backend", "consistency"),
    [
        ("redis", "write-through"),
        ("redis", "async"),
        ("rabbitmq", "write-through"),
        ("kafka", "write-through"),
    ],
)
def test_each_backend_gets_the_events_of_a_run(
    start: Start, backend: str, consistency: str
) -> None:
    compose = start(backend, backend=backend, consistency=consistency)

    _quick_start(compose)

    # They connect when the backend is there, which no service waits for
    for service in ("ingest", "broker", "janitor"):
        wait_until(lambda name=service: compose.health(name)["queue"]["connected"], START_S)
        assert compose.health(service)["queue"]["backend"] == backend
    wait_until(lambda: compose.health("ingest")["queue"]["pending_tasks"] == 0, START_S)
    wait_until(lambda: _published_events(compose) > 0, START_S)


def test_on_the_s3_server_the_whole_stack_works(start: Start) -> None:
    compose = start(backend="s3")

    _quick_start(compose)

    listed = compose(
        "exec", "-T", "s3", "python", "-c", "import urllib.request as r;"
        "print(r.urlopen('http://127.0.0.1:5000/slatemq?list-type=2&prefix=local/').read().decode())",
    )  # fmt: skip
    assert "local/ingest/0" in listed
    assert "local/broker/0" in listed


def test_prometheus_scrapes_every_service_and_grafana_asks_it(start: Start) -> None:
    compose = start(*OBSERVABILITY, is_observed=True)
    prometheus = f"http://127.0.0.1:{compose.ports['prometheus']}"
    grafana = f"http://127.0.0.1:{compose.ports['grafana']}"

    def scraped() -> set[str]:
        try:
            answer = compose.get_json(f"{prometheus}/api/v1/query?query=up==1")
        except OSError:
            return set()
        return {one["metric"]["service"] for one in answer["data"]["result"]}

    # Prometheus has them all, the console on the machine's network among them
    wait_until(lambda: scraped() == set(HTTP_PORTS), START_S)

    # And Grafana, without a login, has the dashboards, and data for them
    wait_until(lambda: _dashboards(compose, grafana) == 3, START_S)
    query = {
        "queries": [
            {"refId": "A", "datasource": {"uid": "prometheus"}, "expr": "up", "instant": True}
        ],
        "from": "now-1m",
        "to": "now",
    }
    answer = compose.get_json(f"{grafana}/api/ds/query", query)
    assert len(answer["results"]["A"]["frames"]) == len(HTTP_PORTS)


def _dashboards(compose: Compose, grafana: str) -> int:
    try:
        return len(compose.get_json(f"{grafana}/api/search?type=dash-db"))
    except OSError:
        return 0


def _quick_start(compose: Compose) -> None:
    ended = subprocess.run(
        [sys.executable, "examples/quickstart.py", compose.endpoint],
        cwd=REPOSITORY,
        env=os.environ | compose.client_environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "processed 'anvil'" in ended.stdout, ended.stderr


def _published_events(compose: Compose) -> float:
    """How many events and tasks the backend has accepted of the ingest."""
    command = (
        "import ssl, urllib.request as r; "
        "tls = ssl.create_default_context(cafile='/access/current/ca.crt'); "
        "print(r.urlopen('https://127.0.0.1:7430/metrics', context=tls).read().decode())"
    )
    text = compose("exec", "-T", "ingest", "python", "-c", command)
    counts = re.findall(r"^slatemq_queue_published_total\{.*\} ([\d.e+]+)$", text, re.MULTILINE)
    return sum(map(float, counts))


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
