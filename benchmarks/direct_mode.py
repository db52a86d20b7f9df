"""What event queues cost an ingest that has none, in processor time: in pairs, turn by turn.

python -m benchmarks.direct_mode [--before COMMIT]

Runs ingests side by side: in direct mode; with settings of event queues that are switched off; of a
commit before there were event queues, when one is given; and with write-through on Redis, where
that is installed. Each turn publishes the same to all of them, in an order that changes. Prints the
processor time of each ingest for a message: the median of the turns, and the median of what it had
more, or less, than direct mode in the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.processor_time import threads_s
from benchmarks.suite import payloads, servers
from benchmarks.suite.event_queues import BACKENDS
from libs.serving.peers.channels import open_channel
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub

SIZE_BYTES = 1024
HEADERS = {"type": "order", "region": "eu"}
DIRECT = "direct mode"


@dataclass(frozen=True, slots=True)
class Load:
    """One way of publishing: `callers` at once, `batch` messages in each call."""

    name: str
    batch: int
    callers: int
    messages: int


LOADS = (Load("single messages", 1, 16, 4_000), Load("batches of 1,000", 1000, 4, 40_000))


@dataclass(slots=True)
class Ingest:
    """A running one, and µs of processor time for a message, by load, turn by turn."""

    name: str
    address: str
    pid: int
    found: dict[str, list[float]] = field(default_factory=dict)

    async def turn(self, load: Load, *, counts: bool) -> None:
        """Publish once."""
        before = sum(threads_s(self.pid).values())
        numbers = iter(range(load.messages // load.batch))
        async with open_channel(self.address) as channel:
            stub = IngestServiceStub(channel)
            await asyncio.gather(*(_publish(stub, load, numbers) for _ in range(load.callers)))
        spent_s = sum(threads_s(self.pid).values()) - before
        if counts:
            self.found.setdefault(load.name, []).append(1e6 * spent_s / load.messages)


async def _publish(stub: Any, load: Load, numbers: Iterator[int]) -> None:
    for number in numbers:
        messages = [
            PublishRun(payloads=[payloads.make(number + at, SIZE_BYTES)], headers=HEADERS)
            for at in range(load.batch)
        ]
        await stub.Publish(PublishRequest(runs=messages))


@contextmanager
def _ingest(
    name: str, folder: Path, settings: dict[str, str], tree: Path = servers.REPOSITORY
) -> Iterator[Ingest]:
    folder.mkdir()
    ready, log = folder / "ready", folder / "log"
    command = [sys.executable, "-m", "services.ingest", "--ready-file", str(ready)]
    command += ["--root", (folder / "data").as_uri(), "--port", "0"]
    with servers.started(command, log, settings, cwd=tree) as process:
        ends_at = time.monotonic() + servers.START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"{name}: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield Ingest(name, json.loads(ready.read_text())["address"], process.pid)


async def measure(ingests: list[Ingest], turns: int, loads: tuple[Load, ...] = LOADS) -> None:
    """All turns; the first one warms up."""
    for turn in range(turns + 1):
        for load in loads:
            at = turn % len(ingests)
            for ingest in ingests[at:] + ingests[:at]:
                await ingest.turn(load, counts=turn > 0)


def lines(ingests: list[Ingest], loads: tuple[Load, ...] = LOADS) -> list[str]:
    """The table."""
    direct = next(one for one in ingests if one.name == DIRECT)
    rows = ["| | µs for a message | more than direct mode: median, quartiles |", "|---|---|---|"]
    for load in loads:
        for ingest in ingests:
            found = ingest.found[load.name]
            more = [one - other for one, other in zip(found, direct.found[load.name], strict=True)]
            low, middle, high = quantiles(more, n=4) if len(more) > 1 else more * 3
            beside = "–" if ingest is direct else f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"
            rows.append(f"| {load.name}, {ingest.name} | {median(found):.2f} | {beside} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.direct_mode", description=__doc__)
    parser.add_argument("--before", metavar="COMMIT", help="one without event queues")
    parser.add_argument("--turns", type=int, default=12, help="12")
    parser.add_argument("--short", action="store_true", help="one turn of few: for CI, no figures")
    given = parser.parse_args()
    loads = (Load("single messages", 1, 4, 40), Load("batches", 100, 1, 200))
    loads, turns = (loads, 1) if given.short else (LOADS, given.turns)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        ingests = [stack.enter_context(_ingest(DIRECT, folder / "direct", {}))]
        off = {"SLATEMQ_QUEUE_ENABLED": "false", "SLATEMQ_QUEUE_BACKEND": "redis"}
        ingests.append(stack.enter_context(_ingest("switched off", folder / "off", off)))
        if given.before:
            tree = stack.enter_context(servers.checkout_of(given.before, folder / "tree"))
            name = f"of {given.before}"
            ingests.append(stack.enter_context(_ingest(name, folder / "before", {}, tree)))
        try:
            place = folder / "redis"
            place.mkdir()
            redis = stack.enter_context(servers.redis(place))
        except servers.NotHere as error:
            print(f"write-through: left out: {error}")
        else:
            settings = BACKENDS["redis streams"].environment(redis.url, "write-through")
            name = "write-through on Redis"
            ingests.append(stack.enter_context(_ingest(name, folder / "events", settings)))
        asyncio.run(measure(ingests, turns, loads))
    print("\n".join(lines(ingests, loads)))


if __name__ == "__main__":
    main()
