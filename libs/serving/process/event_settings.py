"""The `queue` section in the settings of a process; without one, nothing of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from libs.events.settings import QueueSettings

VARIABLES: Final = "SLATEMQ_QUEUE_"


def read_queue_settings(file: str, environ: Mapping[str, str]) -> QueueSettings | None:
    """The `queue` section of a YAML file, overridden by the environment; None in direct mode.

    Raises InvalidArgument that names the key.
    """
    if not file and not any(name.startswith(VARIABLES) for name in environ):
        return None
    # Loaded when asked for: it brings msgspec and a reader of YAML, which direct mode never has.
    module = import_module("libs.events.settings")
    settings: QueueSettings = module.read_settings(Path(file) if file else None, environ)
    return settings if settings.enabled else None
