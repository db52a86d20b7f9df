"""The HTTP port: health, metrics, and the paths of a service."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientOSError,
    ClientSession,
    ServerDisconnectedError,
)
from cryptography.hazmat.primitives import serialization

from libs.events.watch import QueueHealth
from libs.serving.http import server as http_server
from libs.serving.http.parts import HttpParts, HttpPost, HttpReply
from libs.serving.http.server import POSTS_MAX, HttpServer
from libs.serving.process.health import Health
from libs.serving.tls import ServiceFiles, https_context, setting_of
from slatemq import _file_status
from slatemq.cli.access.dev_certificates import SERVICE_NAME, Authority, make_certificates
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.waiting import eventually
from tests.ports import free_ports

BYTES_MAX = 1_000
RESOLVE = socket.getaddrinfo


@asynccontextmanager
async def served(
    health: Health, parts: HttpParts | None = None, metrics: bytes | None = None
) -> AsyncIterator[ClientSession]:
    server = HttpServer(health, None if metrics is None else lambda: metrics, parts or HttpParts())
    address = await server.start("127.0.0.1", 0)
    try:
        async with ClientSession(f"http://{address}") as session:
            yield session
    finally:
        await server.stop()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certificates")
    return tmp_path / "certificates"


@asynccontextmanager
async def served_by_tls(folder: Path) -> AsyncIterator[str]:
    """An address where the health is served, with the certificate in a folder."""
    files = ServiceFiles(
        *(folder / name for name in ("ca.crt", "service.crt", "service.key")), identity=SERVICE_NAME
    )
    health = Health([])
    await health.serving()
    server = HttpServer(health, None, HttpParts(), https_context(files))
    address = await server.start("127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.stop()


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))


async def asked_by_tls(address: str, trust: ssl.SSLContext) -> int:
    async with (
        ClientSession(f"https://{address}") as session,
        session.get("/health", ssl=trust) as answer,
    ):
        return answer.status


async def test_with_a_certificate_it_answers_by_tls_1_3_alone(certificates: Path) -> None:
    async with served_by_tls(certificates) as address:
        assert await asked_by_tls(address, trusting(certificates)) == 200

        old = trusting(certificates)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ClientConnectorError):
            await asked_by_tls(address, old)
        async with ClientSession(f"http://{address}") as session:
            with pytest.raises((ServerDisconnectedError, ClientOSError)):
                await session.get("/health")


async def test_a_new_certificate_serves_from_the_next_connection_on(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    async with served_by_tls(certificates) as address:
        old = trusting(certificates)
        assert await asked_by_tls(address, old) == 200

        other = certificates.parent / "other"
        make_certificates(other)
        for file in other.iterdir():
            shutil.copy(file, certificates / file.name)

        assert await asked_by_tls(address, trusting(other)) == 200
        with pytest.raises(ClientConnectorCertificateError):
            await asked_by_tls(address, old)


async def test_a_key_with_a_password_is_refused_and_no_one_is_asked_for_it(
    certificates: Path,
) -> None:
    file = certificates / "service.key"
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"password")
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password)
    )

    with pytest.raises(InvalidArgument, match=f"{file} needs a password") as caught:
        async with served_by_tls(certificates):
            pytest.fail("served")
    assert setting_of(caught.value.field) == "tls_key"


async def test_half_replaced_files_leave_the_certificate_before(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    async with served_by_tls(certificates) as address:
        shutil.copy(certificates / "client.key", certificates / "service.key")

        assert await asked_by_tls(address, trusting(certificates)) == 200


@pytest.mark.parametrize(("days", "name"), [(0, SERVICE_NAME), (1, "other")])
async def test_what_grpc_would_not_serve_leaves_the_certificate_before(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, days: int, name: str
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    async with served_by_tls(certificates) as address:
        trust = trusting(certificates)
        certificate, key = Authority(days).sign(name, (name,))
        (certificates / "service.crt").write_bytes(certificate)
        (certificates / "service.key").write_bytes(key)

        assert await asked_by_tls(address, trust) == 200


async def test_handshakes_that_do_not_end_make_room_for_others(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HTTP_CONNECTIONS_MAX", 4)
    async with served_by_tls(certificates) as address:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        try:
            assert await asked_by_tls(address, trusting(certificates)) == 200
            # Of all of these, the last ones alone are still open
            for reader, _ in silent[:8]:
                assert await reader.read() == b""
        finally:
            for _, writer in silent:
                writer.close()


async def asked(session: ClientSession, path: str = "/health") -> tuple[int, object]:
    async with session.get(path) as answer:
        return answer.status, await answer.json()


def echo(
    answer: HttpReply | Exception,
    seen: list[bytes] | None = None,
    release: asyncio.Event | None = None,
) -> HttpParts:
    """A path that answers this to whoever sends the right word."""

    async def answered(body: bytes) -> HttpReply:
        if seen is not None:
            seen.append(body)
        if release is not None:
            await release.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def check(headers: Mapping[str, str]) -> HttpReply | None:
        return None if headers.get("word") == "right" else HttpReply(401, {"error": "word"})

    return HttpParts([HttpPost("/echo", BYTES_MAX, answered, check)])


RIGHT = {"word": "right"}
FINE = HttpReply(200, {"stored": 1})


async def test_health_says_503_with_the_reason_until_the_service_serves() -> None:
    health = Health(["slatemq.v1.IngestService"])
    async with served(health) as session:
        await health.not_serving("the service is starting")
        starting = {"status": "not_serving", "reason": "the service is starting"}
        assert await asked(session) == (503, starting)

        await health.serving()
        assert await asked(session) == (200, {"status": "ok"})

        await health.not_serving("the object store has not answered for 12 s")
        assert (await asked(session))[0] == 503


async def test_health_shows_the_queue_as_the_design_writes_it() -> None:
    queue = QueueHealth("redis", True, 0, 0)

    async def look() -> QueueHealth:
        return queue

    health = Health([])
    await health.serving()
    async with served(health, HttpParts(queue_health=look)) as session:
        fields = {"backend": "redis", "connected": True, "pending_tasks": 0, "dead_letter_count": 0}
        assert await asked(session) == (200, {"status": "ok", "queue": fields})

        # A backend that is down makes this false, though the service serves
        queue = QueueHealth("redis", False)
        status, body = await asked(session)
        fields = {
            "backend": "redis",
            "connected": False,
            "pending_tasks": None,
            "dead_letter_count": None,
        }
        assert (status, body) == (503, {"status": "queue_unavailable", "queue": fields})
        assert health.is_serving


async def test_metrics_come_as_prometheus_reads_them() -> None:
    async with served(Health([]), metrics=b"up 1.0\n") as session, session.get("/metrics") as got:
        assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert await got.read() == b"up 1.0\n"


async def test_other_paths_and_methods_are_refused_in_json() -> None:
    async with served(Health([]), echo(FINE)) as session:
        assert await asked(session, "/") == (404, {"error": "Not Found"})
        assert await asked(session, "/metrics") == (404, {"error": "Not Found"})
        assert await asked(session, "/echo") == (405, {"error": "Method Not Allowed"})
        async with session.get("/echo") as answer:
            assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("outcome", "status", "body"),
    [
        (FINE, 200, {"stored": 1}),
        (
            InvalidArgument("Records[3].s3", "is missing"),
            400,
            {
                "error": "Records[3].s3: is missing",
                "field": "Records[3].s3",
                "reason": "INVALID_FIELD",
            },
        ),
        (Unavailable("gone", reason="DOWN"), 503, {"error": "gone", "reason": "DOWN"}),
        (RuntimeError("secret"), 500, {"error": "internal error"}),
    ],
)
async def test_a_post_is_answered_and_its_errors_have_their_status(
    outcome: HttpReply | Exception, status: int, body: object, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    async with (
        served(Health([]), echo(outcome, seen)) as session,
        session.post("/echo", data=b"x" * BYTES_MAX, headers=RIGHT) as answer,
    ):
        assert (answer.status, await answer.json()) == (status, body)
    assert seen == [b"x" * BYTES_MAX]
    assert ("secret" in caplog.text) == (status == 500)


async def test_a_body_that_is_too_large_is_not_taken_however_it_is_sent() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(BYTES_MAX):
            yield b"xx"

    seen: list[bytes] = []
    async with served(Health([]), echo(FINE, seen)) as session:
        for data in (b"x" * (BYTES_MAX + 1), chunks()):
            async with session.post("/echo", data=data, headers=RIGHT) as answer:
                assert answer.status == 413
    assert seen == []


async def test_a_body_that_is_not_in_the_encoding_that_it_states_is_the_callers_error() -> None:
    async with (
        served(Health([]), echo(FINE)) as session,
        session.post(
            "/echo", data=b"not gzip", headers={**RIGHT, "Content-Encoding": "gzip"}
        ) as answer,
    ):
        assert (answer.status, await answer.json()) == (400, {"error": "Bad Request"})


async def test_what_is_refused_by_its_headers_is_not_read() -> None:
    seen: list[bytes] = []
    async with (
        served(Health([]), echo(FINE, seen)) as session,
        session.post("/echo", data=b"x", headers={"word": "wrong"}) as answer,
    ):
        assert (answer.status, await answer.json()) == (401, {"error": "word"})
    assert seen == []


async def test_posts_beyond_the_bound_are_refused_while_health_and_metrics_answer() -> None:
    seen: list[bytes] = []
    release = asyncio.Event()
    health = Health([])
    await health.serving()
    async with served(health, echo(FINE, seen, release), b"up 1.0\n") as session:

        async def post() -> int:
            async with session.post("/echo", data=b"x", headers=RIGHT) as answer:
                return answer.status

        posts = [asyncio.create_task(post()) for _ in range(POSTS_MAX)]
        async with asyncio.timeout(60):
            while len(seen) < POSTS_MAX:
                await asyncio.sleep(0.01)
        assert await post() == 503
        assert await asked(session) == (200, {"status": "ok"})
        async with session.get("/metrics") as answer:
            assert answer.status == 200
        release.set()
        assert await asyncio.gather(*posts) == [200] * POSTS_MAX
        assert await post() == 200


async def test_a_body_that_does_not_arrive_is_given_up_and_its_place_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "READ_S", 0.2)
    seen: list[bytes] = []
    more = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await more.wait()

    async with served(Health([]), echo(FINE, seen)) as session:

        async def post() -> int:
            async with session.post("/echo", data=slow(), headers=RIGHT) as answer:
                return answer.status

        # Given as many slow bodies as there are places
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(post() for _ in range(POSTS_MAX))) == [408] * POSTS_MAX
        monkeypatch.setattr(http_server, "READ_S", 3_600.0)
        async with session.post("/echo", data=b"y", headers=RIGHT) as answer:
            assert answer.status == 200
    assert seen == [b"y"]


async def test_connections_that_say_nothing_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HTTP_CONNECTIONS_MAX", 4)
    release, seen = asyncio.Event(), list[bytes]()
    server = HttpServer(Health([]), None, echo(HttpReply(200, {}), seen, release))
    host, _, port = (await server.start("127.0.0.1", 0)).partition(":")
    try:
        # Given a request in work, and connections on which a request only begins
        working, work = await asyncio.open_connection(host, int(port))
        work.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nword: right\r\nContent-Length: 1\r\n\r\nx")
        while not seen:
            await asyncio.sleep(0)
        held = []
        for _ in range(8):
            held.append(await asyncio.open_connection(host, int(port)))
            held[-1][1].write(b"GET /health HTTP/1.1\r\nX: ")

        # When another client asks
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")

        # Then the oldest are gone, and what is in work comes to its end
        assert await held[0][0].read() == b""
        release.set()
        assert (await working.readline()).startswith(b"HTTP/1.1 200")
        for one in (work, writer, *(writer for _, writer in held)):
            one.close()
    finally:
        await server.stop()


async def test_metrics_are_rendered_once_for_all_who_ask_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "METRICS_AGE_S", 3_600)
    rendered = []

    def render() -> bytes:
        rendered.append(1)
        return b"some"

    server = HttpServer(Health([]), render, HttpParts())
    address = await server.start("127.0.0.1", 0)
    try:
        async with ClientSession(f"http://{address}") as session:

            async def metrics() -> bytes:
                async with session.get("/metrics") as answer:
                    return await answer.read()

            assert await asyncio.gather(*(metrics() for _ in range(20))) == [b"some"] * 20
    finally:
        await server.stop()
    assert rendered == [1]


def opened(server: HttpServer) -> list[asyncio.WriteTransport]:
    """The server's ends of its connections."""
    running = server._runner.server
    assert running is not None
    return [one.transport for one in running.connections if one.transport is not None]


