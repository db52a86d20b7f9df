"""What a run measured: every number of every turn, medians, ratios, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.suite.workloads import Measured

OURS = "slatemq"
LOWER_IS_BETTER = (" ms", "MB", " s ", " s,", "bytes", "objects", "$", "PUTs", "requests")


def is_lower_better(what: str) -> bool:
    """Whether less of it is better: times, sizes, costs."""
    return any(mark in f"{what} " for mark in LOWER_IS_BETTER)


@dataclass(slots=True)
class Results:
    """`numbers`: by workload, by what, by system, one for each turn."""

    command: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    chosen: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    counted: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, workload: str, system: str, measured: Measured) -> None:
        """Keeps the numbers of one turn, and the variant that gave them."""
        for what, number in measured.numbers.items():
            by_system = self.numbers.setdefault(workload, {}).setdefault(what, {})
            by_system.setdefault(system, []).append(number)
        self.chosen.setdefault(workload, {})[system] = measured.settings
        self.counted.setdefault(workload, {})[system] = measured.counted

    def medians(self, workload: str) -> dict[str, dict[str, float]]:
        """By what and system."""
        return {
            what: {system: statistics.median(values) for system, values in by_system.items()}
            for what, by_system in self.numbers.get(workload, {}).items()
        }

    def ratio(self, what: str, medians: dict[str, float], system: str) -> float | None:
        """How much better ours is than this one: over 1 is better, whatever is measured."""
        ours, other = medians.get(OURS), medians.get(system)
        if not ours or not other or system == OURS:
            return None
        return other / ours if is_lower_better(what) else ours / other

    def lines(self) -> list[str]:
        """A line for each thing measured, with the ratios to ours."""
        told = [f"{system}: {text}" for system, text in self.settings.items()]
        told += [f"{system}: left out: {why}" for system, why in self.left_out.items()]
        for workload in self.numbers:
            for what, medians in self.medians(workload).items():
                parts = []
                for system, value in medians.items():
                    ratio = self.ratio(what, medians, system)
                    parts.append(
                        f"{system} {value:,.4g}" + (f" (×{ratio:.2f})" if ratio else "")
                        if value < 1000
                        else f"{system} {value:,.0f}" + (f" (×{ratio:.2f})" if ratio else "")
                    )
                told.append(f"{workload:7} {what:34} {'  '.join(parts)}")
        return told

    def write(self, path: Path) -> None:
        """As JSON."""
        told = {
            "command": self.command,
            "at": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "settings": self.settings,
            "left_out": self.left_out,
            "chosen": self.chosen,
            "counted": self.counted,
            "numbers": self.numbers,
            "failures": self.failures,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> Results:
    """The results of an earlier run."""
    told = json.loads(path.read_text(encoding="utf-8"))
    names = ("command", "settings", "left_out", "numbers", "chosen", "counted", "failures")
    return Results(**{name: told[name] for name in names})
