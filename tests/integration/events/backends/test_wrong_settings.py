"""Settings that a server refuses: each is named, and none waited for as an outage is."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import aiohttp
import msgspec
import pytest

import slatemq
from libs.events import tls_faults
from libs.events.backends import open_backend
from slatemq._rpc import tls_probe
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.events.backends.kafka_server import kafka_server
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import Certificate, program, running
from tests.integration.events.backends.slatemq_server import SlatemqServer
from tests.integration.events.conftest import SERVERS
from tests.integration.events.tasks.queued_ingest import queue_settings, write_config
from tests.integration.ingest.server import Ingest, process, refused_start
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow  # Real servers.


@pytest.fixture
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what a server says counts."""
    monkeypatch.setattr(tls_faults, "PROBE_S", 8.0)
    monkeypatch.setattr(tls_probe, "PROBE_S", 15.0)


async def refusal_of(backend: str, settings: Any, **changes: Any) -> InvalidArgument:
    """What a backend with changed settings is refused with."""
    opened = open_backend(backend)
    with pytest.raises(InvalidArgument) as refused:
        await opened.connect(msgspec.structs.replace(settings, **changes))
    await opened.close()
    return refused.value


async def connect(backend: str, settings: Any, **changes: Any) -> None:
    """Connect with changed settings, and close."""
    opened = open_backend(backend)
    try:
        await opened.connect(msgspec.structs.replace(settings, **changes))
    finally:
        await opened.close()


# --- Redis ------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """With a user of few commands, one of few keys, and keys of other types."""
    with running(RedisServer(tmp_path_factory.mktemp("redis"), "streams")) as server:
        for command in (
            "ACL SETUSER commands on >pw ~* +ping +hello +client",
            "ACL SETUSER keys on >pw ~other* +@all",
            "SET tasks-of-another:tasks 1",
            "SET events-of-another:events 1",
            "RPUSH dead-of-another:dead-letter 1",
            "SET delays-of-another:tasks:delayed 1",
        ):
            redis_cli(server, *command.split())
        yield server


def redis_cli(server: RedisServer, *command: str) -> None:
    arguments = [program("redis-cli"), "-p", str(server.port), *command]
    subprocess.run(arguments, check=True, capture_output=True)


@pytest.mark.usefixtures("patient_probes")
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://HOST/99", "DB index is out of range"),
        ("redis://HOST?db=99", "DB index is out of range"),
        ("redis://HOST/first", "must be a database number"),
        ("redis://HOST/-1", "must be a database number"),
        ("redis://nobody:pw@HOST", "invalid username-password"),
        ("redis://commands:wrong@HOST", "invalid username-password"),
        ("redis://commands:pw@HOST", "no permissions to run"),
        ("redis://keys:pw@HOST", "no permissions to access"),
        ("rediss://HOST", "speaks no TLS"),
        ("rediss://HOST?ssl_ca_certs=/absent", "No such file"),
        ("rediss://HOST?ssl_cert_reqs=perhaps", "perhaps"),
        ("redis://HOST?decode_responses=True", "decode_responses is not an option"),
        ("redis://HOST?protocol=9", "protocol must be"),
        ("redis://127.0.0.1:99999", "a port of at most 65535"),
        ("unix:///absent", "must begin with"),
    ],
)
async def test_a_url_that_redis_or_its_client_refuses_is_named(
    redis: RedisServer, url: str, problem: str
) -> None:
    refused = await refusal_of(
        "redis", redis.settings("any"), url=url.replace("HOST", f"127.0.0.1:{redis.port}")
    )
    assert refused.field == "queue.redis.url"
    assert problem in refused.description


@pytest.mark.parametrize("of", ["tasks", "events", "dead", "delays"])
async def test_a_prefix_with_keys_of_another_type_in_redis_is_named(
    redis: RedisServer, of: str
) -> None:
    refused = await refusal_of("redis", redis.settings(f"{of}-of-another"))
    assert refused.field == "queue.redis.stream_prefix"


@pytest.mark.usefixtures("patient_probes")
async def test_tls_of_redis_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with running(RedisServer(tmp_path, "streams", Certificate(tmp_path))) as server:
        plain = server.settings("any")
        encrypted = plain.url.replace("redis://", "rediss://")
        assert "speaks TLS" in (await refusal_of("redis", plain)).description
        refused = await refusal_of("redis", plain, url=encrypted)
        assert "self-signed certificate" in refused.description
        assert refused.field == "queue.redis.url"


