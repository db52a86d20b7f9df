"""Certificates that were revoked, on both ports of a running service, over real connections."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.access import reloading
from libs.serving.process.config import ServingConfig
from libs.serving.requests import open_calls
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq._tokens import new_token
from slatemq.cli.access.dev_certificates import SERVICE_NAME, Authority
from slatemq.errors import PermissionDenied, Unauthenticated
from slatemq.v1 import access_check_pb2, access_check_pb2_grpc
from tests.integration.serving.echo_service import METHODS, EchoService

pytestmark = pytest.mark.usefixtures("cheap_hashes")

CLIENT, OTHER_SERVICE, OTHER_CLIENT = "client", "other-service", "other-client"
REVOKED: Final = "CERTIFICATE_REVOKED"


def write_list(folder: Path, authority: Authority, *revoked: str) -> None:
    """Put the authority's list of these certificates in place, whole."""
    now = datetime.now(UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.name)
        .last_update(now)
        .next_update(now + timedelta(days=1))
    )
    for name in revoked:
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
        entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number)
        builder = builder.add_revoked_certificate(entry.revocation_date(now).build())
    made = builder.sign(authority.key, hashes.SHA256())
    new = folder / "crl.new"
    new.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    new.replace(folder / "crl.pem")


@dataclass
class Served:
    """A service that runs, with a list of revoked certificates that is empty at first."""

    folder: Path
    authority: Authority
    addresses: dict[str, str]
    echo: EchoService
    token: str

    def revoke(self, *names: str) -> None:
        write_list(self.folder, self.authority, *names)

    def connect(self, port: str, name: str) -> grpc.aio.Channel:
        """A channel with the certificate of this name to the port for clients, or for services."""
        own = [self.folder / f"{name}.{kind}" for kind in ("crt", "key")]
        tls = ChannelTls(CertificateFiles(self.folder / "ca.crt", *own))
        return grpc.aio.secure_channel(self.addresses[port], tls.credentials)


@asynccontextmanager
async def serving(folder: Path, *, policy: bool) -> AsyncIterator[Served]:
    authority = Authority(days=1)
    (folder / "ca.crt").write_bytes(authority.pem)
    for name, names in (
        ("service", (SERVICE_NAME, "127.0.0.1")),
        (OTHER_SERVICE, (SERVICE_NAME,)),
        (CLIENT, (CLIENT,)),
        (OTHER_CLIENT, (OTHER_CLIENT,)),
    ):
        certificate, key = authority.sign(names[0], names)
        (folder / f"{name}.crt").write_bytes(certificate)
        private = folder / f"{name}.key"
        private.touch(0o600)
        private.write_bytes(key)
    write_list(folder, authority)
    made = new_token("someone")
    (folder / "tokens.yaml").write_text(yaml.safe_dump({"tokens": [made.entry]}))
    (folder / "policy.yaml").write_text("roles: {}\n")
    config = ServingConfig(
        root="memory:///",
        tls_ca=str(folder / "ca.crt"),
        tls_cert=str(folder / "service.crt"),
        tls_key=str(folder / "service.key"),
        tls_crl=str(folder / "crl.pem"),
        client_certificates="required",
        access_policy=str(folder / "policy.yaml") if policy else "",
        access_tokens=str(folder / "tokens.yaml") if policy else "",
    )
    echo = EchoService()
    service = RunningService(echo, config, Telemetry())
    with Signals() as signals:
        run = asyncio.create_task(service.run(signals))
        async with asyncio.timeout(60):
            while not echo.steps:
                await asyncio.sleep(0)
        addresses = {"clients": service.address, "services": service.peer_address}
        try:
            yield Served(folder, authority, addresses, echo, made.token)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait([run])


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reloading, open_calls):
        monkeypatch.setattr(module, "LOOK_S", 0.02)


async def echo(channel: grpc.aio.Channel, text: str = "hello") -> str:
    method: Any = channel.unary_unary(METHODS["uu"], StringValue.SerializeToString)
    with raising_slatemq_errors():
        answer = await method(StringValue(value=text), wait_for_ready=True, timeout=60)
    return StringValue.FromString(answer).value


