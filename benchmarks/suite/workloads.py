"""The workloads, each a way of running worker processes against one system, and what it gives."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.suite.servers import REPOSITORY, Server

_numbers = itertools.count(1)


class Failed(Exception):
    """A workload did not give back what was put in, or a client failed."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of each workload is run."""

    messages: int
    small_messages: int
    singles: int
    paced_seconds: float
    fan_out: int
    depths: tuple[int, ...] = (1, 2, 4)


@dataclass(slots=True)
class Measured:
    """What one run of a workload gave: numbers by name, per second or in ms as the name says."""

    numbers: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)


class Crew:
    """Worker processes that begin together."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._workers: list[subprocess.Popen[str]] = []

    def add(self, role: str, queue: str, count: int, **spec: Any) -> None:
        """Starts one; it waits for `run`."""
        whole = {
            "system": self._server.system,
            "url": self._server.url,
            "role": role,
            "queue": queue,
            "count": count,
            **spec,
        }
        self._workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.suite.worker", json.dumps(whole)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
        )

    def run(self) -> list[dict[str, Any]]:
        """Lets all of them begin once all are connected; gives what each measured."""
        try:
            for worker in self._workers:
                assert worker.stdout is not None
                if worker.stdout.readline().strip() != "ready":
                    raise Failed(f"a client of {self._server.system} could not connect")
            for worker in self._workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            results = []
            for worker in self._workers:
                output, _ = worker.communicate()
                if worker.returncode:
                    raise Failed(f"a client of {self._server.system} ended with an error")
                results.append(json.loads(output.splitlines()[-1]))
            return results
        finally:
            for worker in self._workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()


def new_queue(server: Server, count: int = 1) -> list[str]:
    """Makes queues that nothing else uses; more than one are a fan-out of the first one's topic."""
    number = next(_numbers)
    queues = [f"bench_{number}_{at}" for at in range(count)]
    crew = Crew(server)
    crew.add("prepare", queues[0], 0, queues=queues)
    crew.run()
    return queues


def check(results: Sequence[dict[str, Any]], count: int) -> None:
    """Every message came back whole (the worker has looked), and none is missing."""
    distinct = sum(result["distinct"] for result in results if "distinct" in result)
    if distinct != count:
        raise Failed(f"{distinct} of {count} messages came back")


def in_turn(server: Server, size: int, count: int, depth: int) -> Measured:
    """(a), (b): publish all, then consume and ack all."""
    (queue,) = new_queue(server)
    crew = Crew(server)
    crew.add("publish", queue, count, size=size, depth=depth)
    (published,) = crew.run()
    crew = Crew(server)
    crew.add("consume", queue, count, size=size, depth=depth)
    (consumed,) = crew.run()
    check([consumed], count)
    publish_s = published["ended"] - published["began"]
    consume_s = consumed["ended"] - consumed["began"]
    return Measured(
        {
            "end to end/s": count / (publish_s + consume_s),
            "publish/s": count / publish_s,
            "consume/s": count / consume_s,
        },
        {"depth": depth},
    )


def at_once(server: Server, size: int, count: int, depth: int) -> Measured:
    """(c): publish and consume at the same time."""
    (queue,) = new_queue(server)
    crew = Crew(server)
    crew.add("publish", queue, count, size=size, depth=depth)
    crew.add("consume", queue, count, size=size, depth=depth)
    published, consumed = crew.run()
    check([consumed], count)
    took = consumed["ended"] - min(published["began"], consumed["began"])
    return Measured({"both at once/s": count / took}, {"depth": depth})


def singles(server: Server, count: int, clients: int) -> Measured:
    """(d): many clients, each publishing one message after the other."""
    (queue,) = new_queue(server)
    crew = Crew(server)
    crew.add("publish", queue, count, size=1024, batch=1, clients=clients)
    (published,) = crew.run()
    crew = Crew(server)
    crew.add("consume", queue, count)
    check(crew.run(), count)
    return Measured({"singles/s": count / (published["ended"] - published["began"])})


def latency(server: Server, rate: int, seconds: float) -> Measured:
    """(e): from the publish call to the delivery, at a steady rate."""
    (queue,) = new_queue(server)
    count = int(rate * seconds)
    crew = Crew(server)
    crew.add("paced", queue, count, size=1024, rate=rate)
    crew.add("consume", queue, count, batch=100, latencies=True)
    _, consumed = crew.run()
    check([consumed], count)
    times = consumed["latencies"]
    return Measured(
        {
            f"p{name} ms at {rate}/s": 1000 * times[min(len(times) - 1, int(len(times) * part))]
            for name, part in (("50", 0.5), ("99", 0.99), ("99.9", 0.999))
        }
    )


def fan_out(server: Server, count: int, queues: int, depth: int) -> Measured:
    """(f): each message reaches several queues, and is consumed and acked in each."""
    names = new_queue(server, queues)
    crew = Crew(server)
    crew.add("publish", names[0], count, depth=depth)
    (published,) = crew.run()
    consume_s = 0.0
    for name in names:
        crew = Crew(server)
        crew.add("consume", name, count, depth=depth)
        (consumed,) = crew.run()
        check([consumed], count)
        consume_s += consumed["ended"] - consumed["began"]
    publish_s = published["ended"] - published["began"]
    return Measured({"deliveries/s": count * queues / (publish_s + consume_s)}, {"depth": depth})
