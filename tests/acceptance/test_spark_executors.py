"""The janitor's jobs on executors that Spark asks Kubernetes for, by what the manifests say."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.integration.ingest.server import ROOT
from tests.integration.janitor.instances import instance
from tests.kubernetes.fake_api import Api, Object, api
from tests.kubernetes.manifests import Manifest, containers, named, rendered
from tests.kubernetes.pods import pods_of

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.proof]
"""A driver and two executors: three Javas. Its short forms are the tests of the manifests, and of
the executor's command."""

DRIVER = "slatemq-janitor-7d4b9c6f5-x0"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def manifests() -> list[Manifest]:
    return rendered("s3-spark")


def lay_configuration(folder: Path, manifests: list[Manifest]) -> None:
    """The files of the ConfigMap, as a kubelet mounts them; paths are in the folder."""
    data = named(manifests, "ConfigMap", "slatemq-spark")["data"]
    for name, text in data.items():
        (folder / name).write_text(text.replace("/spark/", f"{folder}/"))


async def test_a_job_runs_on_executors_that_are_pods_of_the_janitors_image(
    tmp_path: Path, manifests: list[Manifest]
) -> None:
    # Given what the janitor's pod has, and an API that runs the executors' pods as processes
    (pod,) = pods_of(manifests, named(manifests, "Deployment", "slatemq-janitor"))
    (conf := tmp_path / "spark").mkdir()
    (work := tmp_path / "work").mkdir()
    lay_configuration(conf, manifests)
    environ = {
        "SPARK_CONF_DIR": str(conf),
        "PYSPARK_SUBMIT_ARGS": pod.environ["PYSPARK_SUBMIT_ARGS"],
        "TRACEPARENT": TRACEPARENT,
    }
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter='headers.queue == "orders"')
        published = await made.publish("orders", 30, retention_s=1)
        await made.routed()
        with api(work, {}) as kubernetes:
            kubernetes.add("pods", driver_pod())
            # When a job runs
            driver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.integration.janitor.spark.kubernetes_driver"),
                *(made.url, kubernetes.url, "retention"),
                cwd=ROOT,
                env={**os.environ, **environ},
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                out, _ = await driver.communicate()
            finally:
                if driver.returncode is None:
                    driver.kill()

    # Then the executors did it, as the pods that the manifests say
    assert driver.returncode == 0
    assert json.loads(out.splitlines()[-1])["entries_removed"] == len(published)
    assert len(kubernetes.pods) == 2
    for one in kubernetes.pods:
        check_pod(one, manifests)
    check_rights(kubernetes, manifests)


def driver_pod() -> Object:
    """The janitor's pod, as far as the driver looks at it: it owns those of the executors."""
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": DRIVER}, "status": ready}


def check_pod(pod: Object, manifests: list[Manifest]) -> None:
    """The pod that Spark made is what the overlay wants, and what Kubernetes would take."""
    kubernetes_validate.validate(clean(pod), kubernetes_validate.latest_version(), strict=True)
    template = yaml.safe_load(
        named(manifests, "ConfigMap", "slatemq-spark")["data"]["executor.yaml"]
    )
    labels = template["metadata"]["labels"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["name"] == DRIVER
    spec = pod["spec"]
    assert spec["serviceAccountName"] == "slatemq"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == template["spec"]["securityContext"]
    (container,) = spec["containers"]
    (wanted,) = template["spec"]["containers"]
    (driver,) = containers(named(manifests, "Deployment", "slatemq-janitor"))
    assert container["image"] == driver["image"]
    assert container["securityContext"] == wanted["securityContext"]
    assert container["envFrom"] == wanted["envFrom"]
    assert {"cpu", "memory"} <= {*container["resources"]["requests"]}
    assert "memory" in container["resources"]["limits"]
    assert {"/tls", "/tmp"} <= {one["mountPath"] for one in container["volumeMounts"]}
    environ = {one["name"]: one.get("value") for one in container["env"]}
    assert environ["TRACEPARENT"] == TRACEPARENT


def clean(value: Any) -> Any:
    """Without what the API has set."""
    if isinstance(value, dict):
        return {name: clean(one) for name, one in value.items() if name != "resourceVersion"}
    return [clean(one) for one in value] if isinstance(value, list) else value


def check_rights(kubernetes: Api, manifests: list[Manifest]) -> None:
    """The driver's Role permits what it asked for."""
    rules = named(manifests, "Role", "slatemq-janitor")["rules"]
    permitted = {
        (verb, kind) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]
    }
    assert kubernetes.requests <= permitted
