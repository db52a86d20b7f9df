"""`POST /s3-events`: the notifications of stores, through the HTTP port of a real ingest."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from aiohttp import ClientSession

import slatemq
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.ingest.config import IngestConfig
from services.ingest.events.s3_events import token_of
from services.ingest.service import IngestProcess
from slatemq import _file_status
from slatemq._secrets import redacted
from slatemq.errors import InvalidArgument
from slatemq.events import decode_event
from tests.acceptance.local_stack import LocalStack
from tests.configs import config_of
from tests.integration.cli.stack import Cli
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.ingest.server import Ingest
from tests.integration.stack.processes import Service
from tests.integration.storage.s3_servers import CREDENTIALS, moto
from tests.logged import logged_besides
from tests.made_instances import make_instance
from tests.unit.events.test_s3 import about_subscription, document, record

pytestmark = pytest.mark.slow
"""Each starts processes."""

TOKEN = "geheim, ü"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'aws:{password}'.encode()).decode()}"


@asynccontextmanager
async def ingests(folder: Path, count: int, token: str = TOKEN) -> AsyncIterator[list[Service]]:
    file = folder / "s3-token"
    file.write_text(f"{token}\n", encoding="utf-8")
    file.chmod(0o600)
    async with AsyncExitStack() as closing:
        started = []
        for shard in range(count):
            arguments = ["--http-port", "0", "--shard", str(shard)]
            arguments += ["--s3-events-token-file", str(file)] if token else []
            service = Service(folder, "ingest", *arguments)
            closing.push_async_callback(service.close)
            await service.start()
            started.append(service)
        yield started


async def post(
    service: Service, body: bytes, headers: Mapping[str, str] = BEARER
) -> tuple[int, dict[str, Any]]:
    async with (
        ClientSession(f"http://{service.http_address}") as session,
        session.post("/s3-events", data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_document_is_stored_once_however_often_and_wherever_it_is_sent(
    tmp_path: Path,
) -> None:
    records = []
    for number in range(40):
        sent = record()
        sent["s3"]["object"]["key"] = f"{number}.jpg"
        records.append(sent)
    whole = document(*records, record("ObjectTagging:Put"))
    async with ingests(tmp_path, 2) as (first, second):
        # Given two shards, and a document that is sent to each of them twice
        counts = {"published_count": 40, "duplicate_count": 0, "skipped_count": 1}
        assert await post(first, whole) == (200, counts)
        counts = {"published_count": 0, "duplicate_count": 40, "skipped_count": 1}
        for service in (second, first):
            assert await post(service, whole) == (200, counts)

        # Then both have their part of its events, once
        logs = [await Ingest(service.there).log() for service in (first, second)]
        assert all(logs)
        keys = [message.headers["key"] for log in logs for message in log]
        assert sorted(keys) == sorted(f"{number}.jpg" for number in range(40))
        assert {message.headers["type"] for log in logs for message in log} == {"object.created"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key": "k" * 70_000}, "Records[20].s3.object.key"),
        ({"contentType": "t" * 5_000}, "Records[20]"),
    ],
    ids=["a header", "the payload"],
)
async def test_a_document_of_which_one_event_would_be_refused_stores_nothing_in_any_shard(
    tmp_path: Path, changes: dict[str, str], field: str
) -> None:
    # Given two shards, in whose instance a payload has at most 4 KB
    records = [record(eventTime=f"2026-02-22T12:00:{second:02}Z") for second in range(21)]
    records[-1]["s3"]["object"] |= changes
    (tmp_path / "data").mkdir()
    await make_instance(open_root((tmp_path / "data").as_uri()), payload_bytes_max=4_000)
    async with ingests(tmp_path, 2) as services:
        # When a document comes whose last record makes a message that no ingest takes
        for service in services:
            status, body = await post(service, document(*records))
            assert (status, body["field"]) == (400, field)

        # Then no ingest has any of it
        for service in services:
            assert await Ingest(service.there).log() == []
        status, body = await post(services[0], document(*records[:-1]))
        assert (status, body["published_count"], body["duplicate_count"]) == (200, 20, 0)


async def test_what_is_no_notification_is_refused_by_field_and_stores_nothing(
    tmp_path: Path,
) -> None:
    long = record(s3={"bucket": {"name": "b"}, "object": {"key": "k" * 65_536}})
    async with ingests(tmp_path, 1) as (ingest,):
        for wrong in ("", "Bearer x", f"Basic {TOKEN}", f"Digest {TOKEN}", basic("x")):
            status, body = await post(ingest, document(record()), {"Authorization": wrong})
            assert (status, "Authorization" in body["error"]) == (401, True)

        for time in ("soon", "9999-12-31T23:59:59-01:00"):
            status, body = await post(ingest, document(record(), record(eventTime=time)))
            assert (status, body["field"]) == (400, "Records[1].eventTime")
        status, body = await post(ingest, document(*(record() for _ in range(9)), long))
        assert (status, body["field"]) == (400, "Records[9].s3.object.key")
        status, body = await post(ingest, b"{")
        assert (status, body["field"]) == (400, "notification")
        status, _ = await post(ingest, b" " * (1 << 20) + b"{}")
        assert status == 413

        assert await Ingest(ingest.there).log() == []
        assert (await post(ingest, document(record())))[0] == 200
        assert len(await Ingest(ingest.there).log()) == 1


async def test_without_a_token_the_http_port_takes_no_documents(tmp_path: Path) -> None:
    """As where it is for metrics alone; an empty token is none."""
    async with ingests(tmp_path, 1, "") as (ingest,):
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": basic("")}):
            status, _ = await post(ingest, document(record()), headers)
            assert status == 404

        assert await Ingest(ingest.there).log() == []


async def test_a_store_that_gives_a_name_and_a_password_sends_the_token_as_that(
    tmp_path: Path,
) -> None:
    """It may send them only when it is asked for them."""
    async with ingests(tmp_path, 1) as (ingest,):
        async with (
            ClientSession(f"http://{ingest.http_address}") as session,
            session.post("/s3-events", data=document(record())) as answer,
        ):
            assert answer.headers["WWW-Authenticate"] == 'Basic realm="slatemq"'
        sent = await post(ingest, document(record()), {"Authorization": basic(TOKEN)})
        assert sent[0] == 200


async def test_a_subscription_of_sns_is_logged_for_its_owner_to_confirm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(IngestConfig, root="memory:///", s3_events_token=TOKEN)
    (path,) = IngestProcess(config, Telemetry(), open_root("memory:///")).http_parts.posts

    sent = await path.answer(about_subscription())

    counts = {"published_count": 0, "duplicate_count": 0, "skipped_count": 1}
    assert (sent.status, sent.body) == (200, counts)
    (said,) = [one.getMessage() for one in logged_besides(caplog)]
    command = said.partition("confirmed: ")[2]
    assert command == (
        "aws sns confirm-subscription --topic-arn arn:aws:sns:us-west-2:123456789012:uploads "
        "--token 2336412f37fb687f5d51e6e241d09c80"
    )
    assert redacted(said) == said


async def test_a_wrong_token_is_logged_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(IngestConfig, root="memory:///", s3_events_token=TOKEN)
    (path,) = IngestProcess(config, Telemetry(), open_root("memory:///")).http_parts.posts

    for headers in ({}, {"authorization": "Bearer falsch"}, {"authorization": basic(TOKEN)}):
        refused = path.check(headers)
        assert (refused is None) == (headers.get("authorization") == basic(TOKEN))

    said = [one.getMessage() for one in logged_besides(caplog)]
    assert said == ["a document came to /s3-events with a wrong token"]


def test_a_token_is_what_its_file_says_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    file = tmp_path / "token"
    file.write_text("one\n")
    token = token_of("", str(file))
    assert token() == "one"

    file.write_text("second\n")
    assert token() == "second"
    file.write_text("\n")  # perhaps it is being written
    assert token() == "second"

    with pytest.raises(InvalidArgument, match="is empty"):
        token_of("", str(file))
    with pytest.raises(InvalidArgument, match="not together"):
        token_of("text", str(file))
    with pytest.raises(InvalidArgument, match="cannot read"):
        token_of("", str(tmp_path / "absent"))


async def test_an_event_whose_shard_is_down_is_refused_for_the_store_to_send_again(
    tmp_path: Path,
) -> None:
    records = [record(eventTime=f"2026-02-22T12:00:00.{n:03}Z") for n in range(20)]
    async with ingests(tmp_path, 2) as (first, second):
        await second.kill()
        status, body = await post(first, document(*records))
        assert status == 503, body
        # When it is back, and the store sends the document until it is taken
        await second.start()
        async with asyncio.timeout(60):
            while status == 503:
                await asyncio.sleep(0.05)
                status, body = await post(first, document(*records))
        assert status == 200, body
        assert body["published_count"] + body["duplicate_count"] == 20
        logs = [await Ingest(service.there).log() for service in (first, second)]
        assert sum(map(len, logs)) == 20


@pytest.mark.s3
@pytest.mark.stack
async def test_uploads_to_a_store_reach_the_queue_that_filters_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store that sends what happens in a bucket to ingest, as AWS does through SNS
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLATEMQ_S3_EVENTS_TOKEN", "geheim")
    stack = LocalStack(tmp_path, "--data", str(tmp_path / "data"), "--http-ports", "0", ready=True)
    with stack, moto() as port:
        options: dict[str, Any] = {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "region_name": "us-east-1",
        }
        s3, sns = boto3.client("s3", **options), boto3.client("sns", **options)
        topic = sns.create_topic(Name="uploads")["TopicArn"]
        endpoint = f"http://aws:geheim@{stack.http_endpoints['ingest']}/s3-events"
        sns.subscribe(TopicArn=topic, Protocol="http", Endpoint=endpoint)
        s3.create_bucket(Bucket="photos")
        s3.put_bucket_notification_configuration(
            Bucket="photos",
            NotificationConfiguration={
                "TopicConfigurations": [
                    {"TopicArn": topic, "Events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}
                ]
            },
        )
        async with slatemq.connect(stack.endpoint) as client:
            await client.create_queue(
                "thumbnails",
                filter='headers.type == "object.created" && headers.key.startsWith("in/")',
            )
            await client.create_queue("deleted", filter='headers.type == "object.deleted"')

            # When objects are written and removed
            s3.put_object(Bucket="photos", Key="in/grün 1.jpg", Body=b"x" * 1_000)
            s3.put_object(Bucket="photos", Key="out/2.jpg", Body=b"y")
            s3.copy_object(Bucket="photos", Key="in/3.jpg", CopySource="photos/out/2.jpg")
            s3.delete_object(Bucket="photos", Key="out/2.jpg")

            # Then each queue gets the events that it filters on
            created = [decode_event(payload) for payload in await take(client, "thumbnails", 2)]
            (deleted,) = [decode_event(payload) for payload in await take(client, "deleted", 1)]
        assert {event.data["key"]: event.data["size"] for event in created} == {
            "in/grün 1.jpg": 1_000,
            "in/3.jpg": 1,
        }
        assert (deleted.type, deleted.data) == (
            "object.deleted",
            {"bucket": "photos", "key": "out/2.jpg"},
        )


async def take(client: slatemq.Client, queue: str, count: int) -> list[bytes]:
    """The payloads of this many messages, acknowledged."""
    found: list[bytes] = []
    async with client.consume(queue, outage_timeout=60) as messages:
        async for message in messages:
            async with message:
                found.append(message.payload)
            if len(found) == count:
                break
    return found


@pytest.mark.stack
async def test_in_async_mode_the_events_are_accepted_and_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLATEMQ_S3_EVENTS_TOKEN", TOKEN)
    # Given a stack whose publishes are tasks in Redis
    whole = document(record(), record(eventTime="2026-02-22T12:00:01Z"))
    file = tmp_path / "notifications.json"
    file.write_bytes(whole)
    config = tmp_path / "slatemq.yaml"
    folder = tmp_path / "stack"
    arguments = ["--data", str(folder / "data"), "--http-ports", "0"]
    with running(RedisServer(tmp_path, "streams")) as redis:
        config.write_text(
            "queue:\n  enabled: true\n  backend: redis\n  consistency: async\n"
            f"  redis:\n    url: redis://127.0.0.1:{redis.port}\n"
        )
        with LocalStack(folder, *arguments, "--config", str(config), ready=True) as stack:
            # When a document is sent
            async with (
                ClientSession(f"http://{stack.http_endpoints['ingest']}") as session,
                session.post("/s3-events", data=whole, headers=BEARER) as answer,
            ):
                body = await answer.json()

            # Then it is accepted as a task, which is applied
            assert (answer.status, body["accepted_count"], body["published_count"]) == (202, 2, 0)
            async with slatemq.connect(stack.endpoint) as client:
                task = await client.wait_task(body["task_ids"][0], timeout=60)
            assert task.state is slatemq.TaskState.APPLIED
            assert [message.duplicate for message in task.published] == [False, False]

            # And the command, which waits for its tasks, says that all of it was there already
            cli = Cli(stack, tmp_path / "state")
            result = await asyncio.to_thread(cli.ok, "events", "import", str(file), "--json")
            assert result.objects == [
                {
                    "file": str(file),
                    "published_count": 0,
                    "duplicate_count": 2,
                    "accepted_count": 0,
                    "skipped_count": 0,
                }
            ]
