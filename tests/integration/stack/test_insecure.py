"""A process that others can reach without TLS and a policy says so, wherever one looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.local_stack import wait_until
from tests.integration.stack.test_secured_stack import Secured

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
            check=True,
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
    shown = ingest.status()
    found: Any = json.loads(ingest.status("--json").stdout)

    assert "WARNING ingest slatemq.audit" in ingest.said
    assert "open to other machines without TLS and policy" in ingest.said
    assert "INSECURE: other machines can reach these without TLS and policy: ingest 0" in (
        shown.stderr
    )
    assert [one["open_without"] for one in found["services"]] == [["TLS", "policy"]]


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


def test_a_token_of_s3_events_is_not_taken_without_tls_from_other_machines(
    secured_files: dict[str, str],
) -> None:
    """Not where all else has TLS and a policy, either: the HTTP port has none."""
    ended = subprocess.run(
        [*COMMAND, "--root", "memory:///", "--http-port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], "SLATEMQ_S3_EVENTS_TOKEN": "hidden-3f", **secured_files},
    )

    assert ended.returncode == 2
    assert "/s3-events would take its token without TLS from other machines" in ended.stderr
    assert "hidden-3f" not in ended.stderr


@pytest.fixture
def secured_files(tmp_path: Path) -> dict[str, str]:
    return Secured(tmp_path).environ
