"""A process that others can reach without TLS and a policy says so, wherever one looks."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from tests.acceptance.local_stack import wait_until
from tests.integration.stack.secured import Secured
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow

CLI = [sys.executable, "-m", "slatemq.cli"]
COMMAND = [sys.executable, "-m", "services.ingest", "--host", "0.0.0.0"]


class Ingest:
    """One that listens everywhere, advertised on loopback."""

    def __init__(self, folder: Path) -> None:
        self._ready = folder / "ready.json"
        self._said = folder / "said"
        (folder / "home").mkdir()
        self._environ = {"PATH": os.environ["PATH"], "HOME": str(folder / "home")}
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [
                    *COMMAND,
                    *("--insecure", "true", "--root", (folder / "data").as_uri()),
                    *("--ready-file", str(self._ready)),
                    *("--log-level", "error"),
                ],
                stderr=said,
                env=self._environ,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def status(self, *words: str) -> subprocess.CompletedProcess[str]:
        wait_until(self._ready.exists, 60, self._alive)
        port = json.loads(self._ready.read_text())["address"].rpartition(":")[2]
        return subprocess.run(
            [*CLI, "--endpoint", f"127.0.0.1:{port}", "status", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=self._environ,
        )

    def _alive(self) -> None:
        assert self.process.poll() is None, self.said


@pytest.fixture
def ingest(tmp_path: Path) -> Iterator[Ingest]:
    started = Ingest(tmp_path)
    yield started
    started.process.terminate()
    assert started.process.wait(60) == 0


def test_it_says_so_in_its_log_and_in_the_status(ingest: Ingest) -> None:
    insecure = "INSECURE: other machines can reach these without TLS and policy: ingest 0"

    def found() -> list[list[str]]:
        status = ingest.status("--json")
        services = json.loads(status.stdout)["services"] if status.returncode == 0 else []
        return [one["open_without"] for one in services]

    # A process that is busy may answer a look too late.
    wait_until(lambda: insecure in ingest.status().stderr, WAIT_SECONDS)
    wait_until(lambda: found() == [["TLS", "policy"]], WAIT_SECONDS)
    assert "WARNING ingest slatemq.audit" in ingest.said
    assert "open to other machines without TLS and policy" in ingest.said


def test_without_that_word_it_does_not_start_and_writes_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*COMMAND, "--root", (tmp_path / "data").as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )

    assert ended.returncode == 2
    assert "say --insecure" in ended.stderr
    assert not (tmp_path / "data").exists()


def test_health_metrics_and_events_of_s3_are_served_by_tls_to_other_machines(
    tmp_path: Path,
) -> None:
    made, ready, said = Secured(tmp_path), tmp_path / "ready.json", tmp_path / "said"
    with said.open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "--root", "memory:///", "--http-port", "0", "--ready-file", str(ready)],
            stderr=log,
            env={"PATH": os.environ["PATH"], "SLATEMQ_S3_EVENTS_TOKEN": "right", **made.environ},
        )
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, 60)
        assert ready.exists(), said.read_text()
        port = int(json.loads(ready.read_text())["http_address"].rpartition(":")[2])
        tls = ssl.create_default_context(cafile=str(made.certificates / "ca.crt"))

        def status(method: str, path: str, token: str = "") -> int:
            asking = HTTPSConnection("127.0.0.1", port, context=tls, timeout=60)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            asking.request(method, path, b'{"Records": []}', headers)
            found = asking.getresponse().status
            asking.close()
            return found

        assert status("GET", "/health") == status("GET", "/metrics") == 200
        assert status("POST", "/s3-events", "right") == 200
        assert status("POST", "/s3-events", "wrong") == 401
        with pytest.raises(OSError, match=r"reset|closed|Invalid"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)
    finally:
        process.terminate()
        assert process.wait(60) == 0
