"""What the manifests say, as processes: no cluster is needed to see that they serve, and go on
under load while pods are replaced, a node dies, and certificates are renewed.

The laptop's overlay, with a second shard of each owner and a second router: command, environment
and probes as they stand there. Only what a machine without a cluster lacks is replaced: an address
of the loopback network stands for each pod's own, and its name; folders stand for the volumes.
"""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

import slatemq
import slatemq.sync
from libs.serving.process.exits import EXIT_CLEAN, EXIT_FENCED
from slatemq.cli.access.dev_access import make_for_containers
from slatemq.credentials import Credentials
from tests import patient_standby
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.acceptance.steady_load import SteadyLoad
from tests.forms import proof
from tests.kubernetes.manifests import (
    LAPTOP_WITH_STANDBYS,
    Manifest,
    named,
    rendered,
    workloads,
)
from tests.kubernetes.pods import Pod, pods_of
from tests.kubernetes.volumes import Volume
from tests.ready_process import popen

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # Eight pods, which are processes.


SERVICES, CONSOLE = "slatemq-service-tls", "slatemq-console-tls"

CONFINED = """
mount --make-rprivate / || exit 1
for folder in $WRITABLE; do mount --bind $folder $folder || exit 1; done
mount -o bind,remount,ro / || exit 1
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
"""Runs a program with a root that is read only, WRITABLE aside, and without capabilities."""


class RunningPod:
    """One pod as a process. `address` is its own; its ports are those of the manifest."""

    def __init__(self, pod: Pod, address: str, environ: dict[str, str], folder: Path) -> None:
        self.pod, self.address, self.folder = pod, address, folder
        self._environ = {**_machine(), **environ}
        self._log = folder / f"{pod.name}.log"
        self.process: Any = None

    def replace(self) -> None:
        """End it as a kubelet does; its successor has a UID of its own."""
        self.stop()
        self.start_anew()

    def stop(self) -> None:
        """End it as a kubelet does."""
        self.process.send_signal(signal.SIGTERM)
        grace: int = self.pod.spec["terminationGracePeriodSeconds"]
        assert self.process.wait(timeout=grace) == EXIT_CLEAN

    def start_anew(self) -> None:
        """Start its successor, once it is gone."""
        self._environ["SLATEMQ_OWNER_NAME"] = uuid.uuid4().hex
        self.start()

    def start(self) -> None:
        _, option, *module = self.pod.container["command"]
        if "SLATEMQ_STANDBY" in self._environ:  # A kubelet would start it again: this does not.
            module.insert(0, patient_standby.MODULE)
        with self._log.open("ab") as log:
            self.process = popen(
                [sys.executable, option, *module], cwd=REPOSITORY, env=self._environ, stderr=log
            )

    def start_confined(self) -> None:
        """Start it with what its manifest mounts, and nothing else that can be written."""
        paths = {
            one["mountPath"]: one.get("readOnly") for one in self.pod.container["volumeMounts"]
        }
        writable = [self.folder / "data"] if "/data" in paths and not paths["/data"] else []
        temporary = "/nonexistent"
        if "/tmp" in paths:
            (folder := self.folder / f"{self.pod.name}-tmp").mkdir()
            writable.append(folder)
            temporary = str(folder)
        environ = {"WRITABLE": " ".join(map(str, writable)), "TMPDIR": temporary}
        _, *module = self.pod.container["command"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", CONFINED, "sh", sys.executable, *module],
                cwd=REPOSITORY,
                env={**self._environ, **environ},
                stderr=log,
            )

    def probe(self, kind: str) -> bool:
        """Whether a probe of the manifest passes."""
        return self._passes(self.pod.probe(kind))

    def _passes(self, probe: list[str]) -> bool:
        _, *words = probe
        command = [sys.executable, *(word.replace("127.0.0.1", self.address) for word in words)]
        done = subprocess.run(command, cwd=REPOSITORY, env=self._environ, capture_output=True)
        return done.returncode == 0

    @property
    def serves(self) -> bool:
        """Whether it owns its shard, where its readiness probe passes for a standby, too."""
        python, *words, address = self.pod.probe("readinessProbe")
        command = [*(word for word in words if word != "--answers"), address]
        return self._passes([python, *command])

    def shows(self, port: int) -> bytes:
        """The certificate with which it answers there."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((self.address, port), timeout=10) as plain,
            context.wrap_socket(plain) as connection,
        ):
            return connection.getpeercert(binary_form=True) or b""

    @property
    def said(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=60)