async def test_what_a_client_of_metrics_does_not_read_stays_out_of_its_connection() -> None:
    size = 40_000_000
    server = HttpServer(Health([]), lambda: b"x" * size, HttpParts())
    host, port = (await server.start("127.0.0.1", 0)).split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1_000)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        (connection,) = opened(server)

        assert f"Content-Length: {size}".encode() in head
        assert connection.get_write_buffer_size() < size / 10
        assert len(await reader.read()) == size
        writer.close()
    finally:
        await server.stop()


async def test_a_client_that_does_not_read_the_metrics_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "SEND_S", 0.01)
    size = 40_000_000
    server = HttpServer(Health([]), lambda: b"x" * size, HttpParts())
    host, port = (await server.start("127.0.0.1", 0)).split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1_000)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: not opened(server))
        writer.close()
    finally:
        await server.stop()


async def test_a_request_that_is_no_http_is_logged_as_one_line_of_the_kind_that_is_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = HttpServer(Health([]), None, HttpParts())
    host, port = (await server.start("127.0.0.1", 0)).split(":")
    login = b"Authorization: Basic SECRET"
    heads = (
        b"x\x00: y",
        b"no colon",
        b"Content-Length: -1",
        login + b"\x01",
        login + b"y" * 100_000,
    )
    try:
        for head in heads:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()
    finally:
        await server.stop()

    records = [record for record in caplog.records if record.name.startswith("libs.serving.http")]
    assert len(records) == len(heads)
    assert "SECRET" not in caplog.text
    assert "Invalid header value char" in caplog.text
    # Warnings alike: of these the log has the first five, and one every half minute.
    assert {(one.levelname, one.msg, one.exc_info) for one in records} == {
        ("WARNING", "a request is not valid HTTP: %s", None)
    }
    assert all(len(one.getMessage()) < 300 for one in records)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["/health", "/nothing"])