@pytest.mark.usefixtures("patient_probes")
async def test_a_certificate_of_the_client_that_redis_refuses_is_named(tmp_path: Path) -> None:
    own = Certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = Certificate(tmp_path / "other")
    with running(RedisServer(tmp_path, "streams", own, asks_clients=True)) as server:
        plain = server.settings("any")
        url = f"{plain.url.replace('redis://', 'rediss://')}?ssl_ca_certs={own.file}"
        with_other = f"{url}&ssl_certfile={other.file}&ssl_keyfile={other.key_file}"
        for refused_url in (url, with_other):
            refused = await refusal_of("redis", plain, url=refused_url)
            assert refused.field == "queue.redis.url"
            assert "refuses this client's TLS" in refused.description
        with_own = f"{url}&ssl_certfile={own.file}&ssl_keyfile={own.key_file}"
        await connect("redis", plain, url=with_own)


async def test_a_redis_that_takes_no_writes_now_is_down_and_no_wrong_setting(
    tmp_path: Path,
) -> None:
    with running(RedisServer(tmp_path, "streams")) as server:
        redis_cli(server, "CONFIG", "SET", "min-replicas-to-write", "1")
        with pytest.raises(Unavailable):
            await connect("redis", server.settings("any"))
        redis_cli(server, "CONFIG", "SET", "min-replicas-to-write", "0")
        await connect("redis", server.settings("any"))


REFUSAL = "no events are published: redis refuses queue.redis.url: "
REFUSED = re.compile(r"^slatemq_queue_refused\{.*\} 1", re.MULTILINE)


async def test_a_setting_that_is_refused_after_an_outage_is_seen_everywhere(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "streams")
    url = f"redis://127.0.0.1:{server.port}/99"
    config = write_config(tmp_path, queue_settings("redis", server, "write-through", url=url))
    flags = ("--config", str(config), "--http-port", "0")
    ready = tmp_path / "ready"
    async with (
        process((tmp_path / "data").as_uri(), ready, *flags) as (started, address),
        Ingest.at(address) as ingest,
        slatemq.connect(address) as client,
        aiohttp.ClientSession(f"http://{json.loads(ready.read_text())['http_address']}") as http,
    ):
        await ingest.send(b"down")
        with running(server):
            async with asyncio.timeout(WAIT_SECONDS):
                while not (await client.status()).services[0].detail.startswith(REFUSAL):
                    await asyncio.sleep(0.1)
                while not REFUSED.search(await fetched(http, "/metrics")):
                    await asyncio.sleep(0.1)
            health = json.loads(await fetched(http, "/health"))
        assert started.returncode is None
    assert health["status"] == "queue_unavailable"
    assert "ERROR" in ready.with_suffix(".log").read_text()


async def fetched(http: aiohttp.ClientSession, path: str) -> str:
    async with http.get(path) as answer:
        return await answer.text()


# --- RabbitMQ ---------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(rabbitmq: RabbitmqServer) -> RabbitmqServer:
    """With a user of nothing, one of few names, and vhosts with limits."""
    every = (".*", ".*", ".*")
    for command in (
        ("add_user", "nothing", "pw"),
        ("add_user", "names", "pw"),
        ("set_permissions", "names", "^other.*", "^other.*", "^other.*"),
        ("add_vhost", "full"),
        ("set_permissions", "-p", "full", "guest", *every),
        ("set_vhost_limits", "-p", "full", '{"max-connections": 0}'),
        ("add_vhost", "small"),
        ("set_permissions", "-p", "small", "guest", *every),
        ("set_vhost_limits", "-p", "small", '{"max-queues": 1}'),
    ):
        rabbitmq.control(*command)
    return rabbitmq


@pytest.mark.usefixtures("patient_probes")
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("amqp://guest:guest@HOST/absent", "vhost absent not found"),
        ("amqp://nothing:pw@HOST/", "access to vhost '/' refused"),
        ("amqp://names:pw@HOST/", "refused for user 'names'"),
        ("amqp://guest:wrong@HOST/", "Login was refused"),
        ("amqp://nobody:pw@HOST/", "Login was refused"),
        ("amqp://guest:guest@HOST/small", "queue limit"),
        ("amqp://guest:guest@HOST/?auth=scram", "authentication mechanisms"),
        ("amqp://guest:guest@HOST/?auth=external", "authentication mechanisms"),
        ("amqp://guest:guest@HOST/?heartbeat=1", "heartbeat is not an option"),
        ("amqps://guest:guest@HOST/", "speaks no TLS"),
        ("amqp://guest:guest@TLS/", "speaks TLS"),
        ("amqps://guest:guest@TLS/", "self-signed certificate"),
        ("amqps://guest:guest@TLS/?cafile=/absent", "No such file"),
        ("http://HOST/", "must begin with"),
    ],
)
async def test_a_url_that_rabbitmq_or_its_client_refuses_is_named(
    shared: RabbitmqServer, url: str, problem: str
) -> None:
    url = url.replace("HOST", f"127.0.0.1:{shared.port}")
    url = url.replace("TLS", f"127.0.0.1:{shared.tls_port}")
    refused = await refusal_of("rabbitmq", shared.settings(f"t{uuid.uuid4().hex[:8]}"), url=url)
    assert refused.field == "queue.rabbitmq.url"
    assert problem in refused.description


