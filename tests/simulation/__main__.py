"""`python -m tests.simulation`: simulated worlds, each the consequence of its seed.

    python -m tests.simulation --seeds 20         worlds 1 to 20, as many at a time as processors
    python -m tests.simulation --seed 7 --story   one of them, with all that happened
    python -m tests.simulation --seeds 500 --tally worlds.jsonl; … --total worlds.jsonl

A world that breaks a rule is run again with ever fewer mishaps; what is left is printed with its
story, and the command that shows it again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

from tests.simulation import chance
from tests.simulation.seeds import Settings, run_seeds, total


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, help="Run worlds 1 to this.")
    parser.add_argument("--first", type=int, default=1, help="Begin with this one instead.")
    parser.add_argument("--seed", help="Run this world alone.")
    parser.add_argument(
        "--at-once", type=int, default=os.cpu_count() or 1, help="Worlds that run at a time."
    )
    parser.add_argument("--messages", type=int, default=100, help="Messages of each producer.")
    parser.add_argument("--mishaps", type=float, default=1.0, help="Mishaps a second.")
    parser.add_argument("--without", default="", help="Mishaps to leave out, such as 3,8.")
    parser.add_argument("--tally", type=Path, help="Add a line for each world to this file.")
    parser.add_argument("--total", type=Path, help="Say what a tally comes to, and run nothing.")
    parser.add_argument("--story", action="store_true", help="Print what happened.")
    parser.add_argument("--trace", type=Path, help="Write each step to this file.")
    parser.add_argument("--log", default="CRITICAL", help="Level of the logs to print.")
    options = parser.parse_args()
    if options.total is not None:
        print(total(options.total))
        return
    settings = Settings(options.messages, options.mishaps)
    if options.seed is None:
        seeds = range(options.first, options.first + (options.seeds or 1))
        names = [str(seed) for seed in seeds]
        sys.exit(run_seeds(names, settings, options.at_once, options.tally))
    _log(options.log)
    without = [int(number) for number in options.without.split(",") if number]
    _run(options.seed, settings, without, is_told=options.story, trace=options.trace)


def _log(level: str) -> None:
    """Print what is at this level; errors reach the world's judge whatever it is."""
    shown = logging.StreamHandler()
    shown.setLevel(level)
    logging.basicConfig(
        level=min(shown.level, logging.ERROR), format="%(name)s %(message)s", handlers=[shown]
    )


def _run(
    seed: str, settings: Settings, without: list[int], *, is_told: bool, trace: Path | None
) -> None:
    chance.install(seed)
    # A collection would free what ended with its machine, and run its `finally`.
    gc.disable()
    from tests.simulation.run import World  # What it loads takes its clocks from `chance`.

    world = World(seed, settings.messages, settings.mishaps, without)
    if trace is not None:
        world.trace = trace.open("w")
    verdict = world.run()
    if is_told:
        print("\n".join(verdict.story))
    print(verdict.line())
    sys.stdout.flush()
    if world.trace is not None:
        world.trace.close()
    # Without the end of a process: what is left of tasks must not run now.
    os._exit(1 if verdict.violation else 0)


if __name__ == "__main__":
    main()
