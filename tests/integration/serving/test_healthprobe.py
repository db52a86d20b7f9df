"""The probe of container health checks, against real servers."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from libs.serving.process import healthprobe
from libs.serving.process.healthprobe import probe, probe_pages
from slatemq.cli.access.dev_certificates import SERVICE_NAME, make_certificates
from tests.acceptance.local_stack import REPOSITORY
from tests.strict_certificates import plain_authority

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


TRIES = 5
"""A program waits two seconds for a server, and a machine may stand still for as long."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthprobe, "DEADLINE_SECONDS", 60.0)


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, health.aio.HealthServicer]]:
    servicer = health.aio.HealthServicer()
    running = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    yield f"127.0.0.1:{port}", servicer
    await running.stop(0)


async def _probed(address: str) -> str:
    return await asyncio.to_thread(probe, address)


async def test_a_server_is_healthy_while_it_says_that_it_serves(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    for status, said in ((SERVING, ""), (NOT_SERVING, f"{address}: NOT_SERVING"), (SERVING, "")):
        await servicer.set("", status)
        assert await _probed(address) == said


async def test_many_probes_at_once_are_answered(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    await servicer.set("", SERVING)
    assert await asyncio.gather(*(_probed(address) for _ in range(20))) == [""] * 20


async def test_a_server_without_health_or_without_grpc_or_none_at_all_is_not_healthy() -> None:
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    assert await _probed(f"127.0.0.1:{port}") == f"127.0.0.1:{port}: the server refused the call"
    await bare.stop(0)

    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    async with web:
        assert await _probed(f"127.0.0.1:{web.sockets[0].getsockname()[1]}") != ""

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert "refused" in await _probed(f"127.0.0.1:{closed.getsockname()[1]}")


async def test_the_command_says_why_and_imports_no_grpc(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    await servicer.set("", SERVING)
    # As in the Dockerfile.
    program = "libs/serving/process/healthprobe.py"
    command = [sys.executable, "-X", "importtime", "-S", "-E", program]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )

    for _ in range(TRIES):
        healthy = await asyncio.to_thread(run, address)
        if healthy.returncode == 0:
            break
    assert healthy.returncode == 0
    assert "asyncio" not in healthy.stderr
    assert "grpc" not in healthy.stderr
    unreachable = await asyncio.to_thread(run, "127.0.0.1:1")
    assert unreachable.returncode == 1
    assert "127.0.0.1:1: " in unreachable.stderr


@pytest.mark.parametrize("option", ["--alive", "--answers"])
async def test_alive_is_a_server_that_answers_whether_it_serves_or_not(
    server: tuple[str, health.aio.HealthServicer], option: str
) -> None:
    address, servicer = server
    program = str(REPOSITORY / "libs/serving/process/healthprobe.py")
    for status in (NOT_SERVING, SERVING):
        await servicer.set("", status)
        for _ in range(TRIES):
            probing = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-E", program, option, address
            )
            if await probing.wait() == 0:
                break
        assert probing.returncode == 0

    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    probing = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", program, option, nowhere, stderr=subprocess.PIPE
    )
    assert await probing.wait() == 1


@asynccontextmanager
async def _pages(certificate: Path, key: Path) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as web:
        yield web.sockets[0].getsockname()[1]


@asynccontextmanager
async def _calls(
    certificate: Path, key: Path, authority: Path | None = None, status: int = SERVING
) -> AsyncIterator[int]:
    """With an authority, it lets in clients with a certificate of it alone."""
    pair = await asyncio.to_thread(lambda: (key.read_bytes(), certificate.read_bytes()))
    ca = None if authority is None else await asyncio.to_thread(authority.read_bytes)
    running = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    credentials = grpc.ssl_server_credentials([pair], ca, ca is not None)
    port = running.add_secure_port("127.0.0.1:0", credentials)
    await running.start()
    yield port
    await running.stop(0)


@pytest.mark.parametrize("look", [probe, probe_pages])
async def test_a_server_whose_certificate_has_expired_is_alive_and_not_healthy(
    look: Callable[..., str], tmp_path: Path
) -> None:
    make_certificates(tmp_path / "valid", days=1)
    make_certificates(tmp_path / "expired", days=0)
    serve = _pages if look is probe_pages else _calls
    for folder, problem in ((tmp_path / "valid", ""), (tmp_path / "expired", "has expired")):
        cert, key = folder / "service.crt", folder / "service.key"
        files = {"ca": str(folder / "ca.crt"), "cert": str(cert), "key": str(key)}
        tls = files | {"identity": SERVICE_NAME}
        async with serve(cert, key) as port:
            address = f"127.0.0.1:{port}"
            said = await asyncio.to_thread(look, address, tls)
            assert problem in said if problem else said == ""
            assert await asyncio.to_thread(partial(look, address, tls, alive=True)) == ""
        assert "refused" in await asyncio.to_thread(partial(look, address, tls, alive=True))


