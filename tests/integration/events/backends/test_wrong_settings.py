"""Settings that a server refuses: each is named, and none waited for as an outage is."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from tests.integration.events.backends.servers import Certificate, running
from tests.integration.events.backends.slatemq_server import SlatemqServer
from tests.integration.events.backends.test_conformance import a_task, created
from tests.integration.events.conftest import SERVERS, next_task
from tests.integration.events.tasks.queued_ingest import queue_settings, write_config
from tests.integration.ingest.server import Ingest, process, refused_start
from tests.integration.waiting import WAIT_SECONDS
from tests.ports import free_ports

pytestmark = pytest.mark.slow  # Real servers.


@pytest.fixture
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what a server says counts."""
    monkeypatch.setattr(tls_faults, "PROBE_S", 8.0)
    monkeypatch.setattr(tls_probe, "PROBE_S", 15.0)


async def refusal_of(
    backend: str, settings: Any, *, has_tasks: bool = False, **changes: Any
) -> InvalidArgument:
    """What a backend with changed settings is refused with; `has_tasks`: it is to apply them."""
    opened = open_backend(backend, is_sole_consumer=has_tasks)
    with pytest.raises(InvalidArgument) as refused:
        await opened.connect(msgspec.structs.replace(settings, **changes))
    await opened.close()
    return refused.value


async def connect(backend: str, settings: Any, *, has_tasks: bool = False, **changes: Any) -> None:
    """Connect with changed settings, and close; `has_tasks`: it is to apply them."""
    opened = open_backend(backend, is_sole_consumer=has_tasks)
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
            server.control(*command.split())
        yield server


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


@pytest.mark.parametrize(
    ("structure", "command"),
    [
        *[("streams", command) for command in ("XADD", "XDEL", "XCLAIM", "XREADGROUP", "ZREM")],
        *[("lists", command) for command in ("LMOVE", "LPUSH", "RPUSH", "TIME", "ZADD")],
    ],
)
async def test_a_command_that_a_user_of_redis_may_not_execute_is_named_before_it_is_needed(
    redis: RedisServer, structure: str, command: str
) -> None:
    redis.control(*f"ACL SETUSER all-but-one reset on >pw ~* +@all -{command}".split())
    url = f"redis://all-but-one:pw@127.0.0.1:{redis.port}"
    settings = msgspec.structs.replace(redis.settings("any"), task_structure=structure)
    refused = await refusal_of("redis", settings, has_tasks=True, url=url)
    assert refused.field == "queue.redis.url"
    assert refused.description.startswith(command)


async def test_what_publishes_events_alone_needs_no_right_to_the_commands_of_tasks(
    redis: RedisServer,
) -> None:
    settings = redis.settings("alone")
    url = f"redis://publisher:pw@127.0.0.1:{redis.port}"
    rights = "+@connection +@scripting +persist +type +xgroup"
    redis.control(*f"ACL SETUSER publisher reset on >pw ~* {rights}".split())
    refused = await refusal_of("redis", settings, url=url)
    assert refused.description.startswith("XADD alone:events")

    redis.control("ACL", "SETUSER", "publisher", "+xadd")
    backend = open_backend("redis")
    try:
        await backend.connect(msgspec.structs.replace(settings, url=url))
        await backend.publish(created("key"))
    finally:
        await backend.close()
    assert (await refusal_of("redis", settings, has_tasks=True, url=url)).description


@pytest.mark.parametrize("structure", ["streams", "lists"])
@pytest.mark.parametrize("prefix", ["unknown", "can't", "NOPERM"])
async def test_no_prefix_of_keys_is_taken_for_the_refusal_of_a_command(
    redis: RedisServer, structure: Any, prefix: str
) -> None:
    settings = redis.settings(f"{prefix}-{structure}")
    await connect("redis", settings, has_tasks=True, task_structure=structure)


async def test_looking_for_refused_commands_leaves_a_redis_as_it_was(redis: RedisServer) -> None:
    settings = msgspec.structs.replace(redis.settings("untouched"), task_structure="lists")
    await connect("redis", settings, has_tasks=True)
    assert not redis.control("KEYS", "untouched*")


@pytest.mark.parametrize("structure", ["streams", "lists"])
async def test_a_redis_without_a_command_that_tasks_need_is_named(
    tmp_path: Path, structure: Any
) -> None:
    lacking = {"streams": "XCLAIM", "lists": "LMOVE"}[structure]
    options = ("--rename-command", lacking, "")
    with running(RedisServer(tmp_path, structure, options=options)) as server:
        refused = await refusal_of("redis", server.settings("any"), has_tasks=True)
    assert refused.field == "queue.redis.url"
    assert refused.description.startswith(lacking)


