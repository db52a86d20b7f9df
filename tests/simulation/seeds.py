"""Many seeds, each in a process of its own; and what is left of a world that broke a rule."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

LIMIT_S: Final = 600
"""How long one world may take."""


class Settings(NamedTuple):
    """What all worlds of a run have in common; see `tests.simulation.__main__`."""

    messages: int
    mishaps: float


_NOTHING: Final = {"steps": 0, "mishaps": [], "story": []}
"""Of a world that did not come to a verdict."""


def command_of(seed: str, settings: Settings, without: Iterable[int] = ()) -> list[str]:
    """The command that runs one world."""
    left_out = ",".join(map(str, without))
    return [
        *(sys.executable, "-m", "tests.simulation", "--seed", seed),
        *("--messages", str(settings.messages), "--mishaps", f"{settings.mishaps:g}"),
        *(("--without", left_out) if left_out else ()),
    ]


def run_seed(
    seed: str,
    settings: Settings,
    without: Iterable[int] = (),
    options: Sequence[str] = (),
    tree: Path | None = None,
) -> dict[str, Any]:
    """The facts of one world, as `Verdict.line` prints them; `violation` where it did not end.

    `tree` has the code to run, in place of this one.
    """
    try:
        ended = subprocess.run(
            [*command_of(seed, settings, without), *options],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=tree,
        )
        facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"seed": seed, "violation": f"not over after {LIMIT_S} s", **_NOTHING}
    except (IndexError, ValueError):
        why = f"it broke: {ended.stderr.strip()[-2000:]}"
        return {"seed": seed, "violation": why, **_NOTHING}
    return facts


def run_seeds(seeds: Sequence[str], settings: Settings, at_once: int) -> int:
    """Run all worlds, `at_once` at a time, and shrink what fails; returns the exit code."""
    began_s, steps, broken = time.monotonic(), 0, []
    with ThreadPoolExecutor(at_once) as threads:
        for facts in threads.map(partial(run_seed, settings=settings), seeds):
            steps += facts["steps"]
            if facts["violation"]:
                broken.append(facts)
            said = f"seed {facts['seed']}: {facts['violation'] or 'ok'}, {facts['steps']:,} steps"
            print(said, flush=True)
    for facts in broken:
        tell_least(facts, settings)
    seconds = time.monotonic() - began_s
    print(f"{len(seeds)} worlds, {steps:,} steps, {len(broken)} broken, {seconds:.0f} s")
    return 1 if broken else 0


def tell_least(facts: dict[str, Any], settings: Settings) -> None:
    """Print the story of the world with as few mishaps as still break a rule."""
    without = shrunk(facts["seed"], settings, facts["mishaps"])
    if without:
        facts = run_seed(facts["seed"], settings, without)
    command = command_of(facts["seed"], settings, without)
    print(f"\nseed {facts['seed']}, with the fewest mishaps: {' '.join(command[1:])}")
    print("\n".join(facts["story"]))
    print(facts["violation"])


def shrunk(seed: str, settings: Settings, mishaps: Sequence[int]) -> list[int]:
    """The mishaps without which the world still breaks a rule: halves first, then one by one."""
    without: list[int] = []
    size = len(mishaps)
    while size:
        left = [number for number in mishaps if number not in without]
        for begin in range(0, len(left), size):
            tried = without + left[begin : begin + size]
            if run_seed(seed, settings, tried)["violation"]:
                without = tried
        size //= 2
    return sorted(without)
