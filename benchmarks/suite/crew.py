"""Client processes that begin together, and what they give."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import tally
from benchmarks.suite.servers import Server

_numbers = itertools.count(1)


class Failed(Exception):
    """A workload did not return every message, or a client failed."""


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
                cwd=self._server.checkout,
            )
        )

    def add_publishers(
        self, processes: int, queue: str, count: int, offset: int = 0, **spec: Any
    ) -> None:
        """Starts clients that publish `count` messages together, numbered from `offset`."""
        for worker in range(processes):
            first, last = count * worker // processes, count * (worker + 1) // processes
            self.add("publish", queue, last - first, first=offset + first, **spec)

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


class Consumers:
    """The consumers of one queue in a crew: each message is counted, whichever gets it."""

    def __init__(self, crew: Crew, processes: int, queue: str, count: int, **spec: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-tally-")
        self._path = Path(self._folder.name) / "tally"
        self._processes, self._count = processes, count
        tally.make(self._path, processes, count)
        shared = {"tally": str(self._path), "workers": processes}
        for worker in range(processes):
            crew.add("consume", queue, count, worker=worker, **shared, **spec)

    def check(self, results: Sequence[dict[str, Any]]) -> int:
        """Every message came back whole, and was acked; gives how many came more than once."""
        came = tally.seen(self._path, self._processes)
        acked = max(one["acked"] for one in results if "acked" in one)
        self._folder.cleanup()
        if came != self._count or acked != self._count:
            raise Failed(f"{came} of {self._count} messages came back, {acked} were acked")
        return sum(int(one["repeated"]) for one in results if "repeated" in one)


def new_queue(server: Server, count: int = 1) -> list[str]:
    """Makes queues that nothing else uses; more than one are a fan-out of the first one's topic."""
    number = next(_numbers)
    queues = [f"bench_{number}_{at}" for at in range(count)]
    crew = Crew(server)
    crew.add("prepare", queues[0], 0, queues=queues)
    crew.run()
    return queues


def span(results: Sequence[dict[str, Any]]) -> float:
    """From the first beginning to the last end, in seconds."""
    return float(max(one["ended"] for one in results) - min(one["began"] for one in results))
