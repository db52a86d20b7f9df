"""What the manifests say, as containers of the images: `make compose-test`. Needs Docker.

The laptop's overlay and the pod of the page, as they stand there: image, command, environment,
user, read-only root, volumes with the modes of Secrets, memory; a pod's probes run in its
container. A network with the names of the pods stands for the cluster's. What schedules and
replaces pods is missing: tests/acceptance/test_manifests_run.py does that, under load.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.serving.process.exits import EXIT_CLEAN
from slatemq.cli.access.dev_access import make_for_containers
from tests.acceptance.compose_project import missing
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.acceptance.test_manifests_run import secrets_of
from tests.kubernetes.manifests import FOLDER, Manifest, named, rendered, workloads
from tests.kubernetes.pods import Pod, pods_of
from tests.kubernetes.volumes import Volume
from tests.memory_bounds import bytes_of

pytestmark = [pytest.mark.compose, pytest.mark.slow]

RUN = f"slatemq-manifests-{os.getpid()}"
"""Names the network and the containers, and is the tag of the images."""

START_S = 240
CLIENT = "slatemq-client"

HOSTS = [
    "*.slatemq-ingest.slatemq.svc",
    "*.slatemq-broker.slatemq.svc",
    "slatemq-router.slatemq.svc",
    "slatemq-janitor.slatemq.svc",
]
"""Those of the certificate that the page has one make."""

GIVE_TO_GROUP = """
import os, sys
for folder, folders, files in os.walk("/volumes"):
    for name in [".", *folders, *files]:
        os.chown(os.path.join(folder, name), 0, 1000, follow_symlinks=False)
