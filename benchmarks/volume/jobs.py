"""What jobs of the janitor cost over a generated instance: seconds, processor time, memory.

python -m benchmarks.volume file:///tmp/volume/data --done 5e5 --waiting 5e5
python -m benchmarks.volume.jobs /tmp/volume unreferenced unreferenced

Starts ingest, router and broker on FOLDER/data, and runs the jobs one after the other, each in a
process and a Spark of its own. A job that is named twice finds what the first run has left.
`retention?` is a dry run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.suite import servers
from benchmarks.suite.memory import peak_mb
from services.janitor.jobs.contract import JobInstance, JobOptions, JobResult
from services.janitor.jobs.run import run_job

SAMPLED_S = 0.25
TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A process of this machine."""

    parent: int
    cpu_s: float
    name: str


def processes() -> dict[int, Process]:
    """All that run, with the processor time of their children that ended."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        fields = rest.split()
        cpu_s = sum(map(int, fields[11:15])) / TICKS
        found[int(folder.name)] = Process(int(fields[1]), cpu_s, name)
    return found


def family(pid: int) -> dict[int, Process]:
    """A process and all below it."""
    every = processes()
    chosen = {pid: every[pid]} if pid in every else {}
    while more := {
        one: told for one, told in every.items() if told.parent in chosen and one not in chosen
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
    """Samples a process and those below it until it ends."""

    def __init__(self, pid: int) -> None:
        self.cpu_s = 0.0
        self.java_mb = self.python_mb = self.driver_mb = 0.0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(SAMPLED_S):
            told = family(self._pid)
            self.cpu_s = max(self.cpu_s, sum(one.cpu_s for one in told.values()))
            memory = {pid: proportional_mb(pid) for pid in told}
            java = sum(mb for pid, mb in memory.items() if told[pid].name == "java")
            driver = memory.get(self._pid, 0)
            self.java_mb = max(self.java_mb, java)
            self.driver_mb = max(self.driver_mb, driver)
            self.python_mb = max(self.python_mb, sum(memory.values()) - java - driver)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _job(root: str, name: str, told: multiprocessing.Queue[JobResult]) -> None:
    options = JobOptions(dry_run=name.endswith("?"))
    told.put(run_job(name.rstrip("?"), JobInstance(root), options))


def run(folder: Path, name: str, server: servers.Server, driver_mb_max: float) -> None:
    """One job, and what it cost. Ends the program when its driver took more memory than that."""
    context = multiprocessing.get_context("spawn")
    told: multiprocessing.Queue[JobResult] = context.Queue()
    services = dict(server.named())
    before = processes()
    began = time.monotonic()
    child = context.Process(target=_job, args=((folder / "data").as_uri(), name, told))
    child.start()
    watch = Watch(child.pid or 0)
    try:
        result = told.get(timeout=3600)
        child.join()
    finally:
        watch.end()
        child.kill()
    seconds, after = time.monotonic() - began, processes()
    print(f"{name}: {seconds:.1f} s, {watch.cpu_s:.1f} s of processor time in Spark", flush=True)
    print("  " + ", ".join(f"{phase} {took:.1f} s" for phase, took in result.phases))
    print("  " + ", ".join(f"{what} {count:,}" for what, count in result.counts.items()))
    used = {one: after[pid].cpu_s - before[pid].cpu_s for one, pid in services.items()}
    print("  services, s: " + ", ".join(f"{one} {cpu:.1f}" for one, cpu in used.items()))
    print(
        f"  peak MB: JVM {watch.java_mb:.0f}, driver {watch.driver_mb:.0f}, "
        f"Python workers {watch.python_mb:.0f}, "
        + ", ".join(f"{one} {mb:.0f}" for one, mb in peak_mb(services).items()),
        flush=True,
    )
    if watch.driver_mb > driver_mb_max:
        sys.exit(f"{name}: its driver took {watch.driver_mb:.0f} MB, more than {driver_mb_max:g}")


def main() -> None:
    """Runs them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.volume.jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="whose data/ is the instance's root")
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    parser.add_argument(
        "--driver-mb-max",
        type=float,
        default=200,
        help="more memory of the driver is a failure: it may not grow with the rows; 200",
    )
    given = parser.parse_args()
    # What was started is ended, whoever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = given.folder.resolve()
    with servers.slatemq(folder) as server:
        for name in given.jobs:
            run(folder, name, server, given.driver_mb_max)


if __name__ == "__main__":
    main()