class Cluster:
    """All pods of the manifests, started at once, as a cluster does."""

    def __init__(self, folder: Path, manifests: list[Manifest], address_shift: int = 0) -> None:
        """`address_shift` keeps the addresses of two clusters of one process apart."""
        self.folder = folder
        network = f"127.{os.getpid() % 200 + 20 + address_shift}.{os.getpid() // 200 % 250 + 1}"
        pods = [pod for one in workloads(manifests) for pod in pods_of(manifests, one)]
        addresses = {pod.name: f"{network}.{number}" for number, pod in enumerate(pods, 1)}
        self.hosts = [*addresses.values()]
        make_for_containers(folder / "access", folder / "console", self.hosts)
        self._lay_volumes(manifests)
        self.pods = [
            RunningPod(pod, addresses[pod.name], self._environ(pod, addresses), folder)
            for pod in pods
        ]

    def _lay_volumes(self, manifests: list[Manifest]) -> None:
        made = self.folder / "access"
        self.tls = {
            secret: Volume(self.folder / secret, files)
            for secret, files in secrets_of(made, self.folder / "console").items()
        }
        tokens = {"tokens.yaml": (made / "tokens.yaml").read_bytes()}
        Volume(self.folder / "slatemq-tokens", tokens)
        policy = named(manifests, "ConfigMap", "slatemq-policy")["data"]
        texts = {name: text.encode() for name, text in policy.items()}
        Volume(self.folder / "policy", texts)

    def _environ(self, pod: Pod, addresses: dict[str, str]) -> dict[str, str]:
        volumes = {
            one["name"]: one.get("secret", {}).get("secretName", one["name"])
            for one in pod.spec["volumes"]
        }
        mounts = {
            mount["mountPath"]: str(self.folder / volumes[mount["name"]])
            for mount in pod.container["volumeMounts"]
        }
        environ = {name: _in_folder(value, mounts) for name, value in pod.environ.items()}
        environ["SLATEMQ_HOST"] = addresses[pod.name]
        for name in ("SLATEMQ_ADVERTISED_ADDRESS", "SLATEMQ_PEER_ADDRESS", "SLATEMQ_ENDPOINT"):
            if name in environ:
                named_hosts = (one.rpartition(":") for one in environ[name].split(","))
                found = [f"{_address(host, addresses)}:{port}" for host, _, port in named_hosts]
                environ[name] = ",".join(found)
        return environ

    def of(self, service: str) -> list[RunningPod]:
        return [one for one in self.pods if one.pod.service == service]

    @property
    def endpoint(self) -> str:
        return f"{self.of('ingest')[0].address}:{self.of('ingest')[0].pod.ports['clients']}"

    @property
    def credentials(self) -> Credentials:
        token = self.folder / "access" / "operator.token"
        return Credentials(ca=self.tls[SERVICES].folder / "ca.crt", token_file=token)

    def wait_ready(self, *pods: RunningPod) -> None:
        for pod in pods or self.pods:
            wait_until(lambda pod=pod: pod.probe("readinessProbe"), 120)

    def renew(self, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Change the Secrets, as cert-manager does."""
        for secret, files in secrets.items():
            self.tls[secret].change(files)

    def wait_renewed(self, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Wait until each pod shows the certificate of its Secret to those who connect."""
        for pod in self.pods:
            (mounted,) = (one for one in pod.pod.spec["volumes"] if one["name"] == "tls")
            pem = secrets[mounted["secret"]["secretName"]]["tls.crt"].decode()
            for port in pod.pod.ports.values():
                wait_until(partial(_shows, pod, port, ssl.PEM_cert_to_DER_cert(pem)), 60)

    @asynccontextmanager
    async def load(self, *names: str) -> AsyncIterator[SteadyLoad]:
        """Publishes and consumes by a client until the block ends, then nothing is left."""
        async with slatemq.connect(
            self.endpoint, credentials=self.credentials, call_timeout=120
        ) as client:
            for name in names:
                await client.create_queue(name, filter=f'headers.queue == "{name}"')
            load = SteadyLoad(client, names)
            load.start()
            try:
                await load.progress()
                yield load
                await load.progress()
                await load.finish()
            finally:
                await load.stop()
        load.check_nothing_lost()


def _shows(pod: RunningPod, port: int, certificate: bytes) -> bool:
    return pod.shows(port) == certificate


def secrets_of(access: Path, console: Path) -> dict[str, dict[str, bytes]]:
    """The Secrets with certificates, of what was made in these folders, by their names."""
    return {
        secret: {
            "ca.crt": (folder / "ca.crt").read_bytes(),
            "tls.crt": (folder / f"{name}.crt").read_bytes(),
            "tls.key": (folder / f"{name}.key").read_bytes(),
        }
        for secret, folder, name in (
            (SERVICES, access, "service"),
            (CONSOLE, console, "console"),
        )
    }


def with_authorities(
    secrets: Mapping[str, Mapping[str, bytes]], authorities: bytes
) -> dict[str, dict[str, bytes]]:
    return {secret: {**files, "ca.crt": authorities} for secret, files in secrets.items()}


def as_cert_manager_writes(key: bytes) -> bytes:
    """A private key in the form that cert-manager gives it by default, which is older."""
    loaded = serialization.load_pem_private_key(key, None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


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
    for name in ("slatemq-ingest", "slatemq-broker", "slatemq-router"):
        named(manifests, "StatefulSet", name)["spec"]["replicas"] = 2
    return manifests


@pytest.fixture(scope="module")
def loopback() -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.20.1.1", 0))
        except OSError:
            pytest.skip("this machine has no loopback network, only 127.0.0.1")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, manifests: list[Manifest], loopback: None
) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), manifests)
    try:
        for pod in cluster.pods:
            pod.start()
        yield cluster
    finally:
        for pod in cluster.pods:
            pod.kill()


