"""Dashboards and rules are those of their catalogues, and name metrics that there are."""

from __future__ import annotations

import json
import re

import yaml

from tests.acceptance.compose_project import HTTP_PORTS
from tests.dashboards import FOLDER, RULE, files, panels
from tests.integration.observability.alert_rules import (
    CALM,
    FAULTS,
    RULES,
    alerts,
    recordings,
)
from tests.unit.test_metrics import instruments

METRIC = re.compile(r"\b(?:slatemq|messaging|rpc|process|http)_[a-z_]+")
NOT_METRICS = re.compile(r"\{[^}]*\}|\"[^\"]*\"|\b(?:by|on|without|ignoring)\s*\([^)]*\)")

SUFFIXES = re.compile(r"(_(seconds|milliseconds|bytes))?(_(total|bucket|sum|count))?$")


def metrics_in(expression: str) -> set[str]:
    """The metrics that an expression reads, by the names that they have in Prometheus."""
    return set(METRIC.findall(NOT_METRICS.sub("", expression)))


def test_dashboards_and_rules_are_those_of_their_catalogues() -> None:
    for path, text in files():
        assert path.read_text(encoding="utf-8") == text, "run python -m tests.dashboards"
    assert {path for path, _ in files()} == {RULE, *(FOLDER / "dashboards").iterdir()}
    rule = yaml.safe_load(RULE.read_text(encoding="utf-8"))
    assert rule["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))


def test_each_panel_asks_the_prometheus_that_is_chosen_on_the_page() -> None:
    for path in (FOLDER / "dashboards").iterdir():
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        variables = {one["name"]: one for one in dashboard["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource"
        assert variables["datasource"]["query"] == "prometheus"
        sources = re.findall(r'"uid": "([^"]+)"', path.read_text(encoding="utf-8"))
        assert set(sources) == {dashboard["uid"], "${datasource}"}


def test_each_curve_is_of_the_namespace_that_is_chosen_on_the_page() -> None:
    chosen = re.compile(r'[\w:]+\{namespace=~"\$namespace"[^}]*\}')
    for path in (FOLDER / "dashboards").iterdir():
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        variables = {one["name"]: one for one in dashboard["templating"]["list"]}
        # Also where no target has the label
        assert (variables["namespace"]["current"]["text"], variables["namespace"]["allValue"]) == (
            "All",
            ".*",
        )
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                left = chosen.sub("", target["expr"])
                assert metrics_in(left) == set(), target["expr"]
                assert not re.search(r"\bup\b|slatemq:", left), target["expr"]


def test_a_curve_with_labels_has_a_nameless_zero_only_where_it_has_nothing_else() -> None:
    for _, panel in panels():
        for legend, expression in panel["curves"].items():
            if "{{" in legend:
                assert not re.search(r"\bor vector\(", expression), legend


def test_panels_and_alerts_name_metrics_that_there_are() -> None:
    there = {name.replace(".", "_") for name in instruments()}
    expressions = [expression for _, panel in panels() for expression in panel["curves"].values()]
    expressions += [rule["expr"] for rule in (*alerts().values(), *recordings())]
    expressions += [series for fault in FAULTS.values() for series in fault.series]
    expressions += [series for calm in CALM.values() for series in calm.series]

    named = set().union(*map(metrics_in, expressions))

    assert len(named) > 40
    assert {
        name for name in named if name not in there and SUFFIXES.sub("", name) not in there
    } == set()


def test_prometheus_scrapes_every_service_of_the_compose_file() -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scraped["scrape_configs"]

    assert job["job_name"] == "slatemq"
    assert {one["labels"]["service"]: one["targets"] for one in job["static_configs"]} == {
        service: [f"127.0.0.1:{port}"] for service, port in HTTP_PORTS.items()
    }
