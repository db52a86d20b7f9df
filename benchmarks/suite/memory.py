"""How much memory processes take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

LAUNCHER = "launcher"


def _mb(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1000


def resident_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """What each service has resident now, in MB."""
    return {name: _mb(pid, "VmRSS") for name, pid in pids.items() if name != LAUNCHER}


def peak_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """The most that each service had resident since its start, in MB."""
    return {name: _mb(pid, "VmHWM") for name, pid in pids.items() if name != LAUNCHER}
