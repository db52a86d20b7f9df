"""S3 for tests: moto on a port of its own, and a proxy that forgets conditional headers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from moto import backends
from moto.server import ThreadedMotoServer

_MODULES: Final = frozenset(backends.list_of_moto_modules())

backends.list_of_moto_modules = lambda: _MODULES
"""Moto looks through its own folder at each request, which is a quarter of what one takes."""

BUCKET = "queues"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "geheim"}


def root_url(port: int, prefix: str, bucket: str = BUCKET) -> str:
    """The URL of a root in the bucket, behind `port` on loopback."""
    options = f"endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=true"
    return f"s3://{bucket}/{prefix}?{options}"


def make_bucket(port: int, name: str) -> str:
    """Makes a bucket of about this name, which may be that of a test; returns what it is called."""
    bucket = name.replace("_", "-")[-60:].strip("-")
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    connection.close()
    return bucket


@contextmanager
def moto() -> Iterator[int]:
    """A fresh S3 server with one bucket; gives its port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        make_bucket(port, BUCKET)
        yield port
    finally:
        server.stop()


class _Forgetful(BaseHTTPRequestHandler):
    """Passes requests on without their If-* headers, as a store does that does not know them."""

    protocol_version = "HTTP/1.1"
    upstream_port = 0

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {
            name: value
            for name, value in self.headers.items()
            if not name.lower().startswith("if-") and name.lower() != "connection"
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream_port)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date"):
                self.send_header(name, value)
        length = answer.getheader("content-length") if self.command == "HEAD" else None
        self.send_header("content-length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        return


@contextmanager
def forgetful_proxy(upstream_port: int) -> Iterator[int]:
    """A store before `upstream_port` that ignores conditions; gives its port."""
    handler = type("Handler", (_Forgetful,), {"upstream_port": upstream_port})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
