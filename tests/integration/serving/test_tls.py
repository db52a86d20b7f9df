"""TLS of servers and channels, over real connections."""

from __future__ import annotations

import asyncio
import codecs
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID

from libs.serving.access import protection_of
from libs.serving.process.config import ServingConfig
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import ClientDoor, Door, ServiceDoor
from libs.serving.tls import ServerTls, client_certificate, is_old
from slatemq import _file_status
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq.cli.access.dev_certificates import SERVICE_NAME, Authority, make_certificates
from slatemq.errors import InvalidArgument, SlateMQError

Signed = tuple[bytes, bytes]


class Echo(grpc.GenericRpcHandler):
    """`/echo/Names` answers what the server knows of its client, `/echo/Enter` and `/echo/Call`
    what the doors for services and for clients say; `/echo/Stream` echoes."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method == "/echo/Stream":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        if handler_call_details.method == "/echo/Enter":
            return grpc.unary_unary_rpc_method_handler(
                partial(self.enter, ServiceDoor(SERVICE_NAME))
            )
        if handler_call_details.method == "/echo/Call":
            door = ClientDoor(None, Auditor("echo-0", lambda _: None), has_tls=True)
            return grpc.unary_unary_rpc_method_handler(partial(self.enter, door))
        return grpc.unary_unary_rpc_method_handler(self.names)

    async def names(self, _: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        auth = context.auth_context()
        return (
            f"{'old' if is_old(auth) else 'new'} {sorted(client_certificate(auth).names)}".encode()
        )

    async def enter(
        self, door: Door, _: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        judge = door.judge_of("/echo/Enter")
        assert judge is not None
        try:
            await judge.enter(context)
        except SlateMQError as error:
            return error.reason.encode()
        return b"in"

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


def serving(files: CertificateFiles, *, mutual: bool = False) -> AbstractAsyncContextManager[str]:
    return serving_by(ServerTls(files, needs_client_certificate=mutual))


@asynccontextmanager
async def serving_by(tls: ServerTls) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_secure_port("127.0.0.1:0", tls.credentials())
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


async def test_half_replaced_files_leave_what_was_there_in_both_directions(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    folder, other = certificates.folder, certificates.other
    client = ChannelTls(certificates.files("client"))
    async with serving(certificates.files("service"), mutual=True) as address:

        async def goes_on() -> None:
            async with connected(address, client) as channel:
                assert await names(channel) == "new ['dev-client']"
            assert client.version == 1

        for name in ("service.key", "client.key"):
            shutil.copy(other / name, folder / name)
        await goes_on()
        authority = (folder / "ca.crt").read_bytes()
        for ca in (b"half", (folder / "client.key").read_bytes(), authority + DAMAGED):
            (folder / "ca.crt").write_bytes(ca)
            await goes_on()

        # What is whole again serves.
        for file in other.iterdir():
            shutil.copy(file, folder / file.name)
        async with connected(address, client) as channel:
            assert await names(channel) == "new ['dev-client']"
        assert client.version == 2


async def test_a_file_that_is_refused_is_named_to_operators_until_it_is_good_again(
    certificates: Certificates,
) -> None:
    folder, other = certificates.folder, certificates.other
    config = ServingConfig(
        root="memory:///",
        tls_ca=str(folder / "ca.crt"),
        tls_cert=str(folder / "service.crt"),
        tls_key=str(folder / "service.key"),
    )
    protection = protection_of(config, Auditor("echo-0", lambda act: None))
    assert protection.client_tls is not None
    credentials = ChannelTls(certificates.files()).credentials
    own_connections = (("grpc.use_local_subchannel_pool", 1),)
    async with serving_by(protection.client_tls) as address:

        async def note() -> str:
            """As who connects to ask for it gets it."""
            async with grpc.aio.secure_channel(address, credentials, own_connections) as channel:
                assert await names(channel) == "new []"
            return protection.note

        assert await note() == ""
        for name in ("service.key", "service.crt", "ca.crt"):
            before = (folder / name).read_bytes()
            (folder / name).write_bytes(b"-----BEGIN half")
            assert (await note()).startswith(f"'{name}' is refused as it is now")
            assert "half" not in protection.note
            (folder / name).write_bytes(before)
            assert await note() == ""
        shutil.copy(other / "service.key", folder / "service.key")
        assert (await note()).startswith("'service.key' is refused as it is now")


PLAIN = serialization.NoEncryption()

DAMAGED = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def private_pem(
    key: PrivateKeyTypes, encryption: serialization.KeySerializationEncryption = PLAIN
) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def encrypt(file: Path) -> None:
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    file.write_bytes(private_pem(key, serialization.BestAvailableEncryption(b"password")))


BAD_FILES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "no certificate": ("cert", "cannot read", lambda folder: (folder / "service.crt").unlink()),
    "no PEM as key": ("key", "not PEM", lambda folder: (folder / "service.key").write_text("x")),
    "no PEM as authority": ("ca", "not PEM", lambda folder: (folder / "ca.crt").write_text("x")),
    "the key of another certificate": (
        "key",
        "does not belong to the certificate",
        lambda folder: shutil.copy(folder / "client.key", folder / "service.key"),
    ),
    "a key of another kind": (
        "key",
        "does not belong to the certificate",
        lambda folder: (folder / "service.key").write_bytes(
            private_pem(ed25519.Ed25519PrivateKey.generate())
        ),
    ),
    "an encrypted key": (
        "key",
        "needs a password",
        lambda folder: encrypt(folder / "service.key"),
    ),
    "a certificate as key": (
        "key",
        "cannot be used",
        lambda folder: shutil.copy(folder / "service.crt", folder / "service.key"),
    ),
    "a damaged certificate": (
        "cert",
        "damaged",
        lambda folder: (folder / "service.crt").write_bytes(DAMAGED),
    ),
    "a key as authority": (
        "ca",
        "damaged",
        lambda folder: shutil.copy(folder / "service.key", folder / "ca.crt"),
    ),
    "a damaged authority after a good one": (
        "ca",
        "damaged",
        lambda folder: (folder / "ca.crt").write_bytes((folder / "ca.crt").read_bytes() + DAMAGED),
    ),
    "a byte order mark": (
        "ca",
        "byte order mark",
        lambda folder: (folder / "ca.crt").write_bytes(
            codecs.BOM_UTF8 + (folder / "ca.crt").read_bytes()
        ),
    ),
}


@pytest.mark.parametrize("read", [partial(ServerTls, needs_client_certificate=True), ChannelTls])
@pytest.mark.parametrize("form", BAD_FILES)
def test_bad_files_are_named_at_the_start(
    certificates: Certificates, form: str, read: Callable[[CertificateFiles], object]
) -> None:
    field, problem, change = BAD_FILES[form]
    change(certificates.folder)

    with pytest.raises(InvalidArgument, match=problem) as caught:
        read(certificates.files("service"))

    assert caught.value.field == field
    assert str(certificates.folder / FILES[field]) in caught.value.message


FILES = {"ca": "ca.crt", "cert": "service.crt", "key": "service.key"}


def test_what_stands_beside_certificates_and_keys_does_no_harm(certificates: Certificates) -> None:
    for name in FILES.values():
        file = certificates.folder / name
        file.write_bytes("Straße\r\n".encode() + file.read_bytes().replace(b"\n", b"\r\n"))

    ChannelTls(certificates.files("service"))


def signed(authority: Authority, name: str, alternatives: Sequence[x509.GeneralName]) -> Signed:
    """A certificate of any names, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private_pem(key)


