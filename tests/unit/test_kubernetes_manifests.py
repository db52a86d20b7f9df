"""deploy/kubernetes: valid for Kubernetes, true to the services, and as restricted as they may be.

The schemas are those of Kubernetes itself. cert-manager's kinds are not among them: of those, only
what is tested here is known to be right.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import cycle, product
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from libs.access.policy import Policy
from libs.access.principals import Principal
from libs.access.verbs import VERBS
from libs.documents import Document
from libs.serving.process.config import ServingConfig, load
from libs.serving.process.exits import FatalError
from libs.serving.process.process_config import ProcessConfig, load_own
from libs.serving.process.shards import opened_root
from libs.serving.process.standby import owner_name_of
from services.broker.config import BrokerConfig
from services.console.config import ConsoleConfig
from services.ingest.config import IngestConfig
from services.janitor.backup.command import parse as parse_backup
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from services.router.reserve import is_first
from services.scaler.config import ScalerConfig
from services.scaler.triggers import trigger_of
from slatemq.variables import KNOWN
from tests.forms import proof
from tests.kubernetes.manifests import (
    FOLDER,
    OVERLAYS,
    PAGE,
    WITH_KEDA,
    WITH_METRICS,
    WITH_STANDBYS,
    Manifest,
    built_over,
    containers,
    kustomizations,
    named,
    namespaces,
    of_kind,
    rendered,
    workloads,
)
from tests.kubernetes.pods import Pod, pods_of
from tests.memory_bounds import JOB_CORES, STATED, bytes_of

VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""The oldest that labels pods with their ordinal, and the newest whose schemas are here."""

STANDBYS_FROM = "1.31"
"""The oldest that keeps the two pods of a shard apart."""

COMPONENT = "app.kubernetes.io/component"

CERTIFICATES = "cert-manager.io/v1"
MONITORS = "monitoring.coreos.com/v1"

CONFIGS: dict[str, type[ServingConfig]] = {
    "broker": BrokerConfig,
    "ingest": IngestConfig,
    "janitor": JanitorConfig,
    "router": RouterConfig,
}

OWN_CONFIGS: dict[str, type[ProcessConfig]] = {"console": ConsoleConfig, "scaler": ScalerConfig}
"""Of those that know the instance as clients do: they have one port, and no name as a service."""

MADE_BY_OPERATORS = {"slatemq-tokens", "slatemq-scaler-token"}
MADE_BY_CERT_MANAGER = {"slatemq-service-tls", "slatemq-console-tls"}