def test_all_probes_pass_once_the_pods_serve(cluster: Cluster) -> None:
    cluster.wait_ready()
    for pod in cluster.pods:
        for kind in ("startupProbe", "livenessProbe"):
            wait_until(partial(pod.probe, kind), 60)
        assert "unknown environment variables" not in pod.said


def test_messages_go_through_them(cluster: Cluster) -> None:
    cluster.wait_ready()
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
    cluster.wait_ready()
    broker = cluster.of("broker")[1]
    broker.process.send_signal(signal.SIGTERM)
    grace: int = broker.pod.spec["terminationGracePeriodSeconds"]
    assert broker.process.wait(timeout=grace) == EXIT_CLEAN
    assert not broker.probe("livenessProbe")

    # When the StatefulSet makes it again, which has a UID of its own
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
    wait_until(lambda: broker.probe("readinessProbe"), 60)


@pytest.mark.parametrize("rounds", [1, proof(10)])
async def test_pods_are_replaced_one_by_one_under_load_and_nothing_is_lost(
    cluster: Cluster, rounds: int
) -> None:
    cluster.wait_ready()
    async with cluster.load(f"upgraded-{rounds}-0", f"upgraded-{rounds}-1") as load:
        for _ in range(rounds):
            # As a StatefulSet does: the highest ordinal first, the next one once it is ready
            for service in ("ingest", "broker", "router"):
                for pod in reversed(cluster.of(service)):
                    await asyncio.to_thread(pod.replace)
                    await asyncio.to_thread(cluster.wait_ready, pod)
                    await load.progress()


@pytest.mark.parametrize("rounds", [1, proof(10)])
async def test_a_node_dies_under_load_and_nothing_is_lost(cluster: Cluster, rounds: int) -> None:
    cluster.wait_ready()
    async with cluster.load(f"moved-{rounds}-0", f"moved-{rounds}-1") as load:
        for number in range(rounds):
            # With a shard of each kind, and both routers
            lost = [cluster.of(service)[number % -2] for service in ("ingest", "broker")]
            lost += cluster.of("router")
            for pod in lost:
                pod.kill()
            for pod in lost:
                pod.start_anew()
            await asyncio.to_thread(cluster.wait_ready, *lost)
            await load.progress()


