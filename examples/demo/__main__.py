"""`make demo`: see `python -m examples.demo --help`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from examples.demo.judge import compare_dead_letters, drop_one, judge
from examples.demo.queues import QUEUES
from examples.demo.report import as_json, show
from examples.demo.script import play
from examples.demo.stack import DemoStack, StackFailed, demo_folder
from examples.demo.tasks.run import SERVERS, show_tasks

EVENTS_FILE = Path(__file__).parents[1] / "events.jsonl"

Report = Callable[[str], None]

DESCRIPTION = """\
Starts SlateMQ on a temporary folder, publishes a shop's events through three queues with
overlapping filters to competing consumers that sometimes fail, and kills the broker half-way.
Then a judge, who knows only the events and what the consumers wrote down, says what was lost or
routed wrongly: exit code 0 if nothing was, else 1.

With --events publishes are answered by a queue backend and stored afterwards (queue.consistency:
async). The ingest is killed while they go on, then the backend. The judge says what was lost or
stored twice. What a killed ingest had taken may come again only after 30 s.

With --secured, either runs with TLS among all processes, and with a token."""


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
    parser.add_argument(
        "--events", action="store_true", help="show publishes that a queue backend answers"
    )
    parser.add_argument(
        "--secured", action="store_true", help="with TLS, and a policy that asks for a token"
    )
    parser.add_argument(
        "--backend",
        choices=sorted(SERVERS),
        help="of --events: redis where redis-server is installed, else slatemq, unless given",
    )
    given = parser.parse_args()
    if given.messages is not None and given.messages < 1:
        parser.error("--messages must be at least 1")
    if given.backend and not given.events:
        parser.error("--backend goes with --events")
    given.backend = given.backend or ("redis" if shutil.which("redis-server") else "slatemq")
    return given


def main() -> int:
    """Run the demo; returns the exit code."""
    given = _parse()
    # As Ctrl-C: what was started is ended first.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Consumers forget messages on purpose, and services are killed: the judge reports what matters.
    logging.getLogger("slatemq").setLevel(logging.ERROR)
    words = Console(stderr=given.json)
    began = time.monotonic()

    def report(line: str) -> None:
        words.print(
            f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {line}", highlight=False, soft_wrap=True
        )

    lines = EVENTS_FILE.read_bytes().splitlines()[: given.messages]
    try:
        with demo_folder(given.keep) as folder:
            if given.keep:
                report(f"data and logs are in {folder}")
            if given.events:
                return show_tasks(
                    folder,
                    given.backend,
                    given.secured,
                    lines,
                    words,
                    report,
                    given.json,
                    given.sabotage,
                )
            stack = DemoStack(folder, is_secured=given.secured)
            return _show_queues(stack, lines, words, report, given.json, given.sabotage)
    except StackFailed as error:
        words.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _show_queues(
    stack: DemoStack,
    lines: Sequence[bytes],
    words: Console,
    report: Report,
    is_json: bool,
    is_sabotaged: bool,
) -> int:
    began = time.monotonic()
    with stack:
        report(f"ingest, router and broker serve at {stack.endpoint}")
        played = asyncio.run(play(stack, lines, report))
        report("all queues are empty: stopping")
    deliveries = played.deliveries
    if is_sabotaged:
        deliveries = drop_one(deliveries)
        report("sabotage: one delivery is gone from the notes")
    verdict = judge(lines, QUEUES, deliveries)
    compare_dead_letters(verdict, played.dead_letters)
    seconds = time.monotonic() - began
    if is_json:
        print(as_json(verdict, seconds))
    else:
        show(words, verdict, seconds)
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
