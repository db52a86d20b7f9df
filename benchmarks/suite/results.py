"""What a run measured: every number of every turn, medians, ratios, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
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
    machine: str = ""
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
        items = [f"{system}: {text}" for system, text in self.settings.items()]
        items += [f"{system}: left out: {why}" for system, why in self.left_out.items()]
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
                items.append(f"{workload:7} {what:34} {'  '.join(parts)}")
        return items

    def write(self, path: Path) -> None:
        """As JSON."""
        fields = {
            "command": self.command,
            "machine": self.machine,
            "settings": self.settings,
            "left_out": self.left_out,
            "chosen": self.chosen,
            "counted": self.counted,
            "numbers": self.numbers,
            "failures": self.failures,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine() -> str:
    """What it is measured on, and when, in a line."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{os.cpu_count()} cores, {pages / 2**30:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def read(paths: Sequence[Path]) -> Results:
    """The results of earlier runs, put together; each system's numbers in the order of the runs."""
    whole = Results()
    commands = []
    for path in paths:
        fields = json.loads(path.read_text(encoding="utf-8"))
        commands.append(fields["command"])
        whole.machine = whole.machine or fields["machine"]
        whole.settings |= fields["settings"]
        whole.left_out |= fields["left_out"]
        whole.failures += fields["failures"]
        for workload, by_what in fields["numbers"].items():
            for what, by_system in by_what.items():
                kept = whole.numbers.setdefault(workload, {}).setdefault(what, {})
                for system, values in by_system.items():
                    kept.setdefault(system, []).extend(values)
        for workload, chosen in fields["chosen"].items():
            for system, settings in chosen.items():
                whole.chosen.setdefault(workload, {}).setdefault(system, {}).update(settings)
        for workload, counted in fields["counted"].items():
            whole.counted.setdefault(workload, {}).update(counted)
    whole.command = "` and `".join(dict.fromkeys(commands))
    return whole
