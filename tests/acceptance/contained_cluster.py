"""The pods of the laptop's overlay as containers: what a kubelet makes of the manifests.

Image, command, environment, user, read-only root, volumes with the modes of Secrets, memory; a
pod's probes run in its container. A network with the names of the pods stands for the cluster's.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from libs.serving.process.exits import EXIT_CLEAN
from slatemq.cli.access.dev_access import make_for_containers
from tests.acceptance.compose_project import output_of
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.acceptance.test_manifests_run import CONSOLE, SERVICES, secrets_of
from tests.kubernetes.manifests import FOLDER, Manifest, named, rendered, workloads
from tests.kubernetes.pods import Pod, pods_of
from tests.kubernetes.volumes import Volume
from tests.memory_bounds import bytes_of

RUN = f"slatemq-manifests-{os.getpid()}"
"""Names the network and the containers, and is the tag of the images."""

LOAD = f"{RUN}-load"
START_S = 240
CLIENT = "slatemq-client"

HOSTS = [
    "*.slatemq-ingest.slatemq.svc",
    "*.slatemq-broker.slatemq.svc",
    "*.slatemq-router.slatemq.svc",
    "slatemq-ingest.slatemq.svc",
    "slatemq-router.slatemq.svc",
    "slatemq-janitor.slatemq.svc",
]
"""Those of the certificate that the page has one make."""

GIVE_TO_GROUP = """
import os, sys
for folder, folders, files in os.walk(sys.argv[1]):
    for name in [".", *folders, *files]:
        os.chown(os.path.join(folder, name), 0, 1000, follow_symlinks=False)
