"""The file that says where a process serves, once it does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_ready_file(name: str, addresses: Mapping[str, str]) -> None:
    """Write it whole, so that a waiting reader never sees half of it; an empty name writes none."""
    if not name:
        return
    path = Path(name)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(addresses) + "\n", encoding="utf-8")
    temporary.replace(path)