async def test_a_server_with_a_certificate_of_another_authority_is_alive_and_does_not_answer(
    tmp_path: Path,
) -> None:
    for name in ("ours", "others"):
        make_certificates(tmp_path / name, days=1)
    cert, key = tmp_path / "others" / "service.crt", tmp_path / "others" / "service.key"
    ca = tmp_path / "ours" / "ca.crt"
    tls = {"ca": str(ca), "cert": str(cert), "key": str(key), "identity": SERVICE_NAME}
    async with _calls(cert, key) as port:
        look = partial(probe, f"127.0.0.1:{port}", tls)
        assert "certificate verify failed" in await asyncio.to_thread(partial(look, answers=True))
        assert await asyncio.to_thread(partial(look, alive=True)) == ""
        tls["ca"] = str(tmp_path / "others" / "ca.crt")
        assert await asyncio.to_thread(partial(look, answers=True)) == ""


def _damage(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(b"")


def _remove(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def _renew_half(folder: Path) -> None:
    shutil.copy(folder / "client.key", folder / "service.key")


def _expire(folder: Path) -> None:
    make_certificates(folder / "expired", days=0)
    for name in ("service.crt", "service.key"):
        shutil.copy(folder / "expired" / name, folder / name)


@pytest.mark.parametrize("needs_certificate", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        *(_damage(name) for name in ("ca.crt", "service.crt", "service.key")),
        *(_remove(name) for name in ("ca.crt", "service.crt", "service.key")),
        _renew_half,
    ],
)
async def test_a_server_that_goes_on_with_the_files_before_is_alive_and_healthy(
    tmp_path: Path, spoil: Callable[[Path], object], needs_certificate: bool
) -> None:
    make_certificates(tmp_path, days=1)
    ca, cert, key = (tmp_path / name for name in ("ca.crt", "service.crt", "service.key"))
    tls = {"ca": str(ca), "cert": str(cert), "key": str(key), "identity": SERVICE_NAME}
    async with _calls(cert, key, ca if needs_certificate else None) as port:
        spoil(tmp_path)
        for alive in (False, True):
            look = partial(probe, f"127.0.0.1:{port}", tls, alive=alive)
            assert await asyncio.to_thread(look) == ""


@pytest.mark.parametrize("needs_certificate", [False, True])
async def test_a_server_that_refuses_the_certificate_of_the_probe_is_alive_and_not_healthy(
    tmp_path: Path, needs_certificate: bool
) -> None:
    make_certificates(tmp_path, days=1)
    ca, cert, key = (tmp_path / name for name in ("ca.crt", "service.crt", "service.key"))
    tls = {"ca": str(ca), "cert": str(cert), "key": str(key), "identity": SERVICE_NAME}
    async with _calls(cert, key, ca if needs_certificate else None) as port:
        _expire(tmp_path)
        look = partial(probe, f"127.0.0.1:{port}", tls)
        for answers in (False, True):
            said = await asyncio.to_thread(partial(look, answers=answers))
            assert ("the server closed the connection" in said) is bool(said) is needs_certificate
        assert await asyncio.to_thread(partial(look, alive=True)) == ""


async def test_without_a_certificate_of_its_own_it_sees_that_a_server_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path, days=1)
    ca, cert, key = (tmp_path / name for name in ("ca.crt", "service.crt", "service.key"))
    tls = {"ca": str(ca), "cert": str(cert), "key": str(key), "identity": SERVICE_NAME}
    async with _calls(cert, key, status=NOT_SERVING) as port:
        key.unlink()
        look = partial(probe, f"127.0.0.1:{port}", tls)
        assert "NOT_SERVING" in await asyncio.to_thread(look)

    monkeypatch.setattr(healthprobe, "DEADLINE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        look = partial(probe, f"127.0.0.1:{silent.getsockname()[1]}", tls, alive=True)
        assert "timed out" in await asyncio.to_thread(look)


async def test_an_authority_that_states_no_key_usage_is_trusted_as_grpc_trusts_it(
    tmp_path: Path,
) -> None:
    authority = plain_authority()
    make_certificates(tmp_path / "made", authority=authority)
    cert, key = tmp_path / "made" / "service.crt", tmp_path / "made" / "service.key"
    files = {"ca": str(tmp_path / "made" / "ca.crt"), "cert": str(cert), "key": str(key)}
    async with _calls(cert, key) as port:
        tls = files | {"identity": SERVICE_NAME}
        assert await asyncio.to_thread(probe, f"127.0.0.1:{port}", tls) == ""
