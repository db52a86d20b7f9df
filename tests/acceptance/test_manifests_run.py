"""What the manifests say, as processes: no cluster is needed to see that they serve.

The laptop's overlay, with a second shard of each owner: command, environment and probes as they
stand there. Only what a machine without a cluster lacks is replaced: an address of the loopback
network stands for each pod's own, and its name; folders stand for the volumes.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import slatemq.sync
from libs.serving.process.exits import EXIT_CLEAN, EXIT_FENCED
from slatemq.cli.access.dev_access import make_access
from slatemq.credentials import Credentials
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.kubernetes.manifests import Manifest, named, rendered, workloads
from tests.kubernetes.pods import Pod, pods_of
from tests.ready_process import popen

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # Seven pods, which are processes.


class RunningPod:
    """One pod as a process. `address` is its own; its ports are those of the manifest."""

    def __init__(self, pod: Pod, address: str, environ: dict[str, str], folder: Path) -> None:
        self.pod, self.address = pod, address
        self._environ = {**_machine(), **environ}
        self._log = folder / f"{pod.name}.log"
        self.process: Any = None

    def start(self) -> None:
        _, *module = self.pod.container["command"]
        with self._log.open("ab") as log:
            self.process = popen(
                [sys.executable, *module], cwd=REPOSITORY, env=self._environ, stderr=log
            )

    def probe(self, kind: str) -> bool:
        """Whether a probe of the manifest passes."""
        _, *words = self.pod.probe(kind)
        command = [sys.executable, *(word.replace("127.0.0.1", self.address) for word in words)]
        done = subprocess.run(command, cwd=REPOSITORY, env=self._environ, capture_output=True)
        return done.returncode == 0

    @property
    def said(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=60)


class Cluster:
    """All pods of the manifests, started at once, as a cluster does."""

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder = folder
        network = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250 + 1}"
        pods = [pod for one in workloads(manifests) for pod in pods_of(manifests, one)]
        addresses = {pod.name: f"{network}.{number}" for number, pod in enumerate(pods, 1)}
        make_access(folder / "access", [*addresses.values()])
        self._lay_volumes(manifests)
        self.pods = [
            RunningPod(pod, addresses[pod.name], self._environ(pod, addresses), folder)
            for pod in pods
        ]

    def _lay_volumes(self, manifests: list[Manifest]) -> None:
        made = self.folder / "access"
        for folder, files in {
            "tls": {"ca.crt": "ca.crt", "tls.crt": "service.crt", "tls.key": "service.key"},
            "tokens": {"tokens.yaml": "tokens.yaml"},
        }.items():
            (self.folder / folder).mkdir()
            for name, source in files.items():
                (self.folder / folder / name).write_bytes((made / source).read_bytes())
                (self.folder / folder / name).chmod(0o440)
        (self.folder / "policy").mkdir()
        policy = named(manifests, "ConfigMap", "slatemq-policy")["data"]
        for name, text in policy.items():
            (self.folder / "policy" / name).write_text(text)

    def _environ(self, pod: Pod, addresses: dict[str, str]) -> dict[str, str]:
        mounts = {
            mount["mountPath"]: str(self.folder / mount["name"])
            for mount in pod.container["volumeMounts"]
        }
        environ = {name: _in_folder(value, mounts) for name, value in pod.environ.items()}
        environ["SLATEMQ_HOST"] = addresses[pod.name]
        for name in ("SLATEMQ_ADVERTISED_ADDRESS", "SLATEMQ_PEER_ADDRESS", "SLATEMQ_ENDPOINT"):
            if name in environ:
                host, _, port = environ[name].rpartition(":")
                environ[name] = f"{_address(host, addresses)}:{port}"
        return environ

    def of(self, service: str) -> list[RunningPod]:
        return [one for one in self.pods if one.pod.service == service]

    @property
    def endpoint(self) -> str:
        return f"{self.of('ingest')[0].address}:{self.of('ingest')[0].pod.ports['clients']}"

    @property
    def credentials(self) -> Credentials:
        access = self.folder / "access"
        return Credentials(ca=access / "ca.crt", token_file=access / "operator.token")


def _machine() -> dict[str, str]:
    """The variables of this machine that an image would set, or that tests need."""
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _in_folder(value: str, mounts: dict[str, str]) -> str:
    """The value, where it is a path below a mount or its URL, with the folder in its place."""
    path = value.removeprefix("file://")
    scheme = value[: len(value) - len(path)]
    for mounted, folder in mounts.items():
        if path == mounted or path.startswith(mounted + "/"):
            return f"{scheme}{folder}{path[len(mounted) :]}"
    return value


def _address(host: str, addresses: dict[str, str]) -> str:
    """What the cluster's DNS answers for a pod of a headless Service, or for a Service."""
    first = host.partition(".")[0]
    if first in addresses:
        return addresses[first]
    return next(address for name, address in addresses.items() if name.startswith(first + "-"))


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    manifests = deepcopy(rendered("laptop"))
    for name in ("slatemq-ingest", "slatemq-broker"):
        named(manifests, "StatefulSet", name)["spec"]["replicas"] = 2
    return manifests


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, manifests: list[Manifest]
) -> Iterator[Cluster]:
    with socket.socket() as probe:
        try:
            probe.bind(("127.20.1.1", 0))
        except OSError:
            pytest.skip("this machine has no loopback network, only 127.0.0.1")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), manifests)
    try:
        for pod in cluster.pods:
            pod.start()
        yield cluster
    finally:
        for pod in cluster.pods:
            pod.kill()


def test_all_probes_pass_once_the_pods_serve(cluster: Cluster) -> None:
    for pod in cluster.pods:
        wait_until(lambda pod=pod: pod.probe("readinessProbe"), 120)
        assert pod.probe("startupProbe")
        assert pod.probe("livenessProbe")
        assert "unknown environment variables" not in pod.said


def test_messages_go_through_them(cluster: Cluster) -> None:
    wait_until(lambda: all(pod.probe("readinessProbe") for pod in cluster.pods), 120)
    with slatemq.sync.connect(cluster.endpoint, credentials=cluster.credentials) as client:
        for number in range(8):
            queue = client.create_queue(f"orders-{number}")
            client.publish(b"a lamp", {"queue": queue.queue_id})
            with client.consume(queue.queue_id) as messages:
                for message in messages:
                    with message:
                        assert message.payload == b"a lamp"
                    break


def test_a_pod_that_is_deleted_drains_within_its_grace_and_its_successor_serves(
    cluster: Cluster,
) -> None:
    broker = cluster.of("broker")[1]
    broker.process.send_signal(signal.SIGTERM)
    grace: int = broker.pod.spec["terminationGracePeriodSeconds"]
    assert broker.process.wait(timeout=grace) == EXIT_CLEAN
    assert not broker.probe("livenessProbe")

    # When the StatefulSet makes it anew, which has a UID of its own
    old = dict(broker._environ)
    broker._environ["SLATEMQ_OWNER_NAME"] = "another"
    broker.start()
    wait_until(lambda: broker.probe("readinessProbe"), 120)

    # Then the pod before does not come back, and the new one goes on
    new, broker._environ = broker._environ, old
    running = broker.process
    broker._environ |= {"SLATEMQ_PORT": "0", "SLATEMQ_PEER_PORT": "0"}
    broker.start()
    assert broker.process.wait(timeout=60) == EXIT_FENCED
    broker.process, broker._environ = running, new
    assert broker.probe("readinessProbe")
