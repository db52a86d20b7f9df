"""An S3 server that counts requests: `python -m benchmarks.suite.counting_store PORT [PUT_MS]`.

moto behind a counter, which makes each PUT and POST take PUT_MS longer. GET /_counts returns, as
JSON, the number of requests of each method and their bytes, by the owner of the object (ingest,
broker) and its kind (wal, compacted, …).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple

COUNTS_PATH = "/_counts"
OWNERS = ("ingest", "broker")
KINDS = ("wal", "compacted", "manifest", "compactions", "gc", "topology", "blobs")


class Counting:
    """A WSGI application in front of another one."""

    def __init__(self, application: Any, put_s: float = 0.0) -> None:
        self._application = application
        self._put_s = put_s
        self._lock = Lock()
        self._counts: dict[str, list[int]] = {}

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == COUNTS_PATH:
            start("200 OK", [("content-type", "application/json")])
            return [json.dumps(self._counts).encode()]
        parts = path.split("/")
        owner = next((owner for owner in OWNERS if owner in parts), "any")
        kind = f"{owner} {next((kind for kind in KINDS if kind in parts), 'other')}"
        if method == "GET" and len(parts) <= 3 and "list-type" in environ.get("QUERY_STRING", ""):
            method = "LIST"
        size = int(environ.get("CONTENT_LENGTH") or 0)
        with self._lock:
            counted = self._counts.setdefault(f"{method} {kind}", [0, 0])
            counted[0] += 1
            counted[1] += size
        if self._put_s and method in ("PUT", "POST"):
            time.sleep(self._put_s)
        answer: Iterable[bytes] = self._application(environ, start)
        return answer


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    put_ms = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    application = Counting(DomainDispatcherApplication(create_backend_app), put_ms / 1000)
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        application,
        threaded=True,
        request_handler=MotoRequestHandler,
    )


if __name__ == "__main__":
    main()
