"""docs/reference/settings.md, made from the settings themselves.

`python -m tests.documented_settings` writes the page; tests/unit/test_docs.py holds it to the code.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from libs.serving.process.commit_config import CommitConfig
from libs.serving.process.config import ServingConfig
from libs.serving.process.instance import InstanceSettings
from libs.serving.process.process_config import MutualTlsConfig, ProcessConfig
from libs.serving.process.settings import (
    Setting,
    flag_of,
    has_flag,
    kind_of,
    settings_of,
    variable_of,
)
from services.broker.config import BrokerConfig
from services.console.config import ConsoleConfig
from services.ingest.config import IngestConfig
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from services.scaler.config import ScalerConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/settings.md"

HEAD = """\
# Settings of the services

Each setting is a flag (`--drain-ms`) and an environment variable (`SLATEMQ_DRAIN_MS`). The flag
goes before the variable, and that before the default. A secret has the variable alone, since every
user of the machine can read the words of a command. `python -m services.broker --help` shows the
same. A wrong one ends the process with exit code 2 and names itself.

Every process knows the variables of the others, so all can share one environment file. A variable
that begins with `SLATEMQ_` and that none of them knows is named in a warning at the start. What
Kubernetes sets for a Service called `slatemq` or `slatemq-…` is ignored.

This page is written by `python -m tests.documented_settings`; a test compares it with the code.
"""

INSTANCE = """\
All processes have these alike: they are one record at the root, which each process reads at its
start. A flag or a variable states the value for a new instance; from then on it has to agree with
the record, or the process ends with exit code 2. `slatemq instance set` changes them:
[how](../how-to/instance.md).
"""

SECTIONS: tuple[tuple[str, str, type], ...] = (
    ("The instance", INSTANCE, InstanceSettings),
    ("Every process", "", ProcessConfig),
    ("Every service, and the scaler", "", MutualTlsConfig),
    ("Every service", "All but the console and the scaler.", ServingConfig),
    ("Every owner of a shard", "Ingests and brokers.", CommitConfig),
    ("Ingest", "", IngestConfig),
    ("Broker", "", BrokerConfig),
    ("Router", "", RouterConfig),
    ("Janitor", "", JanitorConfig),
    ("Console", "", ConsoleConfig),
    ("Scaler", "", ScalerConfig),
)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, text, holder in SECTIONS:
        above = _rows_above(holder)
        rows = "\n".join(one for one in map(row, settings_of(holder)) if one not in above)
        head = f"## {title}\n\n{text.rstrip()}\n\n" if text else f"## {title}\n\n"
        parts.append(f"{head}| flag | variable | default | what |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _rows_above(holder: type) -> set[str]:
    """What it inherits as it is from the holders of other sections."""
    bases = [base for _, _, base in SECTIONS if base is not holder and issubclass(holder, base)]
    return {row(field) for base in bases for field in settings_of(base)}


def row(field: dataclasses.Field[Any]) -> str:
    """The line of a setting in the table of its section."""
    described: Setting = field.metadata["setting"]
    text = described.text.replace("|", "\\|")
    if described.choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in described.choices) + "."
    if described.minimum is not None or described.maximum is not None:
        text += f" {_bounds(described)}."
    name = field.name
    flag = f"`{flag_of(name)}`" if has_flag(field) else "none"
    return f"| {flag} | `{variable_of(name)}` | {_default(field)} | {text} |"


def _bounds(described: Setting) -> str:
    if described.maximum is None:
        return f"At least {described.minimum:,}"
    return f"{described.minimum or 0:,} to {described.maximum:,}"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default == "":
        return "empty"
    return f"{field.default:,}" if kind_of(field) is int else f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