OTHERS = {
    *("POD_NAME", "POD_NAMESPACE", "POD_IP"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS"),
    "EXECUTOR_IMAGE",
}
"""Variables that are not SlateMQ's."""

ASKS_KUBERNETES = "slatemq-janitor"
"""The account of the one workload that may call Kubernetes, where its executors are pods."""

ON_SPARK = [name for name in OVERLAYS if name.endswith("-spark")]

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Iterator[None]:
    """All definitions of a version are in one file, which the library reads for each manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@pytest.fixture(params=[*OVERLAYS, WITH_KEDA, WITH_METRICS, WITH_STANDBYS])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


def pods(manifests: list[Manifest]) -> list[Pod]:
    return [pod for workload in workloads(manifests) for pod in pods_of(manifests, workload)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", ["base", *OVERLAYS, WITH_KEDA, WITH_METRICS])
def test_every_manifest_is_valid_for_kubernetes(overlay: str, version: str) -> None:
    for manifest in rendered(overlay):
        if manifest["apiVersion"] not in (CERTIFICATES, MONITORS):
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", [STANDBYS_FROM, VERSIONS[-1]])
def test_every_manifest_with_standbys_is_valid_for_kubernetes(version: str) -> None:
    for manifest in rendered(WITH_STANDBYS):
        if manifest["apiVersion"] not in (CERTIFICATES, MONITORS):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_and_a_wrong_type_are_found() -> None:
    for path, value in (("replica", 1), ("replicas", "one")):
        broker = yaml.safe_load(
            yaml.safe_dump(named(rendered("base"), "StatefulSet", "slatemq-broker"))
        )
        broker["spec"][path] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broker, VERSIONS[-1], strict=True)


def test_every_object_of_a_namespace_is_in_that_of_the_page(manifests: list[Manifest]) -> None:
    (first, *_) = kustomizations(PAGE)
    assert namespaces(manifests) == {first["namespace"]}
    (own,) = of_kind(manifests, "Namespace")
    assert own["metadata"]["name"] == first["namespace"]


@pytest.mark.parametrize("namespace", [proof("slatemq"), "mq"])
@pytest.mark.parametrize("overlay", [*OVERLAYS, "s3 with spark"])
def test_every_right_is_of_an_account_of_the_namespace_that_is_chosen(
    overlay: str, namespace: str
) -> None:
    name, _, component = overlay.partition(" with ")

    manifests = built_over(name, [component] if component else [], namespace=namespace)

    assert namespaces(manifests) == {namespace}
    accounts = {one["metadata"]["name"] for one in of_kind(manifests, "ServiceAccount")}
    bindings = of_kind(manifests, "RoleBinding", "ClusterRoleBinding")
    assert bool(bindings) is ("spark" in overlay)
    for subject in (one for binding in bindings for one in binding["subjects"]):
        assert subject["kind"] == "ServiceAccount"
        assert subject["name"] in accounts
        assert subject["namespace"] == namespace


def test_every_container_is_restricted(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        spec = workload["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        asks = spec["serviceAccountName"] == ASKS_KUBERNETES
        assert spec["automountServiceAccountToken"] is asks
        assert spec["enableServiceLinks"] is False
        for container in containers(workload):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
    (namespace,) = of_kind(manifests, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_container_has_probes_resources_and_an_image_of_a_version(
    manifests: list[Manifest],
) -> None:
    for workload in workloads(manifests):
        for container in containers(workload):
            assert set(PROBES) <= set(container)
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert set(container["resources"]["limits"]) == {"memory"}
            name, _, tag = container["image"].partition(":")
            assert name == f"slatemq-{container['name']}"
            assert re.fullmatch(r"\d+\.\d+\.\d+", tag)
            assert (FOLDER.parents[1] / "requirements" / f"{container['name']}.txt").exists()


def test_no_recovery_is_killed_and_no_client_can_have_a_pod_killed(
    manifests: list[Manifest],
) -> None:
    for pod in pods(manifests):
        assert "--alive" in pod.probe("startupProbe")
        assert "--alive" in pod.probe("livenessProbe")
        ready = pod.probe("readinessProbe")
        assert "--alive" not in ready
        assert ("--answers" in ready) is ("SLATEMQ_STANDBY" in pod.environ)
        if pod.service not in OWN_CONFIGS:
            for kind, door in zip(PROBES, ("services", "services", "clients"), strict=True):
                assert pod.probe(kind)[-1] == f"127.0.0.1:{pod.ports[door]}"


def test_each_service_accepts_its_settings(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        assert {*pod.environ} <= KNOWN | OTHERS
        assert pod.container["command"] == ["python", "-m", f"services.{pod.service}"]
        arguments = pod.container.get("args", [])
        if pod.service in OWN_CONFIGS:
            own = load_own(OWN_CONFIGS[pod.service], pod.service, arguments, pod.environ)
            assert [own.port] == [pod.ports[name] for name in pod.ports if name != "metrics"]
            assert own.tls_cert
            assert not own.insecure
            continue
        config: Any = load(CONFIGS[pod.service], pod.service, arguments, pod.environ)
        assert config.stated == ()
        assert (config.port, config.peer_port) == (pod.ports["clients"], pod.ports["services"])
        assert pod.spec["terminationGracePeriodSeconds"] >= config.drain_ms / 1000 + 15
        assert not config.insecure
        if pod.service in ("ingest", "broker"):
            assert config.shard == int(pod.name.rpartition("-")[2])
            assert config.owner_name == pod.environ["SLATEMQ_OWNER_NAME"] != ""


def test_a_pod_without_its_ordinal_does_not_take_a_shard(
    manifests: list[Manifest], capsys: pytest.CaptureFixture[str]
) -> None:
    for service in ("broker", "ingest", "router"):
        first = next(pod for pod in pods(manifests) if pod.service == service)
        with pytest.raises(SystemExit) as ended:
            load(CONFIGS[service], service, [], {**first.environ, "SLATEMQ_SHARD": ""})
        assert ended.value.code == 2
        assert "SLATEMQ_SHARD" in capsys.readouterr().err


def test_every_router_has_a_number_and_addresses_of_its_own_and_they_divide_the_logs(
    manifests: list[Manifest],
) -> None:
    # Given more of them than there are
    (given,) = (one for one in workloads(manifests) if one["metadata"]["name"] == "slatemq-router")
    router = given | {"spec": given["spec"] | {"replicas": 3}}

    routers = [load(RouterConfig, "router", [], pod.environ) for pod in pods_of(manifests, router)]

    numbers = [one.shard for one in routers]
    assert numbers == [0, 1, 2]
    assert len({one.advertised_address for one in routers}) == len(routers)
    assert len({one.peer_address for one in routers}) == len(routers)
    for ingest_shard in range(16):
        assert sum(is_first(number, numbers, ingest_shard) for number in numbers) == 1
    # And one that is stuck holds up no other
    assert router["spec"]["podManagementPolicy"] == "Parallel"


def test_nothing_starts_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    base = rendered("base")
    for pod in pods(base):
        if pod.service in CONFIGS:
            config: Any = load(CONFIGS[pod.service], pod.service, [], pod.environ)
            with pytest.raises(FatalError, match="root URL"):
                opened_root(config.root)


def test_no_client_can_have_a_container_killed_for_its_memory(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        for container in containers(workload):
            limit = bytes_of(container["resources"]["limits"]["memory"])
            assert limit >= STATED[container["name"]]


def test_jobs_take_no_more_processors_than_the_pod_has_memory_for(
    manifests: list[Manifest],
) -> None:
    (janitor,) = (pod for pod in pods(manifests) if pod.service == "janitor")
    master = janitor.environ["SLATEMQ_SPARK_MASTER"]
    assert master == f"local[{JOB_CORES}]" or master.startswith("k8s://")


def test_what_jobs_leave_is_reaped(manifests: list[Manifest]) -> None:
    janitor = named(manifests, "Deployment", "slatemq-janitor")
    assert janitor["spec"]["template"]["spec"]["shareProcessNamespace"] is True


def test_each_pod_advertises_a_name_that_a_service_has(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        if pod.service in OWN_CONFIGS:
            continue
        for setting, door in (("ADVERTISED_ADDRESS", "clients"), ("PEER_ADDRESS", "services")):
            host, _, port = pod.environ[f"SLATEMQ_{setting}"].rpartition(":")
            *first, name, namespace, svc = host.split(".")
            service = named(manifests, "Service", name)
            assert (namespace, svc) == (service["metadata"]["namespace"], "svc")
            assert first == ([pod.name] if service["spec"].get("clusterIP") == "None" else [])
            ports = {one["name"]: one["port"] for one in service["spec"]["ports"]}
            assert ports[door] == int(port)


def test_who_only_looks_for_the_others_asks_pods_that_have_the_name_in_their_certificate(
    manifests: list[Manifest],
) -> None:
    names = [
        set(one["spec"]["dnsNames"])
        for one in of_kind(manifests, "Certificate")
        if one["metadata"]["name"] == "slatemq-service"
    ]
    for pod in pods(manifests):
        if pod.service not in OWN_CONFIGS:
            continue
        addresses = pod.environ["SLATEMQ_ENDPOINT"].split(",")
        assert len(addresses) > 1
        for host, _, port in (address.rpartition(":") for address in addresses):
            name, namespace, svc = host.split(".")
            service = named(manifests, "Service", name)
            assert (namespace, svc) == (service["metadata"]["namespace"], "svc")
            assert int(port) in [one["port"] for one in service["spec"]["ports"]]
            for of_certificate in names:
                assert {host, "*." + host.partition(".")[2]} & of_certificate


def test_metrics_are_where_a_monitor_scrapes_them() -> None:
    with_metrics = rendered(WITH_METRICS)
    (door,) = named(with_metrics, "NetworkPolicy", "slatemq-metrics")["spec"]["ingress"]
    (endpoint,) = named(with_metrics, "PodMonitor", "slatemq")["spec"]["podMetricsEndpoints"]
    assert [one["port"] for one in door["ports"]] == [endpoint["port"]] == ["metrics"]
    selector = named(with_metrics, "PodMonitor", "slatemq")["spec"]["selector"]["matchLabels"]
    scraped = set()
    for pod in pods(with_metrics):
        config: Any
        if pod.service in CONFIGS:
            config = load(CONFIGS[pod.service], pod.service, [], pod.environ)
        else:
            config = load_own(OWN_CONFIGS[pod.service], pod.service, [], pod.environ)
        assert config.http_port == pod.ports["metrics"]
        scraped.add(pod.service)
    for workload in workloads(with_metrics):
        assert selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert scraped == {*CONFIGS, *OWN_CONFIGS}


def test_the_operator_has_the_alerts_that_prometheus_is_given() -> None:
    (rule,) = of_kind(rendered(WITH_METRICS), "PrometheusRule")
    alerts = yaml.safe_load((FOLDER.parent / "observability/alerts.yaml").read_text())
    assert rule["spec"] == alerts


def test_selectors_select_the_pods_that_they_mean(manifests: list[Manifest]) -> None:
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in workloads(manifests)
    }

    def selected(selector: dict[str, str]) -> set[str]:
        return {name for name, has in labels.items() if selector.items() <= has.items()}

    def of_service(name: str) -> set[str]:
        return {name, f"{name}-standby"} & labels.keys()

    for one in workloads(manifests):
        name = one["metadata"]["name"]
        assert selected(one["spec"]["selector"]["matchLabels"]) == {name}
        spread = of_service(name.removesuffix("-standby"))
        for constraint in one["spec"]["template"]["spec"]["topologySpreadConstraints"]:
            assert selected(constraint["labelSelector"]["matchLabels"]) == spread
        if one["kind"] == "StatefulSet":
            assert named(manifests, "Service", one["spec"]["serviceName"])
    for one in of_kind(manifests, "Service"):
        assert selected(one["spec"]["selector"]) == of_service(one["metadata"]["name"])
    kept: set[str] = set()
    for one in of_kind(manifests, "PodDisruptionBudget"):
        of_budget = selected(one["spec"]["selector"]["matchLabels"])
        assert of_budget == of_service(one["metadata"]["name"])
        kept |= of_budget
    single = {"slatemq-console", "slatemq-janitor"}
    assert kept == labels.keys() - single


def test_a_standby_is_the_pod_of_an_owner_but_for_its_name_and_never_on_its_node() -> None:
    with_standbys, plain = rendered(WITH_STANDBYS), rendered("azure")
    for service in ("ingest", "broker"):
        name = f"slatemq-{service}"
        owner, standby, before = (
            named(manifests, "StatefulSet", one)["spec"]
            for manifests, one in (
                (with_standbys, name), (with_standbys, f"{name}-standby"), (plain, name)
            )
        )  # fmt: skip
        as_owner = {"app.kubernetes.io/name": name}
        labels = standby["template"]["metadata"]["labels"]
        assert labels | as_owner == owner["template"]["metadata"]["labels"]
        assert labels.items() > {"azure.workload.identity/use": "true", COMPONENT: service}.items()
        assert standby["template"]["spec"] == owner["template"]["spec"]
        assert standby["serviceName"] == owner["serviceName"] == name
        assert standby["updateStrategy"] == {"type": "OnDelete"}
        assert before["selector"] == owner["selector"]

        (apart,) = owner["template"]["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert apart["topologyKey"] == "kubernetes.io/hostname"
        assert apart["matchLabelKeys"] == [COMPONENT, "apps.kubernetes.io/pod-index"]
        assert apart["labelSelector"]["matchLabels"].items() <= labels.items()


def test_each_life_of_a_standby_claims_its_shard_under_a_name_of_its_own() -> None:
    for pod in pods(rendered(WITH_STANDBYS)):
        if pod.service in ("ingest", "broker"):
            config: Any = load(CONFIGS[pod.service], pod.service, [], pod.environ)
            assert config.standby
            first, second = owner_name_of(config), owner_name_of(config)
            assert first != second
            assert first.startswith(f"{pod.environ['SLATEMQ_OWNER_NAME']}.")


def test_the_two_doors_are_open_to_whom_they_are_for(manifests: list[Manifest]) -> None:
    ours = {"app.kubernetes.io/part-of": "slatemq"}
    for one in workloads(manifests):
        assert ours.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    closed = named(manifests, "NetworkPolicy", "slatemq-closed")["spec"]
    assert closed == {"podSelector": {"matchLabels": ours}, "policyTypes": ["Ingress"]}
    (door,) = named(manifests, "NetworkPolicy", "slatemq-services")["spec"]["ingress"]
    assert door["from"] == [{"podSelector": {"matchLabels": ours}}]
    opened = {
        port["port"]
        for one in of_kind(manifests, "NetworkPolicy")
        for rule in one["spec"].get("ingress", ())
        for port in rule["ports"]
    }
    executors = {7078, 7079} if of_kind(manifests, "Role") else set()
    assert opened - {"keda", "metrics"} == {"clients", "services", "pages", *executors}


def test_what_pods_refer_to_exists(manifests: list[Manifest]) -> None:
    secrets = MADE_BY_OPERATORS | {
        one["spec"]["secretName"] for one in of_kind(manifests, "Certificate")
    }
    if not of_kind(manifests, "Certificate"):
        secrets |= MADE_BY_CERT_MANAGER  # By hand, on a laptop.
    for workload in workloads(manifests):
        spec = workload["spec"]["template"]["spec"]
        assert named(manifests, "ServiceAccount", spec["serviceAccountName"])
        volumes = {one["name"]: one for one in spec["volumes"]}
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
                assert volume["secret"]["defaultMode"] == 0o440  # not readable by all users
            if "configMap" in volume:
                assert named(manifests, "ConfigMap", volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                assert named(
                    manifests, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
                )


def test_all_that_open_the_store_have_the_secret_with_its_keys_where_there_is_one(
    manifests: list[Manifest],
) -> None:
    # What the Secret has goes before what the settings say
    sources = [
        {"configMapRef": {"name": "slatemq-settings"}},
        {"secretRef": {"name": "slatemq-credentials", "optional": True}},
    ]
    for pod in pods(manifests):
        wanted = sources if pod.service in CONFIGS else sources[:1]
        assert pod.container["envFrom"] == wanted
    for one in of_kind(manifests, "ConfigMap"):
        if one["metadata"]["name"] == "slatemq-spark":
            (executor,) = yaml.safe_load(one["data"]["executor.yaml"])["spec"]["containers"]
            assert executor["envFrom"] == sources
    job = yaml.safe_load((FOLDER / "examples" / "restore.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == sources


def test_the_policy_can_be_read(manifests: list[Manifest]) -> None:
    text = named(manifests, "ConfigMap", "slatemq-policy")["data"]["policy.yaml"]
    Policy(Document("policy.yaml", text))  # Raises for a policy that no service would load.


def test_the_certificates_have_the_names_that_pods_advertise(manifests: list[Manifest]) -> None:
    certificates = {
        one["spec"]["secretName"]: one["spec"] for one in of_kind(manifests, "Certificate")
    }
    if not certificates:
        return
    names = certificates["slatemq-service-tls"]["dnsNames"]
    assert "slatemq-service" in names
    assert "slatemq-service" not in certificates["slatemq-console-tls"]["dnsNames"]
    for pod in pods(manifests):
        if pod.service in OWN_CONFIGS:
            identity = pod.environ["SLATEMQ_SERVICE_IDENTITY"]
            assert identity in certificates[f"slatemq-{pod.service}-tls"]["dnsNames"]
            continue
        for setting in ("ADVERTISED_ADDRESS", "PEER_ADDRESS"):
            host = pod.environ[f"SLATEMQ_{setting}"].rpartition(":")[0]
            assert {host, "*." + host.partition(".")[2]} & set(names)
    issuers = {one["metadata"]["name"] for one in of_kind(manifests, "Issuer")}
    for spec in certificates.values():
        assert set(spec) <= {
            "commonName",
            "dnsNames",
            "duration",
            "isCA",
            "issuerRef",
            "privateKey",
            "renewBefore",
            "secretName",
            "usages",
        }
        assert spec["issuerRef"] == {"kind": "Issuer", "name": spec["issuerRef"]["name"]}
        assert spec["issuerRef"]["name"] in issuers
        if "usages" in spec:
            assert "client auth" in spec["usages"]
            assert "server auth" in spec["usages"] or spec["secretName"] == "slatemq-keda-tls"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_job_that_restores_is_restricted_and_reaches_the_store(overlay: str) -> None:
    text = (FOLDER / "examples" / "restore.yaml").read_text()
    manifests = rendered(overlay)
    janitor = named(manifests, "Deployment", "slatemq-janitor")
    (pod,) = pods_of(manifests, janitor)
    if overlay == "laptop":
        text = re.sub(r"# (volume\w+: )", r"\1", text)
    job = yaml.safe_load(text)
    for version in VERSIONS:
        kubernetes_validate.validate(job, version, strict=True)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    source = container["envFrom"][0]
    settings = named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    environ = settings | {one["name"]: one["value"] for one in container["env"]}
    assert set(environ) <= KNOWN | OTHERS
    python, dash_m, module, *words = container["command"]
    assert (python, dash_m, module) == ("python", "-m", "services.janitor")
    given = parse_backup(words, environ)
    assert (given.what, given.root) == ("restore", environ["SLATEMQ_ROOT"])
    (as_there,) = containers(janitor)
    assert container["image"] == as_there["image"]
    assert container["securityContext"] == as_there["securityContext"]

    # What the services reach the store by, it has, too
    assert spec["serviceAccountName"] == "slatemq"
    identity = {"azure.workload.identity/use"}
    labels = janitor["spec"]["template"]["metadata"]["labels"]
    has = job["spec"]["template"]["metadata"]["labels"]
    assert {name: labels[name] for name in identity & {*labels}}.items() <= has.items()
    claims = [one for one in pod.spec["volumes"] if "persistentVolumeClaim" in one]
    assert claims == spec.get("volumes", [])
    mounts = [
        one
        for one in as_there["volumeMounts"]
        if one["name"] in {volume["name"] for volume in claims}
    ]
    assert mounts == container.get("volumeMounts", [])


def test_the_template_of_executors_is_a_restricted_pod() -> None:
    settings = named(rendered("s3-spark"), "ConfigMap", "slatemq-spark")["data"]
    pod = yaml.safe_load(settings["executor.yaml"])
    janitor = named(rendered("s3-spark"), "Deployment", "slatemq-janitor")
    (as_there,) = containers(janitor)
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == as_there["securityContext"]
    whole = janitor["spec"]["template"]["spec"]["securityContext"]
    assert pod["spec"]["securityContext"] == whole
    lines = (line.split(" ", 1) for line in settings["spark-defaults.conf"].splitlines())
    conf = {name: value for name, value in lines if not name.startswith("#")}
    assert image_of_executors(rendered("s3-spark")) == as_there["image"]
    mounts = {one["name"]: one["mountPath"] for one in as_there["volumeMounts"]}
    folder, _, name = conf["spark.kubernetes.executor.podTemplateFile"].rpartition("/")
    assert (folder, name) == (mounts["spark"], "executor.yaml")
    ports = {one["containerPort"] for one in as_there["ports"]}
    assert {int(value) for name, value in conf.items() if name.endswith(".port")} <= ports


@pytest.mark.parametrize("cloud", sorted({*OVERLAYS} - {"laptop", *ON_SPARK}))
def test_driver_and_executors_have_the_stores_identity_of_the_services(cloud: str) -> None:
    services, manifests = rendered(cloud), rendered(f"{cloud}-spark")
    data = named(manifests, "ConfigMap", "slatemq-spark")["data"]

    # The accounts of both are bound to it
    bound = named(services, "ServiceAccount", "slatemq")["metadata"]["annotations"]
    janitor = named(manifests, "Deployment", "slatemq-janitor")["spec"]["template"]
    setting = "spark.kubernetes.authenticate.executor.serviceAccountName"
    (of_executors,) = re.findall(rf"^{setting} (\S+)$", data["spark-defaults.conf"], re.MULTILINE)
    for name in (janitor["spec"]["serviceAccountName"], of_executors):
        account = named(manifests, "ServiceAccount", name)
        assert account["metadata"].get("annotations") == bound

    # And their pods have the label by which Azure gives pods theirs
    broker = named(services, "StatefulSet", "slatemq-broker")["spec"]["template"]
    identity = {
        name: value
        for name, value in broker["metadata"]["labels"].items()
        if name.startswith("azure.workload.identity/")
    }
    assert bool(identity) is (cloud == "azure")
    executor = yaml.safe_load(data["executor.yaml"])
    for pod in (janitor, executor):
        assert identity.items() <= pod["metadata"]["labels"].items()


WITH_EXECUTORS = [*ON_SPARK, "s3 with spark"]

IMAGES: list[dict[str, str]] = [
    {"newTag": "0.2.0"},
    {"newName": "registry.example.com:5000/mq/janitor", "newTag": "0.2.0"},
    {"newName": "registry.example.com/janitor", "digest": f"sha256:{'0' * 64}"},
]

BRIEFLY = list(zip(WITH_EXECUTORS, cycle(IMAGES), strict=False))


@pytest.mark.parametrize(
    ("overlay", "version"),
    [one if one in BRIEFLY else proof(*one) for one in product(WITH_EXECUTORS, IMAGES)],
)
def test_executors_have_the_image_of_their_driver_whatever_it_is(
    overlay: str, version: dict[str, str]
) -> None:
    name, _, component = overlay.partition(" with ")
    images = [{"name": "slatemq-janitor", **version}]

    manifests = built_over(name, [component] if component else [], images=images)

    (driver,) = pods_of(manifests, named(manifests, "Deployment", "slatemq-janitor"))
    assert driver.container["image"] != "slatemq-janitor:0.1.0"
    assert image_of_executors(manifests) == driver.container["image"]


def image_of_executors(manifests: list[Manifest]) -> str:
    """What the driver has Spark ask for."""
    (driver,) = pods_of(manifests, named(manifests, "Deployment", "slatemq-janitor"))
    words = driver.environ["PYSPARK_SUBMIT_ARGS"].split()
    (image,) = (one for one in words if one.startswith("spark.kubernetes.container.image="))
    assert words[words.index(image) - 1] == "--conf"
    return image.partition("=")[2]


def test_the_pod_to_try_it_from_is_a_restricted_client() -> None:
    pod = yaml.safe_load((FOLDER / "examples" / "client.yaml").read_text())
    kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    (container,) = pod["spec"]["containers"]
    environ = {one["name"]: one["value"] for one in container["env"]}
    assert set(environ) <= KNOWN
    # The image has what the command `slatemq` needs
    requirements = FOLDER.parents[1] / "requirements" / "console.txt"
    has = {line.partition("==")[0] for line in requirements.read_text().splitlines()}
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    assert {re.split(r"[\[><=]", one)[0] for one in needed} <= has
    assert container["image"].startswith("slatemq-console:")
    assert pod["metadata"]["labels"] == {"slatemq-client": "true"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # It connects as the console does: by Services of several pods, also while one of these is down
    console = next(pod for pod in pods(rendered("laptop")) if pod.service == "console")
    assert environ["SLATEMQ_ENDPOINT"] == console.environ["SLATEMQ_ENDPOINT"]
    for address in environ["SLATEMQ_ENDPOINT"].split(","):
        assert f"`{address}`" in PAGE.read_text()


def test_keda_reaches_the_scaler_and_is_known_to_it() -> None:
    manifests = rendered(WITH_KEDA)
    (pod, *_) = (pod for pod in pods(manifests) if pod.service == "scaler")
    config = load_own(ScalerConfig, "scaler", [], pod.environ)
    authentication, scaled = yaml.safe_load_all(
        (FOLDER / "examples" / "scaledobject.yaml").read_text()
    )

    # The door is open to its namespace alone
    policy = named(manifests, "NetworkPolicy", "slatemq-scaler")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= _labels(manifests, "scaler").items()
    assert policy["ingress"] == [
        {
            "from": [
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
            ],
            "ports": [{"protocol": "TCP", "port": "keda"}],
        }
    ]

    # Its certificate has the name that the scaler asks for, and the scaler that of its address
    certificates = {
        one["spec"]["secretName"]: one["spec"]["dnsNames"]
        for one in of_kind(manifests, "Certificate")
        if "dnsNames" in one["spec"]
    }
    assert certificates["slatemq-keda-tls"] == [config.keda_identity]
    for one in authentication["spec"]["secretTargetRef"]:
        assert set(one) == {"parameter", "name", "key"}
        assert one["name"] == "slatemq-keda-tls"
    assert [one["parameter"] for one in authentication["spec"]["secretTargetRef"]] == [
        "caCert",
        "tlsClientCert",
        "tlsClientKey",
    ]
    service = named(manifests, "Service", "slatemq-scaler")
    (port,) = service["spec"]["ports"]
    for trigger in scaled["spec"]["triggers"]:
        host, _, number = trigger["metadata"]["scalerAddress"].partition(":")
        assert host in certificates["slatemq-scaler-tls"]
        assert host == f"slatemq-scaler.{service['metadata']['namespace']}.svc"
        assert int(number) == port["port"]
        assert trigger["type"] == "external-push"
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        assert trigger_of(trigger["metadata"]).queue_id == "orders"
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_the_scaler_may_inspect_and_nothing_else() -> None:
    text = named(rendered("base"), "ConfigMap", "slatemq-policy")["data"]["policy.yaml"]
    rights = Policy(Document("policy.yaml", text)).rights(Principal("scaler", "token"))

    assert {verb for verb in VERBS if rights.decide(verb, "orders").is_permitted} == {"inspect"}


def _labels(manifests: list[Manifest], service: str) -> dict[str, str]:
    deployment = named(manifests, "Deployment", f"slatemq-{service}")
    labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return labels
