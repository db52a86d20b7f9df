"""What jobs of the janitor cost over a generated instance: seconds, processor time, memory.

python -m benchmarks.volume file:///tmp/volume/data --done 5e5 --waiting 5e5
python -m benchmarks.volume.jobs /tmp/volume unreferenced unreferenced

Starts ingest, router and broker on FOLDER/data, and runs the jobs one after the other, each in a
process and a Spark of its own. A job that is named twice finds what the first run has left.
`retention?` is a dry run. With `--master 'local-cluster[2,1,1024]'` the JVM of the driver is one of
its own, beside those of two executors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.suite import servers
from benchmarks.suite.memory import peak_mb
from services.janitor.jobs.contract import (
    JobOptions,
    JobResult,
)
from services.janitor.jobs.run import run_job

SAMPLED_S = 0.25
LOOK_S = 1.0
PARTS = JVM, EXECUTORS, WORKERS, DRIVER = ("JVM", "executors' JVMs", "Python workers", "driver")
TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A process of this machine, with the processor time of it, and of its children that ended."""

    parent: int
    name: str
    own_s: float
    ended_s: float

    @property
    def cpu_s(self) -> float:
        return self.own_s + self.ended_s


def processes() -> dict[int, Process]:
    """All that run."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        fields = rest.split()
        own, ended = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
        found[int(folder.name)] = Process(int(fields[1]), name, own / TICKS, ended / TICKS)
    return found


def family(pid: int) -> dict[int, Process]:
    """A process and all below it."""
    every = processes()
    chosen = {pid: every[pid]} if pid in every else {}
    while more := {
        one: item for one, item in every.items() if item.parent in chosen and one not in chosen
    }:
        chosen |= more
    return chosen


def proportional_mb(pid: int) -> float:
    """Its memory; what it shares with others is divided among them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


class Watch:
    """Samples a process and those below it until it ends.

    Attributes:
        cpu_s: Processor time: of Spark's JVM, those of executors, Python workers, the driver.
        peak_mb: Memory, in the same way; of the workers together.
        worker_mb: Memory of the largest worker.
    """

    def __init__(self, pid: int) -> None:
        self.cpu_s = dict.fromkeys(PARTS, 0.0)
        self.peak_mb = dict.fromkeys(PARTS, 0.0)
        self.worker_mb = 0.0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(SAMPLED_S):
            now_s, now_mb = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
            now = family(self._pid)
            for pid, item in now.items():
                part = self._part(pid, item, now)
                now_s[part] += item.own_s
                # Those below the driver and the JVM that ended are Python's.
                now_s[WORKERS] += item.ended_s
                mb = proportional_mb(pid)
                now_mb[part] += mb
                if part == WORKERS:
                    self.worker_mb = max(self.worker_mb, mb)
            for part in PARTS:
                self.cpu_s[part] = max(self.cpu_s[part], now_s[part])
                self.peak_mb[part] = max(self.peak_mb[part], now_mb[part])

    def _part(self, pid: int, process: Process, now: Mapping[int, Process]) -> str:
        if pid == self._pid:
            return DRIVER
        if process.name != "java":
            return WORKERS
        parent = now.get(process.parent)
        return EXECUTORS if parent is not None and parent.name == "java" else JVM

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class Cost(NamedTuple):
    """What a job gave, and what it took.

    Attributes:
        result: The job's result.
        seconds: From the start of its process to its end.
        cpu_s: Processor time of Spark, by part, and of the services.
        peak_mb: Memory in the same way: of the services since they started, or were `renewed`.
        worker_mb: Memory of the largest Python worker.
    """

    result: JobResult
    seconds: float
    cpu_s: dict[str, float]
    peak_mb: dict[str, float]
    worker_mb: float


def renew_peaks(services: Mapping[str, int]) -> None:
    """Count the peaks of their memory from now on."""
    for pid in services.values():
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _job(
    root: str, name: str, master: str, window_s: int, record: multiprocessing.Queue[JobResult]
) -> None:
    options = JobOptions(dry_run=name.endswith("?"), master=master, replay_window_s=window_s)
    record.put(run_job(name.rstrip("?"), root, options))


def cost_of(
    folder: Path,
    name: str,
    server: servers.Server,
    master: str,
    window_s: int = JobOptions.replay_window_s,
) -> Cost:
    """Runs one job, in a process of its own; with ? at the end of its name a dry run.

    `window_s` is how far back new queues may start, as the services have it.
    """
    context = multiprocessing.get_context("spawn")
    record: multiprocessing.Queue[JobResult] = context.Queue()
    services = dict(server.named())
    before = processes()
    began = time.monotonic()
    root = (folder / "data").as_uri()
    child = context.Process(target=_job, args=(root, name, master, window_s, record))
    child.start()
    watch = Watch(child.pid or 0)
    try:
        result = answer(child, record, name)
        child.join()
    finally:
        watch.end()
        child.kill()
    seconds, after = time.monotonic() - began, processes()
    used = {one: after[pid].cpu_s - before[pid].cpu_s for one, pid in services.items()}
    peaks = {**watch.peak_mb, **peak_mb(services)}
    return Cost(result, seconds, {**watch.cpu_s, **used}, peaks, watch.worker_mb)


def run(folder: Path, name: str, server: servers.Server, master: str, driver_mb_max: float) -> None:
    """One job, and what it cost. Ends the program when its driver took more memory than that."""
    cost = cost_of(folder, name, server, master)
    print(f"{name}: {cost.seconds:.1f} s")
    print("  " + ", ".join(f"{phase} {took:.1f} s" for phase, took in cost.result.phases))
    print("  " + ", ".join(f"{what} {count:,}" for what, count in cost.result.counts.items()))
    print("  processor s: " + listed(cost.cpu_s, ".1f"))
    print(
        f"  peak MB: {listed(cost.peak_mb, '.0f')}, largest worker {cost.worker_mb:.0f}",
        flush=True,
    )
    refuse_large_driver(name, cost, driver_mb_max)


def refuse_large_driver(name: str, cost: Cost, mb_max: float) -> None:
    """Ends the program when a job's driver took more memory than that."""
    if cost.peak_mb[DRIVER] > mb_max:
        sys.exit(f"{name}: its driver took {cost.peak_mb[DRIVER]:.0f} MB, > {mb_max:g}")


def answer(
    child: multiprocessing.process.BaseProcess, record: multiprocessing.Queue[JobResult], name: str
) -> JobResult:
    """The job's result; exits the program if the job has none."""
    while True:
        ended = not child.is_alive()
        try:
            return record.get(timeout=LOOK_S)
        except queue.Empty:
            if ended:
                sys.exit(f"{name}: failed, its exit code is {child.exitcode}")


def listed(numbers: Mapping[str, float], form: str) -> str:
    """Numbers by name, in a row, without those that are 0."""
    return ", ".join(f"{name} {number:{form}}" for name, number in numbers.items() if number)


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """A command line with what all that run jobs take; SIGTERM ends what they have started."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--master", default="local[*]", help="of Spark; local[*]")
    parser.add_argument(
        "--driver-mb-max",
        type=float,
        default=200,
        help="more memory of a driver is a failure: it may not grow with the rows; 200",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return parser


def main() -> None:
    """Runs them."""
    parser = parser_of("benchmarks.volume.jobs", __doc__)
    parser.add_argument("folder", type=Path, help="whose data/ is the instance's root")
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    given = parser.parse_args()
    folder = given.folder.resolve()
    with servers.slatemq(folder) as server:
        for name in given.jobs:
            run(folder, name, server, given.master, given.driver_mb_max)


if __name__ == "__main__":
    main()
