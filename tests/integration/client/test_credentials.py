"""Credentials of clients: where they come from, and what of them is sent."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import slatemq
from slatemq import _file_status
from slatemq import credentials as module
from slatemq._rpc import connecting
from slatemq._rpc.tls import CertificateFiles
from slatemq.cli.access.dev_certificates import make_certificates
from slatemq.credentials import Credentials, TokenSource, is_loopback
from slatemq.errors import InvalidArgument


@pytest.fixture
def profiles(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "profiles.toml"
    file.write_text(
        'text = "x"\n[default]\nca = "/d/ca"\ntoken = "default"\n'
        '[work]\ntls = true\ntoken_file = "/w/token"\n'
        '[odd]\ntokens = "x"\n[wrong]\ntls = "yes"\n'
    )
    return {"SLATEMQ_PROFILES": str(file)}


def test_parts_come_from_options_then_the_environment_then_the_profile(
    profiles: dict[str, str],
) -> None:
    environ = profiles | {"SLATEMQ_TOKEN": "env", "SLATEMQ_CERT": "/e/c", "SLATEMQ_KEY": "/e/k"}

    loaded = Credentials.load({"cert": "/o/c", "key": None}, environ)

    assert (loaded.ca, loaded.cert, loaded.key) == ("/d/ca", "/o/c", "/e/k")
    assert loaded.token == "env"
    assert loaded.is_tls


def test_a_token_of_one_source_replaces_a_token_file_of_the_next(profiles: dict[str, str]) -> None:
    by_option = Credentials.load({"token_file": "/o/token"}, profiles | {"SLATEMQ_TOKEN": "env"})
    by_profile = Credentials.load({}, profiles | {"SLATEMQ_PROFILE": "work"})

    assert (by_option.token, by_option.token_file) == ("", "/o/token")
    assert (by_profile.token, by_profile.token_file, by_profile.tls) == ("", "/w/token", True)


def test_nothing_given_is_a_plain_connection(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PROFILES_FILE", tmp_path / "absent")

    loaded = Credentials.load({}, {})

    assert loaded == Credentials()
    assert not loaded.is_tls


@pytest.mark.parametrize("name", ["absent", "odd", "wrong", "text"])
def test_a_bad_profile_is_refused(profiles: dict[str, str], name: str) -> None:
    with pytest.raises(InvalidArgument, match="profile") as caught:
        Credentials.load({}, profiles, name)
    assert not caught.value.field.endswith(".")


def test_a_named_file_of_profiles_must_be_there() -> None:
    with pytest.raises(InvalidArgument, match="there is no file /absent"):
        Credentials.load({}, {"SLATEMQ_PROFILES": "/absent"})


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"cert": "c"}, "key"),
        ({"key": "k"}, "cert"),
        ({"token": "t", "token_file": "f"}, "token"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Credentials(**parts)

    assert caught.value.field == field


def test_credentials_do_not_show_their_token() -> None:
    assert "smq_secret" not in repr(Credentials(token="smq_secret"))
    assert "has_token=True" in repr(Credentials(token="smq_secret"))


@pytest.mark.parametrize("token", ["a b", "ä", "a\nb", "x" * 20_000])
def test_a_token_that_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TokenSource(Credentials(token=token))

    assert token not in caught.value.message


def test_a_token_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    file = tmp_path / "token"
    file.write_text("one\n")
    source = TokenSource(Credentials(token_file=file))
    assert source.metadata() == (("authorization", "Bearer one"),)

    caplog.clear()
    file.write_text("")  # Half replaced.
    for _ in range(3):
        assert source.metadata() == (("authorization", "Bearer one"),)
    (line,) = caplog.messages
    assert line.startswith("keeping what was read before: ")
    assert str(file) in line
    file.write_text("three")
    assert source.metadata() == (("authorization", "Bearer three"),)
    file.unlink()
    assert source.metadata() == (("authorization", "Bearer three"),)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:7420", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.com:1", False),
        ("127.0.0.1.example.com:1", False),
    ],
)
def test_loopback_is_this_machine_alone(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


async def test_a_token_goes_to_another_machine_by_tls_alone() -> None:
    client = slatemq.connect("10.255.255.1:1", credentials=Credentials(token="smq_secret"))

    with pytest.raises(InvalidArgument, match="TLS alone") as caught:
        await client.__aenter__()

    await client.close()
    assert "smq_secret" not in caught.value.message


async def test_no_proxy_gets_what_is_sent_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        connection = connecting.Connecting(Credentials(token="smq_secret"))
        channel = connection.open(f"127.0.0.1:{port}", ())
        try:
            call: Any = channel.unary_unary("/slatemq.v1.QueueService/ListQueues")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=30)
            with pytest.raises(BlockingIOError):
                proxy.accept()
        finally:
            await channel.close()
            await server.stop(None)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # It has arrived.


def test_a_missing_file_is_named_when_the_client_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read") as caught:
        connecting.Connecting(Credentials(ca=tmp_path / "absent"))

    assert caught.value.field == "ca"


@pytest.mark.parametrize("part", ["ca", "token_file"])
def test_a_home_that_is_not_there_is_a_file_that_is_not_there(part: str) -> None:
    parts: Any = {part: "~no-such-user/file"}

    with pytest.raises(InvalidArgument, match="cannot read ~no-such-user/file") as caught:
        connecting.Connecting(Credentials(**parts))

    assert caught.value.field == part


@pytest.mark.parametrize(
    ("text", "is_tls"), [("", False), ("0", False), ("false", False), ("1", True), ("true", True)]
)
def test_the_environment_says_whether_to_connect_by_tls(
    text: str, is_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROFILES_FILE", tmp_path / "absent")

    assert Credentials.load({}, {"SLATEMQ_TLS": text}).is_tls is is_tls


@pytest.mark.parametrize("text", ["no", "False", "off"])
def test_another_word_in_the_environment_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="SLATEMQ_TLS must be 1, true, 0 or false"):
        Credentials.load({}, {"SLATEMQ_TLS": text})


def test_certificates_come_through_pipes(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    make_certificates(folder)
    with ExitStack() as opened:

        def piped(content: bytes) -> Path:
            """As `<(cat FILE)` of a shell names one."""
            reader, writer = os.pipe()
            opened.callback(os.close, reader)
            with open(writer, "wb") as end:
                end.write(content)
            return Path(f"/dev/fd/{reader}")

        cert, key = ((folder / name).read_bytes() for name in ("service.crt", "service.key"))
        assert CertificateFiles(None, piped(cert), piped(key)).read() == (None, cert, key)
