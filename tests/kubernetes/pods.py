"""The pods of a workload: their environment, command and probes, as a kubelet has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import NAMESPACE_DNS, uuid5

from tests.kubernetes.manifests import Manifest, named

_LABEL = re.compile(r"metadata\.labels\['(.+)'\]")
_REFERENCE = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class Pod:
    """One pod, with one container.

    Attributes:
        environ: What its manifest says, references resolved; nothing else, as where an optional
            Secret is missing.
    """

    name: str
    service: str
    spec: Manifest
    container: Manifest
    environ: Mapping[str, str]

    def probe(self, kind: str) -> list[str]:
        """The command of `startupProbe`, `livenessProbe` or `readinessProbe`."""
        command: list[str] = self.container[kind]["exec"]["command"]
        return command

    @property
    def ports(self) -> Mapping[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def pods_of(manifests: list[Manifest], workload: Manifest) -> list[Pod]:
    """As many as it has replicas, as its controller names and labels them."""
    return [_pod(manifests, workload, ordinal) for ordinal in range(workload["spec"]["replicas"])]


def _pod(manifests: list[Manifest], workload: Manifest, ordinal: int) -> Pod:
    template, base = workload["spec"]["template"], workload["metadata"]["name"]
    is_set = workload["kind"] == "StatefulSet"
    name = f"{base}-{ordinal}" if is_set else f"{base}-7d4b9c6f5-x{ordinal}"
    labels = dict(template["metadata"]["labels"])
    if is_set:
        labels |= {
            "apps.kubernetes.io/pod-index": str(ordinal),
            "statefulset.kubernetes.io/pod-name": name,
        }
    facts = {
        "metadata.name": name,
        "status.podIP": "127.0.0.1",
        "metadata.namespace": workload["metadata"]["namespace"],
        "metadata.uid": str(uuid5(NAMESPACE_DNS, name)),
    }
    (container,) = template["spec"]["containers"]
    environ: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if not source.get("secretRef", {}).get("optional"):
            environ |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for one in container["env"]:
        if "value" in one:
            text = _REFERENCE.sub(lambda m: environ.get(m[1], m[0]), one["value"])
        elif "configMapKeyRef" in one["valueFrom"]:
            key = one["valueFrom"]["configMapKeyRef"]
            text = named(manifests, "ConfigMap", key["name"])["data"][key["key"]]
        else:
            path = one["valueFrom"]["fieldRef"]["fieldPath"]
            label = _LABEL.fullmatch(path)
            text = labels.get(label[1], "") if label else facts[path]
        environ[one["name"]] = text
    return Pod(name, container["name"], template["spec"], container, environ)