@pytest.mark.proof
def test_pods_write_nothing_but_their_volumes_and_need_no_capability(
    tmp_path: Path, manifests: list[Manifest]
) -> None:
    confined = subprocess.run(["unshare", "-m", "sh", "-c", CONFINED, "sh", "true"])
    if confined.returncode:
        pytest.skip("no process here may have mounts of its own")
    (tmp_path / "data").mkdir()
    cluster = Cluster(tmp_path, manifests, address_shift=1)
    try:
        for pod in cluster.pods:
            pod.start_confined()
        cluster.wait_ready()
        test_messages_go_through_them(cluster)
    finally:
        for pod in cluster.pods:
            pod.kill()


async def test_certificates_and_their_authority_are_renewed_under_load(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.wait_ready()
    names = ("renewed-0", "renewed-1")
    old = secrets_of(cluster.folder / "access", cluster.folder / "console")
    make_for_containers(tmp_path / "new", tmp_path / "new-console", cluster.hosts)
    new = secrets_of(tmp_path / "new", tmp_path / "new-console")
    for files in new.values():
        files["tls.key"] = as_cert_manager_writes(files["tls.key"])
    both = old[SERVICES]["ca.crt"] + new[SERVICES]["ca.crt"]
    pids = [pod.process.pid for pod in cluster.pods]
    try:
        async with cluster.load(*names) as load:
            # First all trust both authorities, then all have certificates of the new one, then
            # none trusts the old one any more
            for secrets in (with_authorities(old, both), with_authorities(new, both), new):
                cluster.renew(secrets)
                await asyncio.to_thread(cluster.wait_renewed, secrets)
                await load.progress()
            # Also for who comes only now
            async with slatemq.connect(
                cluster.endpoint, credentials=cluster.credentials
            ) as another:
                assert {one.queue_id async for one in another.list_queues()} >= {*names}
        assert pids == [pod.process.pid for pod in cluster.pods]
    finally:
        cluster.renew(with_authorities(old, both))


async def test_standbys_take_the_shards_of_a_dead_node_and_of_pods_that_are_updated(
    tmp_path: Path, loopback: None
) -> None:
    cluster = Cluster(tmp_path, rendered(LAPTOP_WITH_STANDBYS), address_shift=2)
    pairs = [cluster.of(service) for service in ("ingest", "broker")]
    assert [len(pair) for pair in pairs] == [2, 2]

    def serving() -> list[RunningPod]:
        return [pod for pair in pairs for pod in pair if pod.serves]

    async def until_serving() -> list[RunningPod]:
        seen: list[RunningPod] = []

        def is_each_shard_served() -> bool:
            seen[:] = serving()
            return len(seen) == len(pairs)

        await asyncio.to_thread(wait_until, is_each_shard_served, 120)
        return seen

    try:
        for pod in cluster.pods:
            pod.start()
        await asyncio.to_thread(cluster.wait_ready)
        owners = await until_serving()
        async with cluster.load("standby-0", "standby-1") as load:
            # When the node of both owners dies, the other pods of their shards serve
            for pod in owners:
                pod.kill()
            await load.progress()
            standbys = await until_serving()
            assert not {*standbys} & {*owners}

            # Then those that come back are ready, and wait
            for pod in owners:
                pod.start()
            await asyncio.to_thread(cluster.wait_ready, *owners)
            await load.progress()
            assert await until_serving() == standbys

            # And when an update replaces those that serve, the others take over once more
            for pod, other in zip(standbys, owners, strict=True):
                await asyncio.to_thread(pod.stop)
                await asyncio.to_thread(wait_until, lambda one=other: one.serves, 120)
                pod.start_anew()
                await asyncio.to_thread(cluster.wait_ready, pod)
                await load.progress()
            assert await until_serving() == owners
    finally:
        for pod in cluster.pods:
            pod.kill()
