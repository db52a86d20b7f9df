"""`make demo`: see `python -m examples.demo --help`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

from rich.console import Console

from examples.demo.judge import compare_dead_letters, drop_one, judge
from examples.demo.queues import QUEUES
from examples.demo.report import as_json, show
from examples.demo.script import play
from examples.demo.stack import DemoStack, StackFailed

EVENTS_FILE = Path(__file__).parents[1] / "events.jsonl"

DESCRIPTION = """\
Starts SlateMQ on a temporary folder, publishes a shop's events through three queues with
overlapping filters to competing consumers that sometimes fail, and kills the broker half-way.
Then a judge, who knows only the events and what the consumers wrote down, says what was lost or
routed wrongly: exit code 0 if nothing was, else 1."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, metavar="N", help="publish only the first N events")
    parser.add_argument("--json", action="store_true", help="end with one JSON object, no table")
    parser.add_argument("--keep", action="store_true", help="leave the data folder, and say where")
    parser.add_argument(
        "--sabotage",
        action="store_true",
        help="drop one delivery from the consumers' notes: the judge must find it missing",
    )
    given = parser.parse_args()
    if given.messages is not None and given.messages < 1:
        parser.error("--messages must be at least 1")
    return given


def main() -> int:
    """Run the demo; returns the exit code."""
    given = _parse()
    # Consumers forget messages on purpose, and the broker is killed: the judge tells what matters.
    logging.getLogger("slatemq").setLevel(logging.ERROR)
    words = Console(stderr=given.json)
    began = time.monotonic()

    def tell(line: str) -> None:
        words.print(f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {line}", highlight=False)

    lines = EVENTS_FILE.read_bytes().splitlines()[: given.messages]
    try:
        with DemoStack(given.keep) as stack:
            tell(f"ingest, router and broker serve at {stack.endpoint}")
            played = asyncio.run(play(stack, lines, tell))
            tell("all queues are empty: stopping")
    except StackFailed as error:
        words.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    if given.keep:
        tell(f"data and logs are in {stack.folder}")
    deliveries = played.deliveries
    if given.sabotage:
        deliveries = drop_one(deliveries)
        tell("sabotage: one delivery is gone from the notes")
    verdict = judge(lines, QUEUES, deliveries)
    compare_dead_letters(verdict, played.dead_letters)
    seconds = time.monotonic() - began
    if given.json:
        print(as_json(verdict, seconds))
    else:
        show(words, verdict, seconds)
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
