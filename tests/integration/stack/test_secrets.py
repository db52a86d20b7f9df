"""A stack with a secret in every place that takes one: none of them comes out anywhere.

With it, what is written down of acts: log lines, and events on Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import ssl
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
import redis

import slatemq
from libs.serving.process.exits import EXIT_STORE_DOWN
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq.cli.access.dev_certificates import SERVICE_NAME
from slatemq.errors import PermissionDenied
from slatemq.events.envelope import Event, decode_event
from slatemq.v1 import queue_pb2, queue_pb2_grpc, removal_pb2, removal_pb2_grpc
from tests.acceptance.local_stack import LocalStack, wait_until
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.stack.secured import Secured
from tests.ports import free_ports

pytestmark = pytest.mark.slow

EVENTUALLY_S = 60.0
EVENTS = "secret:events"


class Collector(grpc.GenericRpcHandler):
    """Takes what OTLP exporters send, as bytes."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._export)

    def _export(self, request: bytes, context: Any) -> bytes:
        self.bodies.append(request)
        return b""


class Planted(NamedTuple):
    """A stack, and the secrets that it and its callers were given."""

    made: Secured
    stack: LocalStack
    collector: Collector
    server: RedisServer
    secrets: dict[str, str]

    @property
    def logs(self) -> str:
        """What the launcher and all services have said."""
        files = (self.stack.folder / "data" / "logs").iterdir()
        return self.stack.said + "".join(file.read_text() for file in files)

    def events(self) -> list[bytes]:
        """What is in the stream."""
        with redis.Redis(port=self.server.port, password=self.secrets["redis"]) as client:
            entries: Any = client.xrange(EVENTS)
        return [fields[b"data"] for _, fields in entries]

    def acts(self) -> list[Event]:
        found = [decode_event(data) for data in self.events()]
        return [event for event in found if event.type == "access.act"]

    def change_policy(self) -> None:
        policy = Path(self.made.environ["SLATEMQ_ACCESS_POLICY"])
        policy.write_text(f"# of today\n{policy.read_text()}")

    def leaks(self, *texts: str | bytes) -> list[str]:
        """The names of the secrets that are in a text."""
        each = [text if isinstance(text, bytes) else text.encode() for text in texts]
        return [
            name
            for name, secret in self.secrets.items()
            if any(secret.encode() in text for text in each)
        ]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    folder = tmp_path_factory.mktemp("secrets")
    made = Secured(folder)
    names = ("redis", "otlp", "s3-events", "store-key", "store-token", "payload")
    found = {name: secrets.token_hex(12) for name in names}
    for name, token in made.tokens.items():
        found[f"token of {name}"] = token.token[-43:]  # 32 random bytes, which may have a "_"
    collector = Collector()
    otlp = grpc.server(ThreadPoolExecutor(2), handlers=[collector])
    otlp_port = otlp.add_insecure_port("127.0.0.1:0")
    otlp.start()
    (folder / "redis").mkdir()
    before = dict(os.environ)
    with running(RedisServer(folder / "redis", "streams")) as server:
        with redis.Redis(port=server.port) as client:
            client.config_set("requirepass", found["redis"])
        os.environ.update(
            made.environ
            | {
                "SLATEMQ_QUEUE_BACKEND": "redis",
                "SLATEMQ_QUEUE_ENABLED": "true",
                "SLATEMQ_QUEUE_REDIS_URL": f"redis://:{found['redis']}@127.0.0.1:{server.port}",
                "SLATEMQ_QUEUE_REDIS_STREAM_PREFIX": "secret",
                "SLATEMQ_OTLP_ENDPOINT": f"http://127.0.0.1:{otlp_port}",
                "SLATEMQ_S3_EVENTS_TOKEN": found["s3-events"],
                "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{found['otlp']}",
                "AWS_SECRET_ACCESS_KEY": found["store-key"],
                "AWS_SESSION_TOKEN": found["store-token"],
            }
        )
        try:
            arguments = ("--data", str(folder / "stack" / "data"), "--http-ports", "0")
            with LocalStack(folder / "stack", *arguments) as stack:
                yield Planted(made, stack, collector, server, found)
        finally:
            os.environ.clear()
            os.environ.update(before)
            otlp.stop(0)


