"""docs/reference/settings.md, made from the settings themselves.

`python -m tests.documented_settings` writes the page; tests/unit/test_docs.py holds it to the code.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from libs.serving.process.config import (
    ENVIRONMENT_PREFIX,
    Scope,
    ServingConfig,
    Setting,
    kind_of,
    settings_of,
)
from services.broker.config import BrokerConfig
from services.ingest.config import IngestConfig
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/settings.md"

HEAD = """\
# Settings of the services

Each setting is a flag (`--drain-ms`) and an environment variable (`SLATEMQ_DRAIN_MS`). The flag
goes before the variable, and that before the default. `python -m services.broker --help` tells the
same. A wrong one ends the process with exit code 2 and names itself. **Instance** means: the same
for all processes, for the life of the instance; the others may differ per process.

Every process knows the variables of the others, so all can share one environment file. A variable
that begins with `SLATEMQ_` and that none of them knows is named in a warning at the start. What
Kubernetes sets for a Service called `slatemq` or `slatemq-…` is ignored.

This page is written by `python -m tests.documented_settings`; a test compares it with the code.
"""

SECTIONS = (
    ("Every service", ServingConfig),
    ("Ingest", IngestConfig),
    ("Broker", BrokerConfig),
    ("Router", RouterConfig),
    ("Janitor", JanitorConfig),
)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    common = {field.name for field in settings_of(ServingConfig)}
    for title, config in SECTIONS:
        shown = [
            field
            for field in settings_of(config)
            if config is ServingConfig or field.name not in common
        ]
        rows = "\n".join(_row(field) for field in shown)
        parts.append(
            f"## {title}\n\n| flag | variable | default | what |\n|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _row(field: dataclasses.Field[Any]) -> str:
    told: Setting = field.metadata["setting"]
    text = told.text.replace("|", "\\|")
    if told.choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in told.choices) + "."
    if told.minimum is not None or told.maximum is not None:
        text += f" {_bounds(told)}."
    if told.scope is Scope.INSTANCE:
        text += " **Instance.**"
    flag = "--" + field.name.replace("_", "-")
    variable = ENVIRONMENT_PREFIX + field.name.upper()
    return f"| `{flag}` | `{variable}` | {_default(field)} | {text} |"


def _bounds(told: Setting) -> str:
    if told.maximum is None:
        return f"At least {told.minimum:,}"
    return f"{told.minimum or 0:,} to {told.maximum:,}"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default == "":
        return "empty"
    return f"{field.default:,}" if kind_of(field) is int else f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