os.chmod("/volumes/data", 0o2770)
"""
"""What fsGroup does with volumes."""

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


def docker(*arguments: str, given: str | None = None) -> str:
    """The output of a command. Raises AssertionError with it if it fails."""
    done = subprocess.run(
        ["docker", *arguments],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stdout[-4000:]}"
    return done.stdout


def image_of(container: Manifest) -> str:
    """That of this run, of the service whose image a manifest names."""
    return f"{container['image'].partition(':')[0]}:{RUN}"


class ContainedPod:
    """One pod as a container."""

    def __init__(
        self,
        name: str,
        spec: Manifest,
        environ: Mapping[str, str],
        volumes: Mapping[str, Path],
        hosts: list[str],
    ) -> None:
        """`volumes` has the folders of those that are not of the pod alone, by their names."""
        self.name, self._spec, self._environ = f"{RUN}-{name}", spec, dict(environ)
        (self._container,) = spec["containers"]
        self._volumes, self._hosts = volumes, hosts

    def start(self) -> None:
        security = self._spec["securityContext"]
        restricted = self._container["securityContext"]
        assert restricted["capabilities"] == {"drop": ["ALL"]}
        assert restricted["readOnlyRootFilesystem"]
        limit = bytes_of(self._container["resources"]["limits"]["memory"])
        options = [
            *("--name", self.name, "--network", RUN, "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--memory", str(limit)),
            *("--user", f"{security['runAsUser']}:{security['runAsGroup']}"),
            *(part for host in self._hosts for part in ("--network-alias", host)),
            *(part for one in self._environ.items() for part in ("--env", "=".join(one))),
        ]
        for mount in self._container["volumeMounts"]:
            if mount["name"] in self._volumes:
                mode = "ro" if mount.get("readOnly") else "rw"
                source = self._volumes[mount["name"]]
                options += ["--volume", f"{source}:{mount['mountPath']}:{mode}"]
            else:
                options += ["--tmpfs", mount["mountPath"]]
        docker("run", "--detach", *options, image_of(self._container), *self._container["command"])

    def probe(self, kind: str) -> bool:
        command = ["docker", "exec", self.name, *self._container[kind]["exec"]["command"]]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def run(self, *command: str, given: str | None = None) -> str:
        """The output of a command in it."""
        return docker("exec", "--interactive", self.name, *command, given=given)

    def delete(self) -> None:
        """End it as a kubelet does."""
        grace = self._spec["terminationGracePeriodSeconds"]
        docker("stop", "--time", str(grace), self.name)
        code = docker("inspect", "--format", "{{.State.ExitCode}}", self.name)
        docker("rm", self.name)
        assert int(code) == EXIT_CLEAN

    def replace(self) -> None:
        """Delete it, and start its successor, which has a UID of its own."""
        self.delete()
        self._environ["SLATEMQ_OWNER_NAME"] = uuid.uuid4().hex
        self.start()

    @property
    def said(self) -> str:
        return docker("logs", "--tail", "50", self.name)


class ContainedCluster:
    """All pods of the laptop's overlay, and the one that the page has one look from."""

    def __init__(self, folder: Path) -> None:
        manifests = rendered("laptop")
        self.pods: dict[str, ContainedPod] = {}
        self._containers: dict[str, Manifest] = {}
        access, console = folder / "made", folder / "made-console"
        make_for_containers(access, console, HOSTS)
        volumes = folder / "volumes"
        volumes.mkdir()
        self._folder = volumes
        (volumes / "data").mkdir()
        for name, files in secrets_of(access, console).items():
            Volume(volumes / name, files)
        Volume(volumes / "tokens", {"tokens.yaml": (access / "tokens.yaml").read_bytes()})
        policy = named(manifests, "ConfigMap", "slatemq-policy")["data"]
        Volume(volumes / "policy", {name: text.encode() for name, text in policy.items()})
        proofs = ("ca.crt", "operator.token")
        Volume(volumes / CLIENT, {name: (access / name).read_bytes() for name in proofs})

        for workload in workloads(manifests):
            for pod in pods_of(manifests, workload):
                self._add(pod.name, pod.spec, pod.environ, _hosts(pod))
        client: Any = yaml.safe_load((FOLDER / "examples/client.yaml").read_text())
        environ = {one["name"]: one["value"] for one in client["spec"]["containers"][0]["env"]}
        self._add(CLIENT, client["spec"], environ, [])

    def _add(self, name: str, spec: Manifest, environ: Mapping[str, str], hosts: list[str]) -> None:
        folders = {"data": self._folder / "data"}
        for one in spec["volumes"]:
            if "secret" in one:
                of = one["secret"]["secretName"].replace("slatemq-tokens", "tokens")
                folders[one["name"]] = self._folder / of
            elif "configMap" in one:
                folders[one["name"]] = self._folder / "policy"
        self.pods[name] = ContainedPod(name, spec, environ, folders, hosts)
        (container,) = spec["containers"]
        self._containers[name] = container

    def start(self) -> None:
        services = {one["image"].partition(":")[0] for one in self._containers.values()}
        for image in sorted(services):
            service = image.removeprefix("slatemq-")
            build = ["build", "--quiet", "--build-arg", f"SERVICE={service}"]
            docker(*build, "--tag", f"{image}:{RUN}", str(REPOSITORY))
        docker("network", "create", RUN)
        give = ["run", "--rm", "--user", "0:0", "--volume", f"{self._folder}:/volumes"]
        docker(*give, f"slatemq-console:{RUN}", "python", "-c", GIVE_TO_GROUP)
        for pod in self.pods.values():
            pod.start()

    def wait_ready(self) -> None:
        for name, pod in self.pods.items():
            if name != CLIENT:
                wait_until(lambda pod=pod: pod.probe("readinessProbe"), START_S)

    def close(self) -> None:
        names = [pod.name for pod in self.pods.values()]
        subprocess.run(["docker", "rm", "--force", *names], capture_output=True, check=False)
        subprocess.run(["docker", "network", "rm", RUN], capture_output=True, check=False)
        images = [image_of(one) for one in self._containers.values()]
        subprocess.run(["docker", "rmi", *{*images}], capture_output=True, check=False)


def _hosts(pod: Pod) -> list[str]:
    """The names under which the cluster's DNS has a pod."""
    names = ("SLATEMQ_ADVERTISED_ADDRESS", "SLATEMQ_PEER_ADDRESS")
    return sorted({pod.environ[name].rpartition(":")[0] for name in names if name in pod.environ})


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