@pytest.mark.parametrize(
    ("common", "alternative", "answer"),
    [
        ("alice", x509.DNSName(SERVICE_NAME), b"in"),
        (SERVICE_NAME, x509.DNSName("alice"), b"FOR_SERVICES_ALONE"),
        ("alice", x509.RFC822Name(SERVICE_NAME), b"FOR_SERVICES_ALONE"),
        ("alice", x509.UniformResourceIdentifier(SERVICE_NAME), b"FOR_SERVICES_ALONE"),
    ],
)
async def test_a_service_is_known_by_a_dns_name_and_by_no_other_kind(
    tmp_path: Path, common: str, alternative: x509.GeneralName, answer: bytes
) -> None:
    async with connected_with(tmp_path, common, alternative) as channel:
        call: Any = channel.unary_unary("/echo/Enter")
        assert await call(b"", timeout=60) == answer


@pytest.mark.parametrize("path", ["/echo/Enter", "/echo/Call"])
@pytest.mark.parametrize(
    ("common", "alternative"),
    [
        ("alice", x509.DNSName(f"{SERVICE_NAME}\0.tenant.example")),
        ("alice", x509.DNSName(f"{SERVICE_NAME}\n")),
        ("ops\0.tenant.example", x509.DNSName("alice")),
    ],
)
async def test_a_name_with_a_control_character_makes_no_one_what_it_begins_with(
    tmp_path: Path, common: str, alternative: x509.GeneralName, path: str
) -> None:
    """Both doors refuse it: authorities may be bound to how names end."""
    async with connected_with(tmp_path, common, alternative) as channel:
        call: Any = channel.unary_unary(path)
        assert await call(b"", timeout=60) == b"CERTIFICATE_UNREADABLE"


async def test_a_client_has_the_names_of_all_kinds_that_its_certificate_has(
    tmp_path: Path,
) -> None:
    alternatives = (
        x509.DNSName("alice.example"),
        x509.RFC822Name("alice@example"),
        x509.UniformResourceIdentifier("spiffe://example/alice"),
        x509.IPAddress(IPv4Address("10.0.0.1")),
        x509.RegisteredID(NameOID.SURNAME),
    )
    async with connected_with(tmp_path, "alice", *alternatives) as channel:
        assert await names(channel) == (
            "new ['10.0.0.1', 'alice', 'alice.example', 'alice@example', 'spiffe://example/alice']"
        )


@asynccontextmanager
async def connected_with(
    folder: Path, common: str, *alternatives: x509.GeneralName
) -> AsyncIterator[grpc.aio.Channel]:
    """To a server with mutual TLS, with a certificate of these names."""
    authority = Authority(days=1)
    certificates = folder / "made"
    make_certificates(certificates, authority=authority)
    own = (folder / "own.crt", folder / "own.key")
    for file, data in zip(own, signed(authority, common, alternatives), strict=True):
        file.write_bytes(data)
    files = CertificateFiles(*(certificates / name for name in FILES.values()))
    async with (
        serving(files, mutual=True) as address,
        connected(address, ChannelTls(CertificateFiles(files.ca, *own))) as channel,
    ):
        yield channel


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
