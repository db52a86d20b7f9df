"""Writes what deploy/observability is a catalogue of: `python -m tests.dashboards`.

Grafana's dashboards of panels.yaml, and a PrometheusRule for Kubernetes of alerts.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy/observability"
CATALOGUE: Final = FOLDER / "panels.yaml"
ALERTS: Final = FOLDER / "alerts.yaml"
RULE: Final = FOLDER.parent / "kubernetes/components/metrics/rules.yaml"

COLUMNS: Final = 24
"""Grafana's grid."""

WIDTH, HEIGHT = 6, 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
"""Chosen on the page: a Grafana has its Prometheus under an ID of its own."""


_SELECTOR: Final = re.compile(
    r"\b(?:by|on) \([^)]*\)"  # what has labels without a metric
    r"|(?P<metric>\b(?:(?:slatemq|messaging|rpc|process|http)_|slatemq:|up\b)[\w:]*)"
    r"(?:\{(?P<labels>[^}]*)\})?"
)


def of_namespace(expression: str) -> str:
    """The expression over the instances of the chosen namespace."""

    def chosen(found: re.Match[str]) -> str:
        if found["metric"] is None:
            return found[0]
        labels = f", {found['labels'].strip()}" if found["labels"] else ""
        return f'{found["metric"]}{{namespace=~"$namespace"{labels}}}'

    return _SELECTOR.sub(chosen, expression)


def catalogue() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    return loaded


def panels() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each panel, with the name of its dashboard."""
    for name, dashboard in catalogue().items():
        for row in dashboard["rows"].values():
            for panel in row:
                yield name, panel


def files() -> Iterator[tuple[Path, str]]:
    """The files, and what belongs into them."""
    for name, dashboard in catalogue().items():
        text = json.dumps(_dashboard(name, dashboard), indent=1)
        yield FOLDER / f"dashboards/slatemq-{name}.json", text + "\n"
    yield RULE, _rule()


def _rule() -> str:
    """The alerts as the Prometheus operator takes them."""
    spec = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "slatemq"},
        "spec": spec,
    }
    text = yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=100)
    return f"# Made of deploy/observability/alerts.yaml: python -m tests.dashboards\n{text}"


def _dashboard(name: str, dashboard: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "uid": f"slatemq-{name}",
        "title": dashboard["title"],
        "tags": ["slatemq"],
        "timezone": "browser",
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "links": [{"type": "dashboards", "title": "SlateMQ", "tags": ["slatemq"]}],
        "templating": {"list": [_SOURCES, _NAMESPACES, *([_QUEUES] if name == "overview" else [])]},
        "panels": list(_laid_out(dashboard["rows"])),
    }


_SOURCES: Final = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
}

_NAMESPACES: Final = {
    "name": "namespace",
    "type": "query",
    "datasource": SOURCE,
    "query": 'label_values(up{job="slatemq"}, namespace)',
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",  # which those without one match, too
    "current": {"text": "All", "value": "$__all"},
}

_QUEUES: Final = {
    **_NAMESPACES,
    "name": "queue",
    "query": f"label_values({of_namespace('slatemq_queue_messages')}, messaging_destination_name)",
}


def _laid_out(rows: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    number = top = 0
    for title, row in rows.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": (number := number + 1), "type": "row", "title": title, "gridPos": place}
        top += 1
        for at, panel in enumerate(row):
            left, down = at * WIDTH % COLUMNS, at * WIDTH // COLUMNS * HEIGHT
            place = {"x": left, "y": top + down, "w": WIDTH, "h": HEIGHT}
            yield {"id": (number := number + 1), "gridPos": place, **_panel(panel)}
        top += -(-len(row) * WIDTH // COLUMNS) * HEIGHT


def _panel(panel: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": panel["text"],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": of_namespace(expr),
                "legendFormat": legend,
            }
            for at, (legend, expr) in enumerate(panel["curves"].items())
        ],
    }


def main() -> None:
    for path, text in files():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
