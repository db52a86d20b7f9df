"""The keys of an issuer by HTTPS."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from libs.access.ending import Connections
from libs.access.jwt_tokens import Issuer, fetch_keys
from slatemq.cli.access.dev_certificates import make_certificates
from tests.strict_certificates import plain_authority, strict_as_of_python_3_13

KEY = jwt.algorithms.ECAlgorithm.to_jwk(
    ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"keys": [KEY | {"kid": "one", "alg": "ES256"}]}).encode())

    def log_message(self, *_: object) -> None:
        """Tests have no log of it."""


def test_an_authority_that_states_no_key_usage_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict_as_of_python_3_13(monkeypatch)
    folder = tmp_path / "made"
    make_certificates(folder, authority=plain_authority())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "service.crt", folder / "service.key")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.server_port}"
        ca = str(folder / "ca.crt")
        issuer = Issuer(issuer=url, audience="us", jwks_url=f"{url}/keys", ca_file=ca)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            keys = fetch_keys(issuer, Connections())
        finally:
            server.shutdown()
            thread.join()

    assert ("one", "EC") in keys
