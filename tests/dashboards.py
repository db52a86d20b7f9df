"""Writes Grafana's dashboards from their catalogue: `python -m tests.dashboards`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy/observability"
CATALOGUE: Final = FOLDER / "panels.yaml"

COLUMNS: Final = 24
"""Grafana's grid."""

WIDTH, HEIGHT = 6, 8
SOURCE: Final = {"type": "prometheus", "uid": "prometheus"}


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
        "templating": {"list": [_QUEUES] if name == "overview" else []},
        "panels": list(_laid_out(dashboard["rows"])),
    }


_QUEUES: Final = {
    "name": "queue",
    "type": "query",
    "datasource": SOURCE,
    "query": "label_values(slatemq_queue_messages, messaging_destination_name)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
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
                "expr": expr,
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