async def until_revoked(call: Any) -> Unauthenticated:
    """The error of the call, once it has one."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call()
            except Unauthenticated as error:
                return error


async def test_at_the_port_for_services_all_but_their_health_is_for_them_alone(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, policy=False) as served, AsyncExitStack() as channels:
        service, client = [
            await channels.enter_async_context(served.connect("services", name))
            for name in (OTHER_SERVICE, CLIENT)
        ]

        async def reflect(channel: Any) -> int:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            with raising_slatemq_errors():
                [answer] = [one async for one in stub.ServerReflectionInfo([asked], timeout=60)]
            return len(answer.list_services_response.service)

        assert await reflect(service) > 0
        with pytest.raises(PermissionDenied):
            await reflect(client)
        health: Any = health_pb2_grpc.HealthStub(client)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        served.revoke(OTHER_SERVICE)
        assert (await until_revoked(lambda: reflect(service))).reason == REVOKED


@pytest.mark.parametrize(
    ("port", "revoked", "good"),
    [("clients", CLIENT, OTHER_CLIENT), ("services", OTHER_SERVICE, "service")],
)
async def test_a_revoked_certificate_ends_on_connections_and_streams_that_are_open(
    tmp_path: Path, port: str, revoked: str, good: str
) -> None:
    async with serving(tmp_path, policy=False) as served, AsyncExitStack() as channels:
        # Given connections, a stream that waits for requests, and one for responses
        mine, another = [
            await channels.enter_async_context(served.connect(port, name))
            for name in (revoked, good)
        ]
        assert await echo(mine) == await echo(another) == "hello"
        asking: Any = mine.stream_stream(METHODS["ss"], StringValue.SerializeToString)()
        await asking.write(StringValue(value="one"))
        assert StringValue.FromString(await asking.read()).value == "one"
        hearing: Any = mine.unary_stream(METHODS["us"], StringValue.SerializeToString)(
            StringValue(value="one wait")
        )
        assert StringValue.FromString(await hearing.read()).value == "one"
        await served.echo.servicer.waiting.wait()

        # When the certificate is revoked
        served.revoke(revoked)
        error = await until_revoked(lambda: echo(mine))

        # Then so is all that has it, though nothing comes
        assert error.reason == REVOKED
        async with asyncio.timeout(60):
            for stream in (asking, hearing):
                assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
            await served.echo.servicer.cancelled.wait()
        async with served.connect(port, revoked) as again:
            with pytest.raises(Unauthenticated):
                await echo(again)

        # And others go on
        assert await echo(another) == "hello"
        async with served.connect(port, good) as new:
            assert await echo(new) == "hello"


async def test_a_stream_whose_caller_has_stopped_reading_ends_with_its_status(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, policy=False) as served,
        served.connect("clients", CLIENT) as mine,
    ):
        asked = StringValue(value="flood" * 20_000)
        stream: Any = mine.unary_stream(METHODS["us"], StringValue.SerializeToString)(asked)
        await stream.read()
        sent = 0
        while sent < served.echo.servicer.flooded:
            sent = served.echo.servicer.flooded
            await asyncio.sleep(0.2)

        served.revoke(CLIENT)

        async with asyncio.timeout(60):
            await served.echo.servicer.closed.wait()
            with suppress(grpc.aio.AioRpcError):
                while True:
                    await stream.read()
            assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_revoked_certificate_is_refused_whatever_else_its_caller_proves(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, policy=True) as served,
        served.connect("clients", CLIENT) as mine,
        served.connect("clients", OTHER_CLIENT) as another,
    ):
        proof = (("authorization", f"Bearer {served.token}"),)

        async def name(channel: grpc.aio.Channel, metadata: Any = ()) -> str:
            stub: Any = access_check_pb2_grpc.AccessServiceStub(channel)
            request = access_check_pb2.GetCallerRequest()
            with raising_slatemq_errors():
                answer = await stub.GetCaller(request, metadata=metadata, wait_for_ready=True)
            return str(answer.principal)

        assert (await name(mine), await name(mine, proof)) == (CLIENT, "someone")

        served.revoke(CLIENT)

        assert (await until_revoked(lambda: name(mine))).reason == REVOKED
        with pytest.raises(Unauthenticated, match="revoked"):
            await name(mine, proof)
        assert (await name(another), await name(another, proof)) == (OTHER_CLIENT, "someone")


async def test_a_bad_new_list_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(tmp_path, policy=False) as served,
        served.connect("clients", CLIENT) as mine,
    ):
        served.revoke(CLIENT)
        await until_revoked(lambda: echo(mine))

        (tmp_path / "crl.pem").write_text("half of a list")
        async with asyncio.timeout(60):
            while "keeping the version before" not in caplog.text:
                await asyncio.sleep(0.01)

        with pytest.raises(Unauthenticated, match="revoked"):
            await echo(mine)
        served.revoke()
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await echo(mine) == "hello"
                    break
                except Unauthenticated:
                    pass
