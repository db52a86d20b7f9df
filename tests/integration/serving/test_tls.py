"""TLS of servers and channels, over real connections."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.serving.tls import ServerTls, identities, is_old
from slatemq import _file_status
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq.cli.access.dev_certificates import SERVICE_NAME, make_certificates
from slatemq.errors import InvalidArgument


class Echo(grpc.GenericRpcHandler):
    """`/echo/Names` answers what the server knows of its client; `/echo/Stream` echoes."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method == "/echo/Stream":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(self.names)

    async def names(self, _: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        auth = context.auth_context()
        return f"{'old' if is_old(auth) else 'new'} {sorted(identities(auth))}".encode()

    async def stream(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


class Certificates:
    """Two authorities: ours, and another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "ours"
        self.other = folder / "others"
        make_certificates(self.folder)
        make_certificates(self.other)

    def files(self, name: str = "", folder: Path | None = None) -> CertificateFiles:
        folder = folder or self.folder
        pair = (folder / f"{name}.crt", folder / f"{name}.key") if name else (None, None)
        return CertificateFiles(self.folder / "ca.crt", *pair)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@asynccontextmanager
async def serving(files: CertificateFiles, *, mutual: bool = False) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    credentials = ServerTls(files, needs_client_certificate=mutual).credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(address: str, channel_tls: ChannelTls) -> AsyncIterator[grpc.aio.Channel]:
    options = channel_tls.options
    async with grpc.aio.secure_channel(address, channel_tls.credentials, options) as channel:
        yield channel


async def names(channel: grpc.aio.Channel) -> str:
    call: Any = channel.unary_unary("/echo/Names")
    answer: bytes = await call(b"", timeout=60)
    return answer.decode()


async def test_a_client_with_the_authority_reaches_a_server(certificates: Certificates) -> None:
    async with (
        serving(certificates.files("service")) as address,
        connected(address, ChannelTls(certificates.files())) as channel,
    ):
        assert await names(channel) == "new []"


async def test_a_server_of_another_authority_is_refused(certificates: Certificates) -> None:
    async with (
        serving(certificates.files("service", certificates.other)) as address,
        connected(address, ChannelTls(certificates.files())) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
            await names(channel)


async def test_a_server_of_another_name_is_refused(certificates: Certificates) -> None:
    files = certificates.files()
    async with serving(certificates.files("service")) as address:
        async with connected(address, ChannelTls(files, "elsewhere")) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await names(channel)
        async with connected(address, ChannelTls(files, SERVICE_NAME)) as channel:
            assert await names(channel) == "new []"


async def test_a_client_proves_its_names_by_its_certificate(certificates: Certificates) -> None:
    async with (
        serving(certificates.files("service"), mutual=True) as address,
        connected(address, ChannelTls(certificates.files("client"))) as channel,
    ):
        assert await names(channel) == "new ['dev-client']"


@pytest.mark.parametrize("form", ["none", "other authority"])
async def test_a_client_without_a_good_certificate_does_not_get_in(
    certificates: Certificates, form: str
) -> None:
    files = (
        certificates.files() if form == "none" else certificates.files("client", certificates.other)
    )
    async with (
        serving(certificates.files("service"), mutual=True) as address,
        connected(address, ChannelTls(files)) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await names(channel)


async def test_a_connection_of_tls_1_2_is_known_as_old(
    certificates: Certificates,
) -> None:
    """By a client of Python's own ssl: the one of gRPC would take 1.3."""
    context = ssl.create_default_context(cafile=str(certificates.folder / "ca.crt"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    async with serving(certificates.files("service")) as address:
        answer = await raw_call(address, context)

    assert answer.startswith(b"old")


async def raw_call(address: str, context: ssl.SSLContext) -> bytes:
    """The answer of `/echo/Names`, by HTTP/2 frames."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    headers = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":path", b"/echo/Names"),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    writer.write(frame(1, 4, 1, headers) + frame(0, 1, 1, b"\0\0\0\0\0"))
    data = b""
    async with asyncio.timeout(60):
        while True:
            head = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == 0:
                data += body
            if head[3] == 1 and head[4] & 1:
                break
    writer.close()
    return data[5:]


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


async def test_a_new_certificate_serves_without_a_restart_or_a_dropped_stream(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    client = ChannelTls(certificates.files())
    async with (
        serving(certificates.files("service")) as address,
        connected(address, client) as before,
    ):
        stream: Any = before.stream_stream("/echo/Stream")()
        await stream.write(b"one")
        assert await stream.read() == b"one"

        for file in certificates.other.iterdir():
            shutil.copy(file, certificates.folder / file.name)

        # The new authority is trusted by new channels, and the open one goes on.
        credentials = client.credentials
        assert client.version == 2
        async with grpc.aio.secure_channel(address, credentials) as after:
            assert await names(after) == "new []"
        await stream.write(b"two")
        assert await stream.read() == b"two"
        assert await names(before) == "new []"


async def test_half_replaced_files_leave_what_was_there(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    client = ChannelTls(certificates.files())
    async with serving(certificates.files("service")) as address:
        shutil.copy(certificates.other / "service.key", certificates.folder / "service.key")

        async with connected(address, client) as channel:
            assert await names(channel) == "new []"
        (certificates.folder / "ca.crt").write_text("half")
        async with connected(address, client) as channel:
            assert await names(channel) == "new []"
        assert client.version == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda folder: (folder / "service.crt").unlink(), "cert"),
        (lambda folder: (folder / "service.key").write_text("x"), "key"),
        (lambda folder: (folder / "ca.crt").write_text("x"), "ca"),
        (lambda folder: shutil.copy(folder / "client.key", folder / "service.key"), "key"),
        (
            lambda folder: (folder / "service.crt").write_text(
                "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
            ),
            "cert",
        ),
    ],
)
def test_bad_files_are_named_at_the_start(
    certificates: Certificates, change: Any, field: str
) -> None:
    change(certificates.folder)

    with pytest.raises(InvalidArgument) as caught:
        ServerTls(certificates.files("service"), needs_client_certificate=True)

    assert caught.value.field == field


def test_a_certificate_without_a_key_is_refused(certificates: Certificates) -> None:
    with pytest.raises(InvalidArgument, match="file of its key is needed"):
        CertificateFiles(None, certificates.folder / "client.crt")


def test_keys_are_for_their_owner_alone_and_nothing_is_overwritten(
    certificates: Certificates,
) -> None:
    modes = {file.name: file.stat().st_mode & 0o777 for file in certificates.folder.iterdir()}

    assert modes["service.key"] == modes["client.key"] == 0o600
    assert "ca.key" not in modes
    with pytest.raises(FileExistsError):
        make_certificates(certificates.folder)
