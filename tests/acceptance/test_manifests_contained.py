"""What the manifests say, as containers of the images: `make compose-test`. Needs Docker.

The laptop's overlay and the pod of the page, as they stand there, under load, too. What schedules
pods is missing: tests/acceptance/test_manifests_run.py has more of what a cluster does with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slatemq.cli.access.dev_access import make_for_containers
from tests.acceptance.compose_project import IMAGES_S, missing
from tests.acceptance.contained_cluster import CLIENT, HOSTS, ContainedCluster
from tests.acceptance.local_stack import REPOSITORY
from tests.acceptance.test_manifests_run import (
    SERVICES,
    as_cert_manager_writes,
    secrets_of,
    with_authorities,
)

pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(IMAGES_S)]

TRY_TO_WRITE = """
import os
assert (os.getuid(), os.getgid()) == (1000, 1000), (os.getuid(), os.getgid())
for folder in ("/", "/app", "/opt/venv", "/tls", "/access/tokens"):
    if os.path.isdir(folder):
        try:
            open(os.path.join(folder, "file"), "w")
        except OSError:
            continue
        raise AssertionError(f"{folder} can be written")
status = open("/proc/self/status").read()
assert "CapEff:\\t0000000000000000" in status, status
assert "NoNewPrivs:\\t1" in status, status
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainedCluster]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    cluster = ContainedCluster(tmp_path_factory.mktemp("contained"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def test_the_containers_are_as_restricted_as_the_manifests_say(cluster: ContainedCluster) -> None:
    cluster.wait_ready()

    for name, pod in cluster.pods.items():
        pod.run("python", "-c", TRY_TO_WRITE)
        if name != CLIENT:
            assert pod.probe("startupProbe")
            assert pod.probe("livenessProbe")
            assert "unknown environment variables" not in pod.said


def test_the_commands_of_the_page_bring_a_message_through_them(cluster: ContainedCluster) -> None:
    cluster.wait_ready()
    client = cluster.pods[CLIENT]
    quick_start = (REPOSITORY / "examples/quickstart.py").read_text()

    assert "processed 'anvil'" in client.run("python", "-", given=quick_start)
    status = client.run("python", "-m", "slatemq.cli", "status")
    for service in ("ingest", "router", "broker", "janitor"):
        assert any(line.split()[0] == service and "serving" in line for line in status.splitlines())


def test_what_was_answered_outlasts_pods_that_are_replaced(cluster: ContainedCluster) -> None:
    cluster.wait_ready()
    slatemq = ("python", "-m", "slatemq.cli")
    client = cluster.pods[CLIENT]
    client.run(*slatemq, "queue", "create", "kept")
    client.run(*slatemq, "publish", "--to", "kept", "a lamp")

    for name in ("slatemq-ingest-0", "slatemq-broker-0"):
        cluster.pods[name].replace()
        cluster.wait_ready()

    assert "a lamp" in client.run(*slatemq, "consume", "kept", "--max", "1", "--wait", "60s")


def test_pods_are_replaced_one_by_one_under_load_and_nothing_is_lost(
    cluster: ContainedCluster,
) -> None:
    cluster.wait_ready()
    with cluster.load("upgraded-0", "upgraded-1") as progress:
        for name in cluster.services:
            cluster.pods[name].replace()
            cluster.wait_ready(name)
            progress()


def test_a_node_dies_under_load_and_nothing_is_lost(cluster: ContainedCluster) -> None:
    cluster.wait_ready()
    lost = [name for name in cluster.services if cluster.pods[name].tls == SERVICES]
    with cluster.load("moved-0", "moved-1") as progress:
        cluster.lose(*lost)
        for name in lost:
            cluster.pods[name].start_anew()
        cluster.wait_ready(*lost)
        progress()


def test_certificates_and_their_authority_are_renewed_under_load(
    cluster: ContainedCluster, tmp_path: Path
) -> None:
    cluster.wait_ready()
    old = cluster.secrets
    make_for_containers(tmp_path / "new", tmp_path / "new-console", HOSTS)
    new = secrets_of(tmp_path / "new", tmp_path / "new-console")
    for files in new.values():
        files["tls.key"] = as_cert_manager_writes(files["tls.key"])
    both = old[SERVICES]["ca.crt"] + new[SERVICES]["ca.crt"]
    lives = {name: cluster.pods[name].started_at for name in cluster.services}
    try:
        with cluster.load("renewed-0", "renewed-1") as progress:
            # First all trust both authorities, then all have certificates of the new one, then
            # none trusts the old one any more
            for secrets in (with_authorities(old, both), with_authorities(new, both), new):
                cluster.renew(secrets)
                cluster.wait_renewed(secrets)
                progress()
            # Also for who comes only now
            status = cluster.pods[CLIENT].run("python", "-m", "slatemq.cli", "status")
            assert "serving" in status
        assert lives == {name: cluster.pods[name].started_at for name in cluster.services}
    finally:
        cluster.renew(with_authorities(old, both))
        cluster.wait_renewed(old)
