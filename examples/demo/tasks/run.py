"""The demo of tasks: the backend, the stack on it, what happens, and the table."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from examples.demo.stack import DemoStack
from examples.demo.tasks.judge import drop_delivery, judge_tasks
from examples.demo.tasks.report import show_tasks_table, tasks_as_json
from examples.demo.tasks.script import Report, play_tasks
from examples.demo.tasks.servers import RedisServer, SlatemqServer, TaskServer

SERVERS: Mapping[str, Callable[[Path], TaskServer]] = {
    "redis": RedisServer,
    "slatemq": SlatemqServer,
}

NAMES = {"redis": "Redis", "slatemq": "the other SlateMQ"}


def show_tasks(
    folder: Path,
    backend: str,
    is_secured: bool,
    lines: Sequence[bytes],
    words: Console,
    report: Report,
    is_json: bool,
    is_sabotaged: bool,
) -> int:
    """Run it; returns the exit code. Raises StackFailed."""
    began = time.monotonic()
    name = NAMES[backend]
    with SERVERS[backend](folder / "backend") as server:
        config = folder / "slatemq.yaml"
        queue = {"enabled": True, "backend": backend, "consistency": "async"}
        # JSON is YAML.
        config.write_text(json.dumps({"queue": {**queue, backend: server.settings}}, indent=2))
        report(f"{name} runs: the backend of the tasks")
        with DemoStack(folder / "stack", config, is_secured) as stack:
            report(f"ingest, router and broker serve at {stack.endpoint}")
            played = asyncio.run(play_tasks(stack, server, name, lines, report))
            report("each message has arrived: stopping")
    deliveries = played.deliveries
    if is_sabotaged:
        deliveries = drop_delivery(deliveries)
        report("sabotage: one delivery is gone from the notes")
    verdict = judge_tasks(played.answers, played.outcomes, deliveries)
    seconds = time.monotonic() - began
    if is_json:
        print(tasks_as_json(verdict, backend, seconds))
    else:
        show_tasks_table(words, verdict, backend, seconds)
    return 1 if verdict.faults else 0