"""
"""What fsGroup does with a volume."""

SHOWN = """
import ssl, sys
print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2])), timeout=10))
"""
"""Prints the certificate with which a port answers."""


docker = partial(output_of, "docker")
"""Its output. Raises AssertionError with it if it fails."""


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
        self.start_anew()

    def start_anew(self) -> None:
        """Start its successor, once it is gone."""
        self._environ["SLATEMQ_OWNER_NAME"] = uuid.uuid4().hex
        self.start()

    @property
    def started_at(self) -> str:
        """When its process was started, which no other start has."""
        return docker("inspect", "--format", "{{.State.StartedAt}}", self.name).strip()

    @property
    def ports(self) -> list[int]:
        return [one["containerPort"] for one in self._container.get("ports", ())]

    @property
    def tls(self) -> str:
        """The name of the Secret that has its certificate; of the client there is none."""
        mounted = {one.get("secret", {}).get("secretName") for one in self._spec["volumes"]}
        (name,) = mounted & {SERVICES, CONSOLE}
        return str(name)

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
        self.secrets = secrets_of(access, console)
        volumes = folder / "volumes"
        volumes.mkdir()
        self._folder = volumes
        (volumes / "data").mkdir()
        (volumes / "data").chmod(0o2770)
        self._changing = {name: Volume(volumes / name, of) for name, of in self.secrets.items()}
        Volume(volumes / "tokens", {"tokens.yaml": (access / "tokens.yaml").read_bytes()})
        policy = named(manifests, "ConfigMap", "slatemq-policy")["data"]
        Volume(volumes / "policy", {name: text.encode() for name, text in policy.items()})
        self._token = (access / "operator.token").read_bytes()
        files = self._of_client(self.secrets)
        self._changing[CLIENT] = Volume(volumes / CLIENT, files)

        for workload in workloads(manifests):
            for pod in pods_of(manifests, workload):
                self._add(pod.name, pod.spec, pod.environ, _hosts(pod))
        client: Any = yaml.safe_load((FOLDER / "examples/client.yaml").read_text())
        (container,) = client["spec"]["containers"]
        self._client_environ = {one["name"]: one["value"] for one in container["env"]}
        self._add(CLIENT, client["spec"], self._client_environ, [])

    def _of_client(self, secrets: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
        """The Secret of those who connect: whom they trust is whom the services trust."""
        return {"ca.crt": secrets[SERVICES]["ca.crt"], "operator.token": self._token}

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
        self._give_to_group(".")
        for pod in self.pods.values():
            pod.start()

    def _give_to_group(self, volume: str) -> None:
        options = ["run", "--rm", "--user", "0:0", "--volume", f"{self._folder}:/volumes"]
        image = image_of(self._containers[CLIENT])
        docker(*options, image, "python", "-c", GIVE_TO_GROUP, f"/volumes/{volume}")

    def wait_ready(self, *names: str) -> None:
        """Wait for these pods, or for all of them."""
        for name in names or self.services:
            pod = self.pods[name]
            wait_until(lambda pod=pod: pod.probe("readinessProbe"), START_S)

    @property
    def services(self) -> list[str]:
        """The names of all pods but the client's."""
        return [name for name in self.pods if name != CLIENT]

    def lose(self, *names: str) -> None:
        """Kill pods at once, as the death of their node does."""
        lost = [self.pods[name].name for name in names]
        docker("kill", *lost)
        docker("rm", *lost)

    def renew(self, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Change the Secrets, those of the clients, too, as a kubelet does."""
        for name, files in {**secrets, CLIENT: self._of_client(secrets)}.items():
            self._changing[name].change(files, partial(self._give_to_group, name))

    def wait_renewed(self, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Wait until each pod shows the certificate of its Secret to those who connect."""
        for name in self.services:
            pod = self.pods[name]
            pem = secrets[pod.tls]["tls.crt"].decode()
            for port in pod.ports:
                wait_until(partial(self._shows, pod, port, ssl.PEM_cert_to_DER_cert(pem)), START_S)

    def _shows(self, pod: ContainedPod, port: int, certificate: bytes) -> bool:
        shown = self.pods[CLIENT].run("python", "-c", SHOWN, pod.name, str(port))
        return ssl.PEM_cert_to_DER_cert(shown) == certificate

    @contextmanager
    def load(self, *queues: str) -> Iterator[Callable[[], None]]:
        """A client publishes and consumes until the block ends, by when nothing may be lost.

        Yields what waits until it has got on.
        """
        volumes = (f"{REPOSITORY / 'tests'}:/app/tests:ro", f"{self._folder / CLIENT}:/access:ro")
        options = [
            *("run", "--rm", "--interactive", "--name", LOAD, "--network", RUN),
            *("--user", f"{os.getuid()}:1000"),
            *(part for one in volumes for part in ("--volume", one)),
            *(part for one in self._client_environ.items() for part in ("--env", "=".join(one))),
        ]
        module = ("python", "-m", "tests.acceptance.contained_load")
        command = ["docker", *options, image_of(self._containers[CLIENT]), *module, *queues]
        log = self._folder.parent / "load.log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):

            def do(word: str) -> None:
                assert process.stdin is not None
                assert process.stdout is not None
                with suppress(BrokenPipeError):
                    print(word, file=process.stdin, flush=True)
                assert process.stdout.readline() == f"{word} done\n", log.read_text()

            do("progress")
            yield partial(do, "progress")
            do("progress")
            do("finish")

    def close(self) -> None:
        names = [LOAD, *(pod.name for pod in self.pods.values())]
        subprocess.run(["docker", "rm", "--force", *names], capture_output=True, check=False)
        subprocess.run(["docker", "network", "rm", RUN], capture_output=True, check=False)
        images = [image_of(one) for one in self._containers.values()]
        subprocess.run(["docker", "rmi", *{*images}], capture_output=True, check=False)


def _hosts(pod: Pod) -> list[str]:
    """The names under which the cluster's DNS has a pod: its own, and that of its Service."""
    names = ("SLATEMQ_ADVERTISED_ADDRESS", "SLATEMQ_PEER_ADDRESS")
    hosts = {pod.environ[name].rpartition(":")[0] for name in names if name in pod.environ}
    return sorted(hosts | {host.removeprefix(f"{pod.name}.") for host in hosts})