async def work(planted: Planted) -> None:
    """Calls that succeed and fail, with payloads and tokens in them."""
    made, stack = planted.made, planted.stack
    payload = planted.secrets["payload"].encode()
    ops = made.credentials("ops")
    async with slatemq.connect(stack.endpoint, credentials=ops) as client:
        await client.create_queue("orders", max_attempts=1)
        await client.publish(payload, {"queue": "orders", "tenant": "acme"})
        (message,) = await client.claim("orders", wait=EVENTUALLY_S)
        await message.nack("broken")
        (letter,) = [one async for one in client.list_entries("orders", "failed")]
        replacement = slatemq.ReplaceDeadLetter(letter.handle, payload, {"queue": "orders"})
        await client.settle_dead_letters([replacement])
        await client.purge_queue("orders", ["available"])
        assert [run async for run in client.list_job_runs()] == []
    async with slatemq.connect(stack.endpoint, credentials=made.credentials("shop")) as client:
        with pytest.raises(PermissionDenied):
            await client.purge_queue("orders")
        with pytest.raises(PermissionDenied):
            await client.run_job("restore", queue_ids=["orders"])
    forged = made.tokens["ops"].token[:-3] + "xyz"
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    async with grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel:
        stub: Any = queue_pb2_grpc.QueueServiceStub(channel)
        metadata = (("authorization", f"Bearer {forged}"),)
        for call, request in (
            (stub.DeleteQueue, queue_pb2.DeleteQueueRequest(queue_id="orders")),
            (stub.GetQueue, queue_pb2.GetQueueRequest(queue_id="orders")),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(request, metadata=metadata, timeout=30)
    client_files = [made.certificates / f"client.{kind}" for kind in ("crt", "key")]
    stolen = ChannelTls(CertificateFiles(made.certificates / "ca.crt", *client_files), SERVICE_NAME)
    topology = stack.folder / "data" / "topology" / "broker-0.json"
    peers = json.loads(topology.read_text())["peer_address"]
    async with grpc.aio.secure_channel(peers, stolen.credentials, stolen.options) as channel:
        remove: Any = removal_pb2_grpc.RemovalServiceStub(channel).RemoveEntries
        with pytest.raises(grpc.aio.AioRpcError):
            await remove(removal_pb2.RemoveEntriesRequest(), timeout=30)


async def test_acts_are_events_and_log_lines_permitted_or_refused(planted: Planted) -> None:
    await work(planted)
    planted.change_policy()
    service = "/slatemq.v1."
    wanted = {
        ("ops", f"{service}QueueService/CreateQueue", "OK", "broker-0"),
        ("ops", f"{service}DeadLetterService/SettleDeadLetters", "OK", "broker-0"),
        ("ops", f"{service}QueueService/PurgeQueue", "OK", "broker-0"),
        ("ops", f"{service}JanitorService/ListRuns", "OK", "janitor-0"),
        ("shop", f"{service}QueueService/PurgeQueue", "PERMISSION_DENIED", "broker-0"),
        ("shop", f"{service}JanitorService/RunJob", "PERMISSION_DENIED", "janitor-0"),
        ("", f"{service}QueueService/DeleteQueue", "UNAUTHENTICATED", "broker-0"),
        ("", f"{service}QueueService/GetQueue", "UNAUTHENTICATED", "broker-0"),
        # On the port for services, with a client's certificate
        ("dev-client", f"{service}RemovalService/RemoveEntries", "PERMISSION_DENIED", "broker-0"),
        # Files, by each process that has them
        *(("", "read-file", "OK", source) for source in ("ingest-0", "broker-0", "janitor-0")),
    }

    def missing() -> set[tuple[str, str, str, str]]:
        return wanted - {
            (one.data["principal"], one.data["act"], one.data["outcome"], one.source)
            for one in planted.acts()
        }

    await asyncio.to_thread(wait_until, lambda: not missing(), EVENTUALLY_S)
    refused = [one.data for one in planted.acts() if one.data["principal"] == "shop"]
    purge, run = [
        next(data for data in refused if data["act"].endswith(name))
        for name in ("/PurgeQueue", "/RunJob")
    ]
    assert (purge["subjects"], purge["proof"]) == (["orders"], "token")
    assert run["subjects"] == ["orders"]
    assert run["details"][:2] == ["job=restore", "dry_run=false"]
    assert purge["peer"].startswith("ipv4:127.0.0.1:")
    assert planted.leaks(*planted.events()) == []
    lines = [line for line in planted.logs.splitlines() if "slatemq.audit" in line]
    for principal, act, outcome, source in wanted:
        who = principal or json.dumps("")
        facts = (f"source={source}", f"principal={who}", f"act={act}", f"outcome={outcome}")
        assert any(all(fact in line for fact in facts) for line in lines), facts


def test_no_secret_comes_out(planted: Planted, tmp_path: Path) -> None:
    made, stack = planted.made, planted.stack
    # A backend that refuses the password
    with redis.Redis(port=planted.server.port, password=planted.secrets["redis"]) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
    try:
        assert planted.leaks(*asyncio.run(problems_of_events(planted))) == []
    finally:
        with redis.Redis(port=planted.server.port, password="another") as client:
            client.config_set("requirepass", planted.secrets["redis"])

    # Processes, the command, metrics, the collector
    titles = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in stack.pids.values()]
    assert all(titles)
    assert planted.leaks(*titles) == []
    status = subprocess.run(
        [sys.executable, "-m", "slatemq.cli", "--endpoint", stack.endpoint, "--json", "status"],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "SLATEMQ_CA": made.environ["SLATEMQ_TLS_CA"],
            "SLATEMQ_TOKEN": made.tokens["ops"].token,
        },
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(status.stdout)["services"]
    assert planted.leaks(status.stdout, status.stderr) == []
    tls = ssl.create_default_context(cafile=made.environ["SLATEMQ_TLS_CA"])
    for address in stack.http_endpoints.values():
        with urllib.request.urlopen(
            f"https://{address}/metrics", timeout=30, context=tls
        ) as answer:
            assert planted.leaks(answer.read()) == []
    wait_until(lambda: planted.collector.bodies, EVENTUALLY_S)

    # Logs and the store: its objects have payloads, and nothing else of these
    assert "INFO broker" in planted.logs
    assert planted.leaks(planted.logs, *planted.collector.bodies) == []
    stored = dict(read_files(stack.folder / "data"))
    assert set(planted.leaks(*stored.values())) <= {"payload"}
    topology = [one for file, one in stored.items() if file.parent.name in ("topology", "instance")]
    assert topology
    assert planted.leaks(*topology) == []


