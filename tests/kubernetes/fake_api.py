"""As much of Kubernetes' API as Spark's driver asks for executors; their pods run as processes.

There is no scheduler, no kubelet and no admission here. What a pod is made of is real: Spark posts
it, and its command, arguments and environment are what the process gets.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/(?P<kind>\w+)(/(?P<name>[^/]+))?")

KINDS = {"pods": "Pod", "configmaps": "ConfigMap", "services": "Service"}

Object = dict[str, Any]


class Api:
    """What was made, and the processes of the pods.

    Attributes:
        url: Where it answers.
        pods: Each pod that was posted, as it was posted.
        requests: Verb and kind of each request, as rules of a Role name them.
        closed: Set at the end.
    """

    def __init__(self, folder: Path, mounts: dict[str, Path]) -> None:
        """Pods run in `folder`; paths below the keys of `mounts` are in the folders there."""
        self.pods: list[Object] = []
        self.requests: set[tuple[str, str]] = set()
        self.url = ""
        self._folder = folder
        self._mounts = mounts
        self._objects: dict[tuple[str, str], Object] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def add(self, kind: str, made: Object) -> Object:
        name = made["metadata"].setdefault("name", f"made-{len(self._objects)}")
        made["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1"}
        with self._lock:
            self._objects[kind, name] = made
        return made

    def run(self, pod: Object) -> None:
        """Start the one container of a pod."""
        self.pods.append(json.loads(json.dumps(pod)))
        (container,) = pod["spec"]["containers"]
        facts = {"metadata.name": pod["metadata"]["name"], "status.podIP": "127.0.0.1"}
        environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        for one in container["env"]:
            source = one.get("valueFrom", {}).get("fieldRef")
            value = facts[source["fieldPath"]] if source else one.get("value", "")
            environ[one["name"]] = self._in_folder(value)
        for mount in container["volumeMounts"]:
            if mount["name"].startswith("spark-local-dir"):
                environ["SPARK_LOCAL_DIRS"] = str(self._folder)
        command: list[str] = container["command"] + container["args"]
        assert command[0] == "python"
        with (self._folder / f"{pod['metadata']['name']}.log").open("wb") as log:
            self._processes[pod["metadata"]["name"]] = subprocess.Popen(
                [sys.executable, *command[1:]],
                cwd=self._folder,
                env=environ,
                stdout=log,
                stderr=log,
            )

    def _in_folder(self, value: str) -> str:
        for mounted, folder in self._mounts.items():
            if value.startswith(f"{mounted}/"):
                return f"{folder}{value[len(mounted) :]}"
        return value

    def find(self, kind: str, name: str) -> Object | None:
        return self._objects.get((kind, name))

    def remove(self, kind: str, name: str) -> None:
        with self._lock:
            self._objects.pop((kind, name), None)
        process = self._processes.pop(name, None)
        if kind == "pods" and process is not None:
            process.kill()
            process.wait()

    def names(self, kind: str) -> list[str]:
        return [name for of, name in list(self._objects) if of == kind]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextmanager
def api(folder: Path, mounts: dict[str, Path]) -> Iterator[Api]:
    """An API on a free port of the loopback, until the block ends."""
    made = Api(folder, mounts)

    class Handler(_Handler):
        of = made

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.closed.set()
        server.shutdown()
        server.server_close()
        made.close()


class _Handler(BaseHTTPRequestHandler):
    of: Api
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, status: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stay_silent(self) -> None:
        """A watch in which nothing happens that Spark would have to know."""
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.of.closed.wait()
        self.close_connection = True

    def _target(self, verb: str) -> tuple[str, str]:
        found = _PATH.fullmatch(urlsplit(self.path).path)
        assert found, self.path
        kind, name = found["kind"], found["name"] or ""
        self.of.requests.add((verb, kind))
        return kind, name

    def _body(self) -> Any:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        return json.loads(data) if data else None

    def do_GET(self) -> None:
        is_watch = parse_qs(urlsplit(self.path).query).get("watch") == ["true"]
        is_one = urlsplit(self.path).path.count("/") == 6
        kind, name = self._target("watch" if is_watch else "get" if is_one else "list")
        if is_watch and self.headers.get("upgrade"):
            self._answer(503, _status(503, "no web sockets here"))  # It asks again, without.
        elif is_watch:
            self._stay_silent()
        elif name:
            found = self.of.find(kind, name)
            self._answer(200, found) if found else self._answer(404, _status(404, name))
        else:
            items = [self.of.find(kind, one) for one in self.of.names(kind)]
            listed = {"kind": f"{KINDS.get(kind, 'Object')}List", "apiVersion": "v1"}
            self._answer(200, {**listed, "metadata": {"resourceVersion": "1"}, "items": items})

    def do_POST(self) -> None:
        kind, _ = self._target("create")
        made = self.of.add(kind, self._body())
        if kind == "pods":
            self.of.run(made)
            made["status"] = {"phase": "Running", "podIP": "127.0.0.1"}
        self._answer(201, made)

    def do_PATCH(self) -> None:
        kind, name = self._target("patch")
        self._body()
        found = self.of.find(kind, name)
        self._answer(200, found) if found else self._answer(404, _status(404, name))

    def do_DELETE(self) -> None:
        kind, name = self._target("delete" if self.path.count("/") == 6 else "deletecollection")
        self._body()
        for one in [name] if name else self.of.names(kind):
            self.of.remove(kind, one)
        self._answer(200, _status(200, "gone"))


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}