async def test_a_vhost_of_rabbitmq_without_room_is_waited_for(shared: RabbitmqServer) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{shared.port}/full"
    with pytest.raises(Unavailable, match="connection limit"):
        await connect("rabbitmq", shared.settings("any"), url=url)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"exchange": "amq.own"}, "exchange"),
        ({"exchange": "amq.topic"}, "exchange"),  # whose exchange of dead letters is reserved
        ({"exchange": "amq.direct"}, "exchange_type"),
        ({"exchange": "e" * 150}, "exchange"),
        ({"exchange": "misused"}, "exchange"),
        ({"queue_prefix": "amq.own"}, "queue_prefix"),
        ({"queue_prefix": "misused"}, "queue_prefix"),
        ({"queue_prefix": "classic"}, "durable"),
    ],
)
async def test_a_name_that_rabbitmq_reserves_or_has_otherwise_is_named(
    shared: RabbitmqServer, changes: dict[str, str], key: str
) -> None:
    settings = shared.settings(f"t{uuid.uuid4().hex[:8]}")
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange("misused.dead-letter", "direct", durable=True)
        await channel.declare_queue("classic.tasks", durable=True)
        other = {"x-queue-type": "quorum", "x-max-length": 5}
        await channel.declare_queue("misused.tasks", durable=True, arguments=other)

    refused = await refusal_of("rabbitmq", settings, **changes)
    assert refused.field == f"queue.rabbitmq.{key}"


@pytest.mark.parametrize("consistency", ["write-through", "async"])
async def test_a_vhost_that_does_not_exist_ends_the_ingest_with_its_key(
    shared: RabbitmqServer, tmp_path: Path, consistency: Any
) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{shared.port}/absent"
    config = write_config(tmp_path, queue_settings("rabbitmq", shared, consistency, url=url))
    said = await refused_start(tmp_path / "data", config)
    assert "queue.rabbitmq.url: NOT_ALLOWED - vhost absent not found" in said


# --- Kafka ------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["localhost:first", "localhost", ":9092", "localhost:99999", "kafka://localhost:1"]
)
async def test_an_address_of_kafka_that_is_none_is_named(tmp_path: Path, address: str) -> None:
    settings = kafka_server(tmp_path).settings("any")
    refused = await refusal_of("kafka", settings, brokers=(settings.brokers[0], address))
    assert refused.field == "queue.kafka.brokers"


# --- ActiveMQ ---------------------------------------------------------------


@pytest.fixture(scope="module")
def amqp10(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitmqServer]:
    """With a user of nothing, and what the settings of the prefix `own` need."""
    _, make = SERVERS["amqp-1.0"]
    with running(make(tmp_path_factory.mktemp("amqp10"))) as server:
        server.control("add_user", "nothing", "pw")
        server.prepare(server.settings("own"))
        yield server


@pytest.mark.usefixtures("patient_probes")
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"url": "amqp://guest:wrong@HOST"}, "url"),
        ({"url": "amqp://nothing:pw@HOST"}, "url"),
        ({"url": "amqps://guest:guest@HOST"}, "url"),
        ({"queue_address": "/elsewhere/{name}"}, "queue_address"),
        ({"events_address": "/elsewhere/{name}"}, "events_address"),
    ],
)
async def test_what_a_broker_of_amqp_refuses_is_named(
    amqp10: RabbitmqServer, changes: dict[str, str], key: str
) -> None:
    host = f"127.0.0.1:{amqp10.port}"
    changed = {name: value.replace("HOST", host) for name, value in changes.items()}
    refused = await refusal_of("activemq", amqp10.settings("own"), **changed)
    assert refused.field == f"queue.activemq.{key}"


# --- SlateMQ ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlatemqServer]:
    with running(SlatemqServer(tmp_path_factory.mktemp("slatemq"))) as server:
        yield server


@pytest.mark.usefixtures("patient_probes")
@pytest.mark.parametrize(
    ("endpoint", "environment", "problem"),
    [
        ("localhost:first", {}, "is not an address"),
        ("http://localhost:7420", {}, "is not an address"),
        (",", {}, "is not an address"),
        ("", {"SLATEMQ_CA": "CERTIFICATE"}, "speaks no TLS"),
        ("", {"SLATEMQ_CA": "/absent"}, "cannot read /absent"),
        ("", {"SLATEMQ_TOKEN_FILE": "/absent"}, "cannot read /absent"),
    ],
)
async def test_an_endpoint_of_slatemq_or_its_credentials_that_are_wrong_are_named(
    stack: SlatemqServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    environment: dict[str, str],
    problem: str,
) -> None:
    certificate = str(Certificate(tmp_path).file)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("CERTIFICATE", certificate))
    settings = stack.settings("any")
    refused = await refusal_of("slatemq", settings, endpoint=endpoint or settings.endpoint)
    assert refused.field == "queue.slatemq.endpoint"
    assert problem in refused.description
