"""Connections of the console's server, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from libs.serving.tls import certificate_files, https_context
from services.console import connections, service
from services.console.config import ConsoleConfig
from slatemq.cli.access.dev_certificates import make_certificates

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


FILES: Final = {"tls_ca": "ca.crt", "tls_cert": "service.crt", "tls_key": "service.key"}


class App:
    """Answers GET once it is released, POST once its body is whole."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.asked.set()
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def served(app: App, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = service.server_of(ConsoleConfig(), app, tls)
    run = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(60):
            yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await run


async def status(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readline())[9:12]


async def test_connections_without_a_request_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)
    app = App()
    async with served(app) as port:
        # Given a request in work, and connections that say nothing, or begin one
        working, work = await asyncio.open_connection("127.0.0.1", port)
        work.write(GET)
        await app.asked.wait()
        held = []
        for begun in (
            b"",
            b"GET / HTTP/1.1\r\nX: ",
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx",
        ):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(begun)

        # When others ask
        others = []
        for _ in held:
            others.append(await asyncio.open_connection("127.0.0.1", port))
            others[-1][1].write(GET)

        # Then those are gone, and what is in work comes to its end
        for reader, _ in held:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        app.release.set()
        for reader in (working, *(reader for reader, _ in others)):
            assert await status(reader) == b"200"
        for writer in (work, *(writer for _, writer in (*held, *others))):
            writer.close()


async def test_handshakes_that_do_not_end_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKES_MAX", 4)
    make_certificates(tmp_path / "certs")
    files = {name: str(tmp_path / "certs" / file) for name, file in FILES.items()}
    trust = ssl.create_default_context(cafile=files["tls_ca"])
    app = App()
    app.release.set()
    async with served(app, https_context(certificate_files(ConsoleConfig(**files)))) as port:  # type: ignore[arg-type]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]

        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.write(GET)

        assert await status(reader) == b"200"
        # Of those without an end, the last ones alone are still open
        for waiting, _ in silent[:8]:
            assert await waiting.read() == b""
        for opened in (writer, *(writer for _, writer in silent)):
            opened.close()


async def test_where_all_have_a_request_in_work_one_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)
    app = App()
    async with served(app) as port:
        working = []
        for _ in range(2):
            working.append(await asyncio.open_connection("127.0.0.1", port))
            working[-1][1].write(GET)
            await app.asked.wait()
            app.asked.clear()

        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)

        assert await status(reader) == b"503"
        app.release.set()
        for answered, _ in working:
            assert await status(answered) == b"200"
        for opened in (writer, *(writer for _, writer in working)):
            opened.close()
