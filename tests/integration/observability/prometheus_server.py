"""A real Prometheus that scrapes a stack every second, with the rules shortened to match."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from services.stack.ports import choose_ports
from tests.integration.observability.alert_rules import RULES, program

START_S = 60.0
LOOK_S = 0.25
WINDOW = "10s"
"""In place of the windows of the rules and dashboards: ten scrapes."""

WINDOWS = re.compile(r"(?<=\[)(\$__rate_interval|\d+[mhd])(?=\])|(?<= offset )\d+[mhd]")
YOUNG = re.compile(r"(?<=process_uptime_seconds < )\d+")

BOUNDS = {
    "SlateMQCompactionBehind": (0.75, 0.05),
    "SlateMQEventsLate": (60_000, 3_000),
    "SlateMQPushesWait": (300, 3),
    "SlateMQQueueOld": (900, 5),
    "SlateMQRoutingLag": (60, 3),
}
"""In place of the times and tables that these alerts compare with."""


TARGETS = "targets.json"


def targets_of(addresses: Iterable[tuple[str, str]]) -> str:
    """The file of targets for these services and addresses; a standby is one of its service."""
    return json.dumps(
        [
            {"targets": [address], "labels": {"service": service.removesuffix("-standby")}}
            for service, address in addresses
        ]
    )


class Prometheus:
    def __init__(self, port: int, targets: Path) -> None:
        """At a port of loopback, with the file of its targets."""
        self._url = f"http://127.0.0.1:{port}"
        self._targets = targets

    def scrape(self, addresses: Iterable[tuple[str, str]]) -> None:
        """Have it scrape these services and no others, as when pods have come or gone."""
        new = self._targets.with_suffix(".new")
        new.write_text(targets_of(addresses))
        new.replace(self._targets)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now. Raises AssertionError for one that is wrong."""
        asked = urllib.parse.urlencode({"query": expression})
        found: list[dict[str, Any]] = self._get(f"/api/v1/query?{asked}")["result"]
        return found

    def firing(self) -> set[tuple[str, str]]:
        """Alerts that fire now, each with its queue or service."""
        return {
            (labels["alertname"], labels.get(QUEUE) or labels.get("service") or "")
            for one in self._get("/api/v1/alerts")["alerts"]
            if one["state"] == "firing"
            for labels in [one["labels"]]
        }

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            fields = json.load(answer)
        assert fields["status"] == "success", fields
        return fields["data"]


QUEUE = "messaging_destination_name"


@contextmanager
def prometheus(
    folder: Path, addresses: Mapping[str, str], ca: Path | None = None
) -> Iterator[Prometheus]:
    """One that scrapes these services, and evaluates the rules without their delays.

    With `ca`, it scrapes by TLS.
    """
    command = program("prometheus")
    folder.mkdir()
    (folder / "rules.yaml").write_text(_shortened())
    (folder / TARGETS).write_text(targets_of(addresses.items()))
    tls = {"scheme": "https", "tls_config": {"ca_file": str(ca)}} if ca is not None else {}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                **tls,
                "job_name": "slatemq",
                "file_sd_configs": [{"files": [TARGETS], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = choose_ports(None, ["prometheus"])["prometheus"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                command,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(port, folder / TARGETS)
        eventually(server.is_ready, START_S, lambda: (folder / "log").read_text()[-2000:])
        yield server
    finally:
        process.terminate()
        process.wait(30)


def eventually(
    come_about: Callable[[], object], seconds: float, why: Callable[[], object] = lambda: ""
) -> None:
    """Look until something has come about; `why` says what is missing."""
    end = time.monotonic() + seconds
    while not come_about():
        assert time.monotonic() < end, f"not within {seconds:g} s: {why()}"
        time.sleep(LOOK_S)


def _shortened() -> str:
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
            rule["expr"] = shortened(rule["expr"])
            if bounds := BOUNDS.get(rule.get("alert", "")):
                long, short = (f"> {bound}" for bound in bounds)
                assert rule["expr"].endswith(long)
                rule["expr"] = rule["expr"].removesuffix(long) + short
    return yaml.safe_dump(rules)


def shortened(expression: str) -> str:
    """The expression over windows that a short run fills."""
    expression = YOUNG.sub(WINDOW.removesuffix("s"), WINDOWS.sub(WINDOW, expression))
    return expression.replace("$queue", ".*").replace("$namespace", ".*")
