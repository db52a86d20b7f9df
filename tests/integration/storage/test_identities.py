"""Identities by which both clients of a store get in without keys, as a machine or a pod has them.

What gives out tokens is a stand-in here. Google's store and Amazon's tokens are asked for by https
at names of their own: of these it is seen that the clients go there, through a proxy.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from slatedb.uniffi import AdminBuilder

from libs.storage.database.addresses import parse_root
from libs.storage.database.wal_stores import open_clients
from libs.storage.objects.durability import NoSync

OF_MACHINE = re.compile(
    r"(AWS|AZURE|GOOGLE|GCE)_|IDENTITY_|METADATA_HOST|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE
)
"""Variables that a test must not have from the machine that it runs on."""

TOKEN = {"access_token": "given", "expires_in": 3600, "token_type": "Bearer"}
ANSWERS = {
    "/pod-identity": {
        "AccessKeyId": "POD",
        "SecretAccessKey": "secret",
        "Token": "token",
        "Expiration": "2099-01-01T00:00:00Z",
    },
    "/tenant/oauth2/v2.0/token": TOKEN,
    "/computeMetadata/v1/instance/service-accounts/default/token": TOKEN,
}


class Answering(BaseHTTPRequestHandler):
    """Gives out tokens, has no objects, and connects to nowhere; notes each request."""

    protocol_version = "HTTP/1.1"
    seen: list[str]

    def log_message(self, *_: object) -> None: ...

    def _answer(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        shown = self.headers.get("authorization", "")
        self.seen.append(f"{self.command} {self.path} {shown} {asked}")
        found = ANSWERS.get(self.path.partition("?")[0])
        data = b"" if found is None else json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_CONNECT = _answer  # noqa: N815


@dataclass(frozen=True)
class Identity:
    """`{here}` is where the stand-in answers, `{token}` a file of a token, `jwt`.

    Attributes:
        asked: How it is asked for, and what with, as it is seen by the stand-in.
        shown: How the store is asked with it; empty: what was asked for is not given out here.
    """

    url: str
    environ: dict[str, str]
    asked: str
    shown: str


S3 = "s3://bucket/p?endpoint=http://{here}&region=eu-west-1&allow_http=true"
AZURE = "az://container/p?endpoint=http://{here}&allow_http=true"
OF_AZURE = {
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_CLIENT_ID": "client",
    "AZURE_TENANT_ID": "tenant",
    "AZURE_AUTHORITY_HOST": "http://{here}/",
}

IDENTITIES = {
    "a role on S3 by web identity": Identity(
        S3,
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "{token}", "AWS_ROLE_ARN": "arn:aws:iam::1:role/queues"},
        r"^CONNECT sts\.eu-west-1\.amazonaws\.com:443 ",
        "",
    ),
    "a role on S3 by the agent of the node": Identity(
        S3,
        {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://{here}/pod-identity",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{token}",
        },
        r"^GET /pod-identity jwt ",
        r"^GET /bucket\S* AWS4-HMAC-SHA256 Credential=POD/",
    ),
    "a Google account by the metadata server": Identity(
        "gs://bucket/p",
        {"GCE_METADATA_HOST": "{here}"},
        r"^GET /computeMetadata/v1/instance/service-accounts/default/token\?",
        r"^CONNECT storage\.googleapis\.com:443 ",
    ),
    "an identity of Azure by a federated token": Identity(
        AZURE,
        {**OF_AZURE, "AZURE_FEDERATED_TOKEN_FILE": "{token}"},
        r"^POST /tenant/oauth2/v2\.0/token .*client_id=client.*client_assertion=jwt",
        r"^GET /container\S* Bearer given ",
    ),
    "an application of Azure by its secret": Identity(
        AZURE,
        {**OF_AZURE, "AZURE_CLIENT_SECRET": "secret"},
        r"^POST /tenant/oauth2/v2\.0/token .*client_id=client.*client_secret=secret",
        r"^GET /container\S* Bearer given ",
    ),
}


@pytest.fixture
def stand_in() -> Iterator[tuple[str, list[str]]]:
    """Where it answers, and what it has seen."""
    noted: list[str] = []

    class Handler(Answering):
        seen = noted

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", noted
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", IDENTITIES)
async def test_both_clients_of_a_store_get_in_by(
    name: str,
    tmp_path: Path,
    stand_in: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given what the platform sets for a process, and no keys
    here, seen = stand_in
    (tmp_path / "token").write_text("jwt")
    places = {"here": here, "token": str(tmp_path / "token")}
    identity = IDENTITIES[name]
    for variable in [one for one in os.environ if OF_MACHINE.match(one)]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HTTPS_PROXY", f"http://{here}")
    for variable, value in identity.environ.items():
        monkeypatch.setenv(variable, value.format(**places))
    address = parse_root(identity.url.format(**places))
    store, objects = await asyncio.to_thread(open_clients, address, None, NoSync())

    # Then each asks for the identity, and reads with it
    for reading in (
        objects.get("x"),
        AdminBuilder("p/broker/0", store).build().list_checkpoints(None),
    ):
        seen.clear()
        await _until_seen(reading, seen, [identity.asked, identity.shown])


async def _until_seen(reading: Awaitable[object], seen: list[str], wanted: list[str]) -> None:
    """Read until these requests were made, with or without an answer to the reading."""
    task = asyncio.ensure_future(reading)
    try:
        async with asyncio.timeout(60):
            while not all(any(re.search(one, line) for line in list(seen)) for one in wanted):
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert seen
