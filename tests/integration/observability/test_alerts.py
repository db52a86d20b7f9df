"""Each alert fires in its fault, and has a section in the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from tests.integration.observability.alert_rules import (
    FAULTS,
    RULES,
    RUNBOOK,
    alert_of,
    alerts,
    program,
    rule_tests,
)

STAGING = ("test_prometheus.py", "test_store_alerts.py", "test_certificate_alerts.py")
STAGED = [Path(__file__).with_name(name) for name in STAGING]

PARTS = ("It means", "Look", "Do", "It ends", "Never")


def test_each_alert_is_quiet_and_fires_in_its_fault(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rule_tests()))

    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert {*map(alert_of, FAULTS)} == set(alerts())
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_in_a_fault_of_a_real_stack_too() -> None:
    staged = "".join(file.read_text(encoding="utf-8") for file in STAGED)

    assert [name for name in alerts() if f'"{name}"' not in staged] == []


def test_prometheus_accepts_the_rules() -> None:
    check = [program("promtool"), "check", "rules", "--lint-fatal", str(RULES)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_section_in_the_runbook_and_each_section_an_alert() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    texts = {text.partition("\n")[0]: text for text in sections}

    assert list(texts) == list(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert [part for part in PARTS if f"**{part}**" not in texts[name]] == []