@pytest.mark.parametrize("structure", ["streams", "lists"])
async def test_a_redis_in_cluster_mode_is_named_though_one_node_has_all_slots(
    tmp_path: Path, structure: Any
) -> None:
    (bus_port,) = free_ports(1)
    options = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port))
    with running(RedisServer(tmp_path, structure, options=options)) as server:
        server.control("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        refused = await refusal_of("redis", server.settings("any"))
    assert refused.field == "queue.redis.url"
    assert "without cluster mode" in refused.description


@pytest.mark.parametrize("changed", [("streams", "lists"), ("lists", "streams")])
async def test_a_structure_of_tasks_that_differs_from_what_redis_has_is_named(
    redis: RedisServer, changed: tuple[str, str]
) -> None:
    # Given a task in one structure
    before, after = changed
    settings = redis.settings(f"t{uuid.uuid4().hex[:8]}")
    backend = open_backend("redis")
    await backend.connect(msgspec.structs.replace(settings, task_structure=before))
    await backend.enqueue_task(a_task())
    await backend.close()

    # Then the other one is refused with its key, and with what to do, which helps
    refused = await refusal_of("redis", settings, task_structure=after)
    assert refused.field == "queue.redis.task_structure"
    key = f"{settings.stream_prefix}:tasks"
    assert f"DEL {key}" in refused.description
    redis.control("DEL", key)
    await connect("redis", settings, task_structure=after)


async def test_streams_are_refused_though_all_tasks_of_lists_are_in_work(
    redis: RedisServer,
) -> None:
    # Given a task in a list that a consumer has taken, as after a kill of it
    settings = redis.settings(f"t{uuid.uuid4().hex[:8]}")
    backend = open_backend("redis", is_sole_consumer=True)
    await backend.connect(msgspec.structs.replace(settings, task_structure="lists"))
    await backend.enqueue_task(a_task())
    task = await next_task(backend)
    assert redis.control("TYPE", f"{settings.stream_prefix}:tasks") == "none"

    # Then streams are refused until it is finished
    refused = await refusal_of("redis", settings, has_tasks=True, task_structure="streams")
    assert refused.field == "queue.redis.task_structure"
    assert f"{settings.stream_prefix}:tasks:processing:" in refused.description
    await backend.complete_task(task.task_id)
    await backend.close()
    await connect("redis", settings, has_tasks=True, task_structure="streams")
    # And their start removes the consumers of lists, which nothing would remove any more
    assert redis.control("TYPE", f"{settings.stream_prefix}:tasks:consumers") == "none"


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
        server.control("CONFIG", "SET", "min-replicas-to-write", "1")
        with pytest.raises(Unavailable):
            await connect("redis", server.settings("any"))
        server.control("CONFIG", "SET", "min-replicas-to-write", "0")
        await connect("redis", server.settings("any"))


async def test_a_password_that_is_changed_after_the_start_counts_as_an_outage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(RedisServer(tmp_path, "streams")) as server:
        # Given a backend, whose connections Redis ends as its password is changed
        backend = open_backend("redis")
        await backend.connect(server.settings("any"))
        await backend.publish(created("before"))
        server.control("CONFIG", "SET", "requirepass", "pw")
        server.control("-a", "pw", "CLIENT", "KILL", "TYPE", "normal")

        # Then that is seen though nothing is called
        async with asyncio.timeout(WAIT_SECONDS):
            while not backend.refusal:
                assert not await backend.health_check()
        assert backend.refusal.startswith("Redis refuses the login")

        # And calls are to be repeated, and succeed once it is as it was
        async with asyncio.timeout(WAIT_SECONDS):
            while "Redis refuses calls: Redis refuses the login" not in caplog.text:
                with pytest.raises(Unavailable):
                    await backend.publish(created("refused"))
        server.control("-a", "pw", "CONFIG", "SET", "requirepass", "")
        await backend.publish(created("after"))
        assert await backend.health_check()
        assert backend.refusal == ""
        await backend.close()


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


@pytest.mark.parametrize(
    ("consistency", "lost", "back", "seen"),
    [
        ("write-through", ["-xadd"], ["+xadd"], "no events are published: "),
        ("async", ["-xadd"], ["+xadd"], "tasks are refused: "),
        # That of the events alone: tasks are taken nonetheless.
        ("async", ["resetkeys", "~*.ingest-0*"], ["allkeys"], "no events are published: "),
    ],
)
async def test_a_permission_that_is_lost_after_the_start_is_seen_everywhere_until_it_is_back(
    tmp_path: Path, consistency: Any, lost: Sequence[str], back: Sequence[str], seen: str
) -> None:
    server = RedisServer(tmp_path, "streams")
    config = write_config(tmp_path, queue_settings("redis", server, consistency))
    flags = ("--config", str(config), "--http-port", "0")
    ready = tmp_path / "ready"
    with running(server):
        async with (
            process((tmp_path / "data").as_uri(), ready, *flags) as (_, address),
            Ingest.at(address) as ingest,
            slatemq.connect(address) as client,
            aiohttp.ClientSession(
                f"http://{json.loads(ready.read_text())['http_address']}"
            ) as http,
            asyncio.timeout(WAIT_SECONDS),
        ):
            # Given a backend that answers, and does not take events or tasks any more
            while not (await events_of_ingest(client)).answering:
                await asyncio.sleep(0.1)
            server.control("ACL", "SETUSER", "default", *lost)
            with suppress(Unavailable):
                await ingest.send(b"refused")

            # Then all that shows its state says so
            while not (detail := (await client.status()).services[0].detail):
                await asyncio.sleep(0.1)
            assert detail.startswith(f"{seen}Redis refuses ")
            while not REFUSED.search(await fetched(http, "/metrics")):
                await asyncio.sleep(0.1)
            while (health := json.loads(await fetched(http, "/health")))["status"] == "ok":
                await asyncio.sleep(0.1)
            assert health["status"] == "queue_unavailable"
            status = await events_of_ingest(client)
            assert (status.answering, "Redis refuses " in status.last_error) == (False, True)

            # When it takes them again, then nothing is refused
            server.control("ACL", "SETUSER", "default", *back)
            await ingest.send(b"taken")
            while (await client.status()).services[0].detail:
                await asyncio.sleep(0.1)
            while REFUSED.search(await fetched(http, "/metrics")):
                await asyncio.sleep(0.1)
            while json.loads(await fetched(http, "/health"))["status"] != "ok":
                await asyncio.sleep(0.1)
            status = await events_of_ingest(client)
            assert status.answering


async def test_what_is_refused_while_nothing_is_published_is_the_last_error(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "streams")
    config = write_config(tmp_path, queue_settings("redis", server, "write-through"))
    with running(server):
        async with (
            process((tmp_path / "data").as_uri(), tmp_path / "ready", "--config", str(config)) as (
                _,
                address,
            ),
            slatemq.connect(address) as client,
            asyncio.timeout(WAIT_SECONDS),
        ):
            while not (await events_of_ingest(client)).answering:
                await asyncio.sleep(0.1)
            server.control("CONFIG", "SET", "requirepass", "pw")
            server.control("-a", "pw", "CLIENT", "KILL", "TYPE", "normal")

            while not (await client.status()).services[0].detail:
                await events_of_ingest(client)
                await asyncio.sleep(0.1)
            status = await events_of_ingest(client)
    assert status.last_error.startswith("Redis refuses the login")


async def events_of_ingest(client: slatemq.Client) -> slatemq.EventsStatus:
    (status,) = [one for one in await client.events_status() if one.service == "ingest"]
    return status


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
        ("add_user", "unread", "pw"),
        ("set_permissions", "unread", ".*", ".*", r"(dead-letters?|retry)$"),
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


async def test_tasks_that_their_only_consumer_may_not_read_are_named(
    shared: RabbitmqServer, tmp_path: Path
) -> None:
    url = f"amqp://unread:pw@127.0.0.1:{shared.port}/"
    config = write_config(tmp_path, queue_settings("rabbitmq", shared, "async", url=url))
    said = await refused_start(tmp_path / "data", config)
    assert "queue.rabbitmq.url: " in said
    assert ".tasks' in vhost '/' refused for user 'unread'" in said


async def test_a_vhost_of_rabbitmq_without_room_is_waited_for(shared: RabbitmqServer) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{shared.port}/full"
    with pytest.raises(Unavailable, match="connection limit"):
        await connect("rabbitmq", shared.settings("any"), url=url)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"exchange": "amq.own"}, "exchange"),
        ({"exchange": "amq.direct"}, "exchange_type"),
        ({"exchange": "e" * 150}, "exchange"),
        (
            {"exchange": "e.dead-letters", "exchange_type": "fanout", "queue_prefix": "e"},
            "exchange",
        ),
        ({"queue_prefix": "misdelivered"}, "queue_prefix"),
        ({"queue_prefix": "amq.own"}, "queue_prefix"),
        ({"queue_prefix": "misused"}, "queue_prefix"),
        ({"queue_prefix": "classic"}, "durable"),
    ],
)
async def test_a_name_that_rabbitmq_reserves_or_has_otherwise_is_named(
    shared: RabbitmqServer, changes: dict[str, Any], key: str
) -> None:
    settings = shared.settings(f"t{uuid.uuid4().hex[:8]}")
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange("misdelivered.dead-letters", "direct", durable=True)
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
    changed: dict[str, Any] = {name: value.replace("HOST", host) for name, value in changes.items()}
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
