"""Many seeds, each in a process of its own; and what is left of a world that broke a rule."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

LIMIT_S: Final = 3600
"""After this a world hangs within one step: it ends by itself after too many steps."""


COUNTED: Final = ("seed", "steps", "violation", "published", "delivered", "events", "checks")
"""The facts of a world that a tally has."""


class Settings(NamedTuple):
    """What all worlds of a run have in common; see `tests.simulation.__main__`."""

    messages: int
    mishaps: float


class NoVerdict(Exception):
    """A world broke or hung, which says nothing of the rules."""


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
    """The facts of one world, as `Verdict.line` prints them. Raises NoVerdict.

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
        raise NoVerdict(f"seed {seed} hangs: it is not over after {LIMIT_S} s") from None
    except (IndexError, ValueError):
        raise NoVerdict(f"seed {seed} broke: {ended.stderr.strip()[-2000:]}") from None
    return facts


def rule_of(violation: str) -> str:
    """What was broken, without the queue, message, time and counts with which it was."""
    lines = violation.splitlines()
    if len(lines) > 1:  # A fault with its traceback.
        violation = f"{violation.partition(': ')[0]}: {lines[-1]}"
    rule = re.sub(r"^\w+ (?=(delivers|leases|gives|has) )", "a queue ", violation)
    rule = re.sub(r"^(broker-)[\d.]+: \w+", r"\1…", rule)
    return re.sub(r"b'[^']*'|'[^']*'|[\[{(].*[\]})]|\d[\d.,]*", "…", rule)


def run_seeds(
    seeds: Sequence[str], settings: Settings, at_once: int, tally: Path | None = None
) -> int:
    """Run all worlds, `at_once` at a time, and shrink what fails; returns the exit code.

    Each world that is over adds a line to the file `tally`, so that many runs can be counted.
    """
    began_s, steps, broken, unjudged = time.monotonic(), 0, [], 0
    with ThreadPoolExecutor(at_once) as threads:
        for facts in threads.map(partial(_facts_of, settings=settings), seeds):
            if isinstance(facts, NoVerdict):
                unjudged += 1
                print(facts, flush=True)
                continue
            steps += facts["steps"]
            if tally is not None:
                count_world(tally, facts, settings)
            if facts["violation"]:
                broken.append(facts)
            said = f"seed {facts['seed']}: {facts['violation'] or 'ok'}, {facts['steps']:,} steps"
            print(said, flush=True)
    for facts in broken:
        tell_least(facts, settings)
    seconds = time.monotonic() - began_s
    counts = f"{len(broken)} broken, {unjudged} without a verdict"
    print(f"{len(seeds)} worlds, {steps:,} steps, {counts}, {seconds:.0f} s")
    return 1 if broken or unjudged else 0


def count_world(tally: Path, facts: Mapping[str, Any], settings: Settings) -> None:
    line = {name: facts[name] for name in COUNTED} | settings._asdict()
    with tally.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def total(tally: Path) -> str:
    """What a tally comes to, in words."""
    worlds = [json.loads(line) for line in tally.read_text().splitlines()]
    steps = sum(world["steps"] for world in worlds)
    broken = sum(bool(world["violation"]) for world in worlds)
    return f"{len(worlds)} worlds, {steps:,} steps, {broken} broken"


def _facts_of(seed: str, settings: Settings) -> dict[str, Any] | NoVerdict:
    try:
        return run_seed(seed, settings)
    except NoVerdict as error:
        return error


def tell_least(facts: dict[str, Any], settings: Settings) -> None:
    """Print the story of the world with as few mishaps as still break that rule."""
    without = shrunk(facts, settings)
    if without:
        facts = run_seed(facts["seed"], settings, without)
    command = command_of(facts["seed"], settings, without)
    print(f"\nseed {facts['seed']}, with the fewest mishaps: {' '.join(command[1:])}")
    print("\n".join(facts["story"]))
    print(facts["violation"])


def shrunk(facts: Mapping[str, Any], settings: Settings) -> list[int]:
    """The mishaps without which a world still breaks its rule: halves first, then one by one."""
    seed, mishaps, rule = facts["seed"], facts["mishaps"], rule_of(facts["violation"])
    without: list[int] = []
    size = len(mishaps)
    while size:
        left = [number for number in mishaps if number not in without]
        for begin in range(0, len(left), size):
            tried = without + left[begin : begin + size]
            with suppress(NoVerdict):  # Another fault than the one that is looked for.
                if rule_of(run_seed(seed, settings, tried)["violation"]) == rule:
                    without = tried
        size //= 2
    return sorted(without)
