"""docker-compose.yml: what must hold of every service, and of the profiles of event queues."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from cryptography import x509

from libs.events.settings import QueueSettings, read_settings
from libs.serving.process.event_settings import read_queue_settings
from libs.serving.process.healthprobe import tls_files
from libs.storage.database.addresses import parse_root
from slatemq.cli.access.dev_access import make_for_containers
from slatemq.variables import KNOWN
from tests.acceptance.compose_project import HTTP_PORTS, OBSERVABILITY, Compose
from tests.memory_bounds import JOB_CORES, STATED, bytes_of

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]

OURS = ("ingest", "broker", "router", "janitor")
BACKENDS = ("redis", "rabbitmq", "kafka")
PROFILES = ("", "s3", *BACKENDS)
"""Those of which the services read: the profile `observability` adds to any."""

COMPOSE_COMMANDS = re.compile(
    "build|config|create|down|events|exec|help|images|kill|logs|pause|port|ps|pull|push|restart|rm"
    "|run|scale|start|stop|top|unpause|up|version"
)

DURABLE = {
    "redis": "--appendonly yes --appendfsync always",
    "rabbitmq": "/var/lib/rabbitmq",
    "kafka": "'KAFKA_LOG_FLUSH_INTERVAL_MESSAGES': '1'",
}
"""What makes an answer durable, somewhere in the service."""


def environment(profile: str) -> dict[str, str]:
    """What a profile sets for the services, by the file that its name stands for."""
    names = {name for ours in OURS for name in SERVICES[ours]["env_file"]}
    (name,) = {
        re.sub(r"\$\{COMPOSE_PROFILES:-(\w+)\}", lambda m: profile or m[1], n) for n in names
    }
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def config(profile: str) -> Path:
    """The file of settings that a profile makes the services read."""
    volumes: set[str] = {volume for ours in OURS for volume in SERVICES[ours]["volumes"]}
    (mount,) = (volume for volume in volumes if volume.startswith("./"))
    folder, place, _ = mount.split(":")
    return ROOT / folder / Path(environment(profile)["SLATEMQ_CONFIG"]).relative_to(place)


def settings(profile: str) -> QueueSettings:
    return read_settings(config(profile), {})


def address_of(backend: str) -> tuple[str | None, int | None]:
    section = getattr(settings(backend), backend)
    if backend == "kafka":
        (broker,) = section.brokers
        return broker.split(":")[0], int(broker.split(":")[1])
    parts = urlsplit(section.url)
    return parts.hostname, parts.port


def test_there_are_our_services_and_one_for_each_backend() -> None:
    ours = {"access", "console", "grafana", "prometheus", "s3", *OURS}
    assert set(SERVICES) == {*ours, *BACKENDS}


@pytest.mark.parametrize("name", [*OURS, "console"])
def test_no_client_can_have_a_container_killed_for_its_memory(name: str) -> None:
    assert bytes_of(SERVICES[name]["mem_limit"]) >= STATED[name]


def test_jobs_take_no_more_processors_than_the_container_has_memory_for() -> None:
    environ = SERVICES["janitor"]["environment"]
    assert environ["SLATEMQ_SPARK_MASTER"] == f"local[{JOB_CORES}]"


def test_what_jobs_leave_is_reaped() -> None:
    assert SERVICES["janitor"]["init"] is True


@pytest.mark.parametrize("name", [*OURS, *BACKENDS])
def test_each_container_has_bounds_and_comes_back(name: str) -> None:
    service = SERVICES[name]

    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
    assert service["restart"] == "on-failure"
    assert all(port.startswith("127.0.0.1:${SLATEMQ_") for port in service["ports"])


def test_the_console_is_on_loopback_and_reads_no_key_or_token_of_others() -> None:
    console = SERVICES["console"]

    assert console["environment"]["SLATEMQ_HOST"] == "127.0.0.1"
    # Not that of the services: each container of theirs has a network of its own.
    assert console["environment"]["SLATEMQ_HTTP_PORT"] == "${SLATEMQ_CONSOLE_HTTP_PORT:--1}"
    assert console["volumes"] == ["${SLATEMQ_CONSOLE_ACCESS_VOLUME:-console}:/access:ro"]
    addresses = [SERVICES[name]["environment"]["SLATEMQ_ADVERTISED_ADDRESS"] for name in OURS]
    assert {*console["environment"]["SLATEMQ_ENDPOINT"].split(",")} == {*addresses}
    assert console["environment"]["SLATEMQ_TLS_KEY"] == "/access/current/console.key"
    assert re.fullmatch(r"\d+[mg]", console["mem_limit"])
    assert not {name for name in console["environment"] if "POLICY" in name or "TOKEN" in name}


@pytest.mark.parametrize("name", [*OURS, "console"])
def test_the_health_check_asks_for_a_name_of_the_certificate(name: str, tmp_path: Path) -> None:
    make_for_containers(tmp_path / "access", tmp_path / "console")
    environ = SERVICES[name]["environment"]
    folder = tmp_path / ("console" if name == "console" else "access")

    pem = (folder / Path(environ["SLATEMQ_TLS_CERT"]).name).read_bytes()

    alternative = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    names = alternative.value.get_values_for_type(x509.DNSName)
    assert tls_files(environ)["identity"] in names


@pytest.mark.parametrize("name", [*BACKENDS, *OBSERVABILITY])
def test_an_image_of_others_is_pinned_to_a_whole_version(name: str) -> None:
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


@pytest.mark.parametrize("name", OBSERVABILITY)
def test_what_observes_is_on_loopback_where_the_consoles_metrics_are(name: str) -> None:
    service = SERVICES[name]

    assert service["profiles"] == ["observability"]
    assert service["network_mode"] == SERVICES["console"]["network_mode"] == "host"
    listens = service["command"][-1] if name == "prometheus" else service["environment"]
    assert "127.0.0.1" in str(listens)
    assert f"${{SLATEMQ_{name.upper()}_PORT:-" in str(listens)


@pytest.mark.parametrize("name", OURS)
def test_metrics_are_published_where_prometheus_looks_for_them(name: str) -> None:
    published = f"127.0.0.1:${{SLATEMQ_{name.upper()}_HTTP_PORT:-{HTTP_PORTS[name]}}}:7430"

    assert published in SERVICES[name]["ports"]
    assert SERVICES[name]["environment"]["SLATEMQ_HTTP_PORT"] == "${SLATEMQ_HTTP_PORT:--1}"


@pytest.mark.parametrize(("backend", "is_observed"), [("", False), ("redis", True)])
def test_the_compose_test_chooses_every_port_of_the_file(
    tmp_path: Path, backend: str, is_observed: bool
) -> None:
    project = Compose(tmp_path, backend, is_observed=is_observed)
    named = set(re.findall(r"SLATEMQ_\w+_PORT", (ROOT / "docker-compose.yml").read_text()))

    read = _config(project.command, project.environ)

    assert named <= set(project.settings)
    ports = {
        port if isinstance(port, str) else f"{port['published']}:{port['target']}"
        for service in read["services"].values()
        for port in service.get("ports", ())
    }
    chosen = {str(port) for port in (*project.ports.values(), *project.http_ports.values())}
    assert {re.sub(r"^127\.0\.0\.1:|:\d+(/tcp)?$", "", port) for port in ports} <= chosen
    assert not is_observed or str(tmp_path) in str(read["services"]["prometheus"]["volumes"])


def test_every_command_of_compose_that_docs_name_is_one_of_the_oldest_compose() -> None:
    """Of 1.29, which Debian has; the plugin has all of its commands."""
    texts = [ROOT / "docker-compose.yml", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        command
        for text in texts
        for command in re.findall(
            r"docker-compose (?:--profile \w+ )*(?!--)([a-z]+)\b(?=[^`]*[`\n])", text.read_text()
        )
    }

    assert named >= {"up", "down", "ps"}
    assert [name for name in named if not COMPOSE_COMMANDS.fullmatch(name)] == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_runs_in_its_profile_only_and_keeps_what_it_answered(name: str) -> None:
    service = SERVICES[name]

    assert service["profiles"] == [name]
    assert service["healthcheck"]["test"][0] == "CMD"
    (volume,) = service["volumes"]
    assert volume.split(":")[0] == name
    assert name in COMPOSE["volumes"]
    assert DURABLE[name] in str(service)


def test_redis_refuses_more_before_its_container_is_full() -> None:
    command = SERVICES["redis"]["command"]
    (megabytes,) = re.findall(r"--maxmemory (\d+)mb", command)

    assert 2 * int(megabytes) <= int(SERVICES["redis"]["mem_limit"].removesuffix("m"))
    assert "--maxmemory-policy noeviction" in command


@pytest.mark.parametrize("name", OURS)
def test_our_services_run_in_every_profile_and_wait_for_no_backend(name: str) -> None:
    assert "profiles" not in SERVICES[name]
    assert not set(SERVICES[name].get("depends_on", ())) & set(BACKENDS)


@pytest.mark.parametrize("profile", ["", "s3"])
def test_without_a_backend_the_services_are_in_direct_mode(profile: str) -> None:
    environ = environment(profile)
    assert "SLATEMQ_CONFIG" not in environ
    assert read_queue_settings("", environ | {"SLATEMQ_QUEUE_CONSISTENCY": "async"}) is None


def test_all_variables_of_the_profiles_are_known() -> None:
    for profile in PROFILES:
        assert set(environment(profile)) <= KNOWN | {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def test_on_s3_all_data_is_in_the_bucket_that_its_server_makes() -> None:
    assert parse_root(environment("")["SLATEMQ_ROOT"]).url == "file:///data"
    root = urlsplit(environment("s3")["SLATEMQ_ROOT"])
    query = parse_qs(root.query)
    server = (ROOT / SERVICES["s3"]["build"] / "server.py").read_text()

    assert root.scheme == "s3"
    assert query["endpoint"] == ["http://s3:5000"]
    assert f'BUCKET: Final = "{root.hostname}"' in server
    assert "PORT: Final = 5000" in server
    assert "volumes" not in SERVICES["s3"], "it keeps nothing, and says so"


@pytest.mark.parametrize("name", [*OURS, "access", "console", "s3"])
def test_the_root_of_our_containers_cannot_be_written_nor_can_they_gain_rights(name: str) -> None:
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", [*OURS, "console"])
def test_our_services_have_certificates_in_every_profile(name: str) -> None:
    assert {"SLATEMQ_TLS_CA", "SLATEMQ_TLS_CERT", "SLATEMQ_TLS_KEY"} <= set(
        SERVICES[name]["environment"]
    )
    assert "SLATEMQ_INSECURE" not in SERVICES[name]["environment"]


def test_docker_compose_understands_each_profile() -> None:
    for profile in PROFILES:
        read = _config(["docker-compose"], os.environ | {"COMPOSE_PROFILES": profile})
        broker = read["services"]["broker"]
        assert environment(profile).items() <= broker["environment"].items()


def test_the_second_shard_of_the_page_is_a_broker_of_its_own_number_and_addresses(
    tmp_path: Path,
) -> None:
    # Given the file with what the page has one write below the broker
    page = (ROOT / "docs/how-to/containers.md").read_text()
    (block,) = re.findall(r"below `broker`:\n\n```yaml\n(.*?)```", page, re.DOTALL)
    text = (ROOT / "docker-compose.yml").read_text()
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    above, router, below = text.partition("\n  router:\n")
    (tmp_path / "docker-compose.yml").write_text(above + "\n" + block + router + below)

    services = _config(["docker-compose"], os.environ, tmp_path)["services"]

    # Then it is as the first one, but for its number and its addresses
    first, second = services["broker"], services["broker-1"]
    environ = second["environment"]
    assert _shared(environ) == _shared(first["environment"])
    assert environ["SLATEMQ_SHARD"] == "1"
    assert environ["SLATEMQ_PEER_ADDRESS"] == "broker-1:7419"
    for name in {*first, *second} - {"build", "environment", "ports"}:
        assert first[name] == second[name], name

    # And clients find it where no other container is, and Prometheus by the target of the page
    port, http_port = _published(second)
    assert environ["SLATEMQ_ADVERTISED_ADDRESS"] == f"127.0.0.1:{port}"
    assert f'- {{targets: ["127.0.0.1:{http_port}"], labels: {{service: broker}}}}' in page
    others = [_published(one) for name, one in services.items() if name != "broker-1"]
    assert {port, http_port}.isdisjoint({one for ports in others for one in ports})
    assert port != services["console"]["environment"]["SLATEMQ_PORT"]


def _shared(environ: Mapping[str, str]) -> dict[str, str]:
    """What all shards of a service have."""
    own = {"SLATEMQ_SHARD", "SLATEMQ_ADVERTISED_ADDRESS", "SLATEMQ_PEER_ADDRESS"}
    return {name: value for name, value in environ.items() if name not in own}


def _published(service: Mapping[str, Any]) -> list[str]:
    """The ports of a service on this machine."""
    return [
        port.split(":")[1] if isinstance(port, str) else str(port["published"])
        for port in service.get("ports", ())
    ]


def _config(command: list[str], environ: Mapping[str, str], folder: Path = ROOT) -> dict[str, Any]:
    """The folder's docker-compose.yml as docker-compose reads it."""
    if shutil.which("docker-compose") is None:
        why = "docker-compose is absent: docker-compose.yml is not tried"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    done = subprocess.run(
        [*command, "config"], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = yaml.safe_load(done.stdout)
    return read


@pytest.mark.parametrize("profile", BACKENDS)
def test_the_settings_of_a_profile_name_its_backend_and_its_container(profile: str) -> None:
    read = read_queue_settings(str(config(profile)), {})
    host, port = address_of(profile)

    assert read is not None
    assert (read.backend, read.consistency, host) == (profile, "write-through", profile)
    assert port == {"redis": 6379, "rabbitmq": 5672, "kafka": 9092}[profile]


def test_the_settings_are_as_durable_as_the_containers() -> None:
    assert settings("rabbitmq").rabbitmq.durable
    assert settings("kafka").kafka.acks == "all"
    login = SERVICES["rabbitmq"]["environment"]
    parts = urlsplit(settings("rabbitmq").rabbitmq.url)
    assert (parts.username, parts.password) == (
        login["RABBITMQ_DEFAULT_USER"],
        login["RABBITMQ_DEFAULT_PASS"],
    )


@pytest.mark.parametrize("name", ["ingest", "broker", "janitor"])
def test_the_image_of_a_service_with_events_has_the_client_of_each_backend(name: str) -> None:
    pins = re.findall(
        r"^([a-z-]+)==", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE
    )

    assert {"aio-pika", "aiokafka", "python-ulid", "redis"} <= set(pins)


def test_every_file_of_settings_belongs_to_a_profile() -> None:
    files = {file.name for file in config("redis").parent.iterdir() if file.is_file()}

    assert files == {
        *(f"{name}.yaml" for name in BACKENDS),
        *(f"{name}.env" for name in ("direct", "s3", *BACKENDS)),
    }
