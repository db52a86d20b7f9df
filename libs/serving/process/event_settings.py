"""The `queue` section in the settings of a process; without one, nothing of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.events.settings import QueueSettings

VARIABLES: Final = "SLATEMQ_QUEUE_"

TASKS_BUILT: Final = frozenset({"kafka", "rabbitmq", "redis", "slatemq"})
"""The values of `queue.backend` that carry publishes as tasks: what is tested from end to end."""


def read_queue_settings(file: str, environ: Mapping[str, str]) -> QueueSettings | None:
    """The `queue` section of a YAML file, overridden by the environment; None in direct mode.

    Raises InvalidArgument that names the key.
    """
    if not file and not any(name.startswith(VARIABLES) for name in environ):
        return None
    # Loaded when asked for: it brings msgspec and a reader of YAML, which direct mode never has.
    module = import_module("libs.events.settings")
    settings: QueueSettings = module.read_settings(Path(file) if file else None, environ)
    if not settings.enabled:
        return None
    if settings.consistency in ("async", "sync") and settings.backend not in TASKS_BUILT:
        raise InvalidArgument(
            "queue.backend",
            f"must be one of {', '.join(sorted(TASKS_BUILT))} where queue.consistency is "
            f"{settings.consistency}, not {settings.backend}: it carries events only",
        )
    return settings
