"""The pages on Kubernetes: what their commands and files make is what the manifests need."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from libs.serving.process.config import load
from services.janitor.backup.command import parse as parse_backup
from services.janitor.config import JanitorConfig
from slatemq.cli.access.dev_access import main as make_dev_access
from slatemq.variables import KNOWN
from tests.kubernetes.manifests import (
    FOLDER,
    PAGE,
    WITH_KEDA,
    built,
    containers,
    kustomizations,
    named,
    namespaces,
    of_kind,
    rendered,
    workloads,
)
from tests.kubernetes.pods import pods_of
from tests.unit.test_docs import commands

DEV_ACCESS = "slatemq.cli.access.dev_access"


def test_the_certificates_of_the_page_have_the_names_that_laptop_pods_advertise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given what the page for a laptop makes, and the Secrets that it makes of it
    words = [shlex.split(line) for line in commands(PAGE)]
    (made,) = (one for one in words if one[:3] == ["python", "-m", DEV_ACCESS])
    monkeypatch.chdir(tmp_path)
    make_dev_access(made[3:])
    secrets = {
        name: files
        for line in words
        if (name := _secret(line)) and (files := _files(line)) and "tls.crt" in files
    }
    laptop = rendered("laptop")
    keys = set()
    of_services: set[str] = set()
    asked: list[str] = []
    for workload in workloads(laptop):
        (secret,) = (
            secrets[one["secret"]["secretName"]]
            for one in workload["spec"]["template"]["spec"]["volumes"]
            if one["name"] == "tls"
        )

        # Then each pod finds the files that it reads, and its certificate has its names
        (certificate,) = x509.load_pem_x509_certificates(secret["tls.crt"].read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = {*found.get_values_for_type(x509.DNSName)}
        for pod in pods_of(laptop, workload):
            settings = ("TLS_CA", "TLS_CERT", "TLS_KEY")
            read = {pod.environ[f"SLATEMQ_{one}"].removeprefix("/tls/") for one in settings}
            assert read == {*secret}
            is_client = "SLATEMQ_SERVICE_IDENTITY" in pod.environ
            keys.add((is_client, secret["tls.key"].read_bytes()))
            if is_client:
                asked += pod.environ["SLATEMQ_ENDPOINT"].split(",")
                assert {pod.environ["SLATEMQ_SERVICE_IDENTITY"], "localhost"} <= names
                assert "slatemq-service" not in names
                continue
            assert "slatemq-service" in names
            of_services |= names
            for setting in ("ADVERTISED_ADDRESS", "PEER_ADDRESS"):
                host = pod.environ[f"SLATEMQ_{setting}"].rpartition(":")[0]
                assert {host, "*." + host.partition(".")[2]} & names

    # And those whom the console asks have the names by which it does
    assert asked
    for host in (address.rpartition(":")[0] for address in asked):
        assert {host, "*." + host.partition(".")[2]} & of_services

    # And the console has no key of the services
    assert len(keys) == 2
    assert len({key for _, key in keys}) == 2


def _secret(words: list[str]) -> str:
    """The name of the Secret that a command line makes; empty for another."""
    _, _, after = " ".join(words).partition(" create secret generic ")
    return after.partition(" ")[0]


def _files(words: list[str]) -> dict[str, Path]:
    """The files that it makes the Secret of, by their names there."""
    values = [word.partition("=")[2] for word in words if word.startswith("--from-file=")]
    named_files = (value.rpartition("=") for value in values)
    return {name or Path(path).name: Path(path) for name, _, path in named_files}


def test_the_kustomization_of_the_pages_reaches_all_images_and_shards(tmp_path: Path) -> None:
    # Given the folder that the page for a cloud has one write, beside a checkout
    (mine := tmp_path / "my-slatemq").mkdir()
    (tmp_path / "slatemq").symlink_to(FOLDER.parents[1])
    first, *more = kustomizations(PAGE)
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(first))
    manifests = built(mine)

    # Then all that the overlay only has examples of is its own
    for workload in workloads(manifests):
        for container in containers(workload):
            assert container["image"].startswith("registry.example.com/slatemq-")
    text = yaml.safe_dump_all(manifests)
    assert "my-bucket" in text
    assert "my-role" in text
    assert "example-bucket" not in text
    assert "111122223333" not in text

    # And with Spark the identity is that of its driver, too
    with_spark = first | {"resources": [f"{first['resources'][0]}-spark"]}
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(with_spark))
    manifests = built(mine)
    assert named(manifests, "ServiceAccount", "slatemq-janitor")
    assert "111122223333" not in yaml.safe_dump_all(manifests)

    # And what it is changed to later holds, by the page on KEDA, too
    more += kustomizations(PAGE.parent / "autoscale.md")
    for part in more:
        added = {name: first[name] + part.get(name, []) for name in ("images", "patches")}
        changed = first | part | added
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(changed))
        manifests = built(mine)
        assert namespaces(manifests) == {first["namespace"]}
        for workload in workloads(manifests):
            for container in containers(workload):
                assert container["image"].startswith("registry.example.com/slatemq-")
        for one in changed["replicas"]:
            scaled = named(manifests, "StatefulSet", one["name"])
            assert scaled["spec"]["replicas"] == one["count"]
    assert any(part.get("replicas", first["replicas"]) != first["replicas"] for part in more)


def test_the_client_of_the_page_for_a_cloud_has_the_image_and_the_secrets_that_it_makes() -> None:
    page = PAGE.read_text()
    (sed,) = re.findall(r"\$ sed '(.+)' slatemq/(\S+client\.yaml) \|", page)
    done = subprocess.run(
        ["sed", sed[0], FOLDER.parents[1] / sed[1]], capture_output=True, text=True, check=True
    )
    pod = yaml.safe_load(done.stdout)
    (first, *_) = kustomizations(PAGE)
    (image,) = (one for one in first["images"] if one["name"] == "slatemq-console")
    assert pod["spec"]["containers"][0]["image"] == f"{image['newName']}:{image['newTag']}"

    # Each Secret and Certificate that its commands wait for, or read, is made by then
    certificates = {one["metadata"]["name"]: one for one in of_kind(rendered("s3"), "Certificate")}
    waited = set(re.findall(r"certificate/(\S+)", page))
    made = {certificates[name]["spec"]["secretName"] for name in waited}
    assert set(re.findall(r" get secret (\S+)", page)) <= made
    (volume,) = pod["spec"]["volumes"]
    assert f"create secret generic {volume['secret']['secretName']} " in page


@pytest.mark.parametrize("page", ["kubernetes.md", "backup.md"])
def test_commands_for_all_processes_leave_the_workloads_of_others_alone(page: str) -> None:
    text = (PAGE.parent / page).read_text()
    lines = re.findall(r"^ *\$ (kubectl .*statefulset,deployment.*)$", text, re.MULTILINE)
    labels = [one["metadata"]["labels"] for one in workloads(rendered(WITH_KEDA))]
    assert lines
    for line in lines:
        words = line.split()
        assert "--all" not in words
        name, _, value = words[words.index("-l") + 1].partition("=")
        assert {one.get(name) for one in labels} == {value}


def test_settings_that_the_page_changes_are_applied_and_read_by_pods_that_start_again() -> None:
    changed = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        for block in re.finditer(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            kustomization = yaml.safe_load(block[1])
            targets = [one["target"] for one in kustomization.get("patches", ())]
            # Of a pod that changes in another way Kubernetes makes a new one by itself
            if targets == [{"kind": "ConfigMap", "name": "slatemq-settings"}]:
                changed.append(kustomization)
                lines = re.findall(r"^\$ (kubectl .*)$", section[block.end() :], re.MULTILINE)
                assert lines[0].startswith("kubectl apply -k ")
                assert lines[1].startswith("kubectl --namespace=slatemq rollout restart ")
    assert changed


def test_the_backup_of_the_page_is_taken_by_the_janitor_that_it_restarts() -> None:
    (patch,) = re.findall(r"SLATEMQ_BACKUP_ROOT, value: \"(\S+)\"", PAGE.read_text())
    lines = commands(PAGE)
    (run,) = (number for number, line in enumerate(lines) if line.endswith(" janitor run backup"))

    assert lines[run].startswith("kubectl --namespace=slatemq exec -it slatemq-client -- python -m")
    restarted, waited = lines[run - 2 : run]
    assert restarted.endswith(" rollout restart deployment/slatemq-janitor")
    assert " rollout status " in waited
    assert waited.endswith(" deployment/slatemq-janitor")
    (janitor,) = pods_of(rendered("s3"), named(rendered("s3"), "Deployment", "slatemq-janitor"))
    own = {"SLATEMQ_BACKUP_ROOT": patch, "SLATEMQ_BACKUP_SCHEDULE": "6h"}
    config = load(JanitorConfig, "janitor", [], {**janitor.environ, **own})
    assert (config.backup_root, config.backup_schedule) == (patch, "6h")


def test_the_credentials_that_the_page_writes_are_variables_that_services_read() -> None:
    page = PAGE.read_text()
    (file,) = re.findall(r" create secret generic slatemq-credentials --from-env-file=(\S+) ", page)
    (block,) = re.findall(rf"`{file}`:\n\n```\n(.*?)```", page, re.DOTALL)
    names = [line.partition("=")[0] for line in block.splitlines()]
    stores = (PAGE.parent / "object-stores.md").read_text()

    assert names
    for name in names:
        assert name in KNOWN or f"`{name}`" in stores
    assert any(name in KNOWN for name in names)


def test_no_command_of_the_page_waits_for_the_half_minute_that_kubectl_waits_by_itself() -> None:
    waits = [line for line in commands(PAGE) if re.search(r"kubectl .* wait ", line)]

    assert waits
    # A first pod waits for its image, and may wait for a node
    assert all("--timeout=5m" in line.split() for line in waits)


def test_the_job_of_the_page_can_run_for_each_step_of_a_move() -> None:
    page = PAGE.read_text()
    job = yaml.safe_load((FOLDER / "examples" / "restore.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
    lines = commands(PAGE)

    # Each apply of the file has the Job before it deleted, since a Job cannot be changed
    for number, line in enumerate(lines):
        if "restore.yaml" in line:
            assert f" delete job {name} --ignore-not-found" in lines[number - 1]
    # And a pod that failed can be read afterwards
    assert spec["restartPolicy"] == "Never"
    (log,) = (line for line in lines if " logs -l " in line)
    label, _, value = log.split(" -l ")[1].split()[0].partition("=")
    assert job["spec"]["template"]["metadata"]["labels"][label] == value

    # And every step says which root it is for
    rows = re.findall(
        r"^\| [^|]+ \| `((?:create|restore)[^`]*)` \| the (old|new) one \|$", page, re.M
    )
    (container,) = spec["containers"]
    environ = {one["name"]: one["value"] for one in container["env"]}
    begin = container["command"][3:-1]
    steps = [
        (given.what, getattr(given, "prepare", False), root)
        for command, root in rows
        for given in [parse_backup([*begin, *command.split(", ")], environ)]
    ]
    assert steps == [("restore", True, "new"), ("create", False, "old"), ("restore", False, "new")]


@pytest.mark.parametrize("ended", ["SuccessCriteriaMet Complete", "FailureTarget Failed"])
def test_waiting_for_the_job_that_restores_ends_when_it_has_failed_too(
    tmp_path: Path, ended: str
) -> None:
    # Given a cluster whose Job has ended at the third look
    (looks := tmp_path / "looks").touch()
    for name, script in (
        ("kubectl", f'echo >> "{looks}"; [ $(wc -l < "{looks}") -lt 3 ] || echo "{ended}"'),
        ("sleep", "exit 0"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (line,) = (one for one in commands(PAGE) if one.startswith("until kubectl "))

    done = subprocess.run(
        ["sh", "-c", line],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout == ended.split()[1] + "\n"
    assert looks.read_text().count("\n") == 3