async def test_a_body_that_is_not_what_its_encoding_says_is_logged_as_one_line_where_none_reads_it(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = HttpServer(Health([]), None, HttpParts())
    host, port = (await server.start("127.0.0.1", 0)).split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "Host: x\r\nContent-Encoding: gzip\r\nContent-Length: 4"
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\nxxxx".encode())
        answer = await reader.read()  # to the end, which comes behind the line
        writer.close()
        await writer.wait_closed()
    finally:
        await server.stop()

    assert answer.startswith(b"HTTP/1.1 40")
    (record,) = [one for one in caplog.records if one.name.startswith("libs.serving.http")]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "a request is not valid HTTP: " in record.getMessage()
    assert "gzip" in record.getMessage()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_it_listens_on_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *arguments: Any, **options: Any) -> list[Any]:
        names = ("127.0.0.1", "::1") if host == "both.test" else (host,)
        return [one for name in names for one in RESOLVE(name, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = free_ports(1)[0]
    server = HttpServer(Health([]), None, HttpParts())
    assert await server.start("both.test", port) == f"both.test:{port}"
    try:
        async with ClientSession() as session:
            for host in ("127.0.0.1", "[::1]"):
                async with session.get(f"http://{host}:{port}/health") as answer:
                    assert answer.status in (200, 503)
    finally:
        await server.stop()
