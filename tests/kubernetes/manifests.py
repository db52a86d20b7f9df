"""What `kubectl kustomize` makes of the base and the overlays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
PAGE = FOLDER.parents[1] / "docs/how-to/kubernetes.md"

WITH_KEDA = "s3 with keda"
"""The overlay for S3 with the component that scales workers."""

WITH_METRICS = "s3 with keda, metrics"
"""The same with the component that Prometheus needs."""

WITH_STANDBYS = "azure with standbys, metrics"
"""The one that labels pods, with two pods for each shard."""

LAPTOP_WITH_STANDBYS = "laptop with standbys"

OF_AN_OPERATOR = {"images", "patches", "replicas"}
"""The parts of a kustomization that name a registry, a bucket, a role and a size."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C takes a seventh of the time, where there is it."""

Manifest = dict[str, Any]


def rendered(overlay: str) -> list[Manifest]:
    """The manifests of an overlay, or of `base`. Skips where there is no kubectl, except in CI."""
    if shutil.which("kubectl") is None:
        why = "kubectl is not installed: nothing can render deploy/kubernetes"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return _rendered(overlay)


@cache
def _rendered(overlay: str) -> list[Manifest]:
    name, _, components = overlay.partition(" with ")
    if components:
        return built_over(name, components.split(", "))
    return built(FOLDER / ("base" if overlay == "base" else f"overlays/{overlay}"))


def built_over(overlay: str, components: Sequence[str] = (), **own: object) -> list[Manifest]:
    """What the kustomization that the page has one write makes over these, with fields of `own`."""
    (page, *_) = kustomizations(PAGE)
    kustomization = {name: value for name, value in page.items() if name not in OF_AN_OPERATOR}
    with TemporaryDirectory() as folder:
        base = os.path.relpath(FOLDER, Path(folder).resolve())
        kustomization["resources"] = [f"{base}/overlays/{overlay}"]
        kustomization["components"] = [f"{base}/components/{one}" for one in components]
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization | own))
        return built(Path(folder))


def built(folder: Path) -> list[Manifest]:
    """What a folder with a kustomization makes."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, Loader=LOADER))


def kustomizations(page: Path) -> list[Manifest]:
    """What a page has one write into a `kustomization.yaml`: its YAML blocks, in order."""
    blocks = re.findall(r"^( *)```yaml\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL)
    loaded = [yaml.safe_load(dedent(block)) for _, block in blocks]
    return [
        one for one in loaded if one.keys() & {"resources", "components", "patches", "replicas"}
    ]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def namespaces(manifests: list[Manifest]) -> set[str]:
    """Those of all objects that have to be in one; empty for an object that names none."""
    return {one["metadata"].get("namespace", "") for one in manifests if one["kind"] != "Namespace"}


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name)
    return found


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "StatefulSet", "Deployment")


def containers(workload: Manifest) -> Iterator[Manifest]:
    spec = workload["spec"]["template"]["spec"]
    yield from (*spec.get("initContainers", ()), *spec["containers"])