def read_files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """All files below a folder, but for those that are renamed or removed meanwhile."""
    for file in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):
            yield file, file.read_bytes()


async def problems_of_events(planted: Planted) -> list[str]:
    """What the processes say of a backend that refuses them."""
    async with slatemq.connect(
        planted.stack.endpoint, credentials=planted.made.credentials("ops")
    ) as client:
        await client.create_queue("while-away")
        async with asyncio.timeout(EVENTUALLY_S):
            while True:
                found = [one.last_error for one in await client.events_status()]
                if any(found):
                    return found
                await asyncio.sleep(0.1)


def test_the_store_is_for_its_user_alone(planted: Planted) -> None:
    files: dict[Path, str] = {}
    folders: dict[Path, str] = {}
    for one in (planted.stack.folder / "data").rglob("*"):
        with suppress(FileNotFoundError):  # It is renamed or removed meanwhile.
            mode = one.stat().st_mode
            (folders if stat.S_ISDIR(mode) else files)[one] = oct(stat.S_IMODE(mode))

    assert {".sst", ".json"} <= {one.suffix for one in files}
    assert set(files.values()) == {"0o600"}
    assert set(folders.values()) == {"0o700"}


@pytest.mark.parametrize(
    ("root", "environ"),
    [
        ("s3://key:SECRET@bucket", {}),
        ("s3://bucket?secret_access_key=SECRET", {}),
        ("s3://bucket?endpoint=http://a:SECRET@127.0.0.1:PORT&allow_http=true", {}),
        ("s3://bucket?endpoint=http://127.0.0.1:PORT&region=x&allow_http=true", {}),
        ("DATA", {"SLATEMQ_QUEUE_RABBITMQ_URL": "http://guest:SECRET@127.0.0.1:PORT"}),
        ("DATA", {"SLATEMQ_QUEUE_RABBITMQ_URL": "amqp://guest:SECRET@[::1"}),
        ("DATA", {"SLATEMQ_QUEUE_RABBITMQ_URL": "amqp://guest:SECRET@127.0.0.1:x"}),
    ],
)
def test_a_start_that_fails_says_why_without_the_secret(
    root: str, environ: dict[str, str], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    secret = secrets.token_hex(12)

    def filled(text: str) -> str:
        text = text.replace("SECRET", secret).replace("PORT", str(port))
        return text.replace("DATA", tmp_path.as_uri())

    ended = subprocess.run(
        [sys.executable, "-m", "services.ingest"],
        env={
            "PATH": os.environ["PATH"],
            "SLATEMQ_ROOT": filled(root),
            "SLATEMQ_QUEUE_BACKEND": "rabbitmq" if environ else "redis",
            "SLATEMQ_QUEUE_ENABLED": "true" if environ else "false",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_SESSION_TOKEN": secret,
            **{name: filled(value) for name, value in environ.items()},
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    # An error that stays, or a store that is down: whoever starts it tries that again.
    assert ended.returncode in (1, 2, EXIT_STORE_DOWN), ended.stderr
    assert re.search("root|url|S3", ended.stderr)
    assert secret not in ended.stdout + ended.stderr
