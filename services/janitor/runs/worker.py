"""`python -m services.janitor.runs.worker`: the child that a janitor starts for a run.

The other side of `child`: does one job, reports progress, and ends with the janitor.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any, BinaryIO, Final

from opentelemetry import trace

from libs.serving.process import logs
from libs.serving.process.exits import exit_with
from libs.serving.telemetry import extract
from libs.storage.objects.requests import OF_PROCESS, RequestCounts
from services.janitor.jobs.contract import (
    VERIFYING,
    JobCancelled,
    JobFailed,
    JobOptions,
    JobResult,
    Progress,
    Report,
)
from services.janitor.snapshots import report_snapshots
from services.janitor.spark.failures import without_stack

log = logging.getLogger(__name__)

RunJob = Callable[[str, str, JobOptions, Report], JobResult]

PROGRESS_S: Final = 0.2
"""Between two reports of progress in one phase: tasks end by the hundred in a second."""

ERROR_CHARS_MAX: Final = 2_000
"""Characters of an error that the history keeps."""


def work(run: RunJob) -> int:
    """Do the job that stdin names. The exit code is 0 for every outcome that was reported."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    control = os.fdopen(os.dup(0), "rb")
    result = _JanitorPipe(os.dup(1))
    # What Spark prints is for the log, and what it starts shall not hold our pipes open.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    line = control.readline()
    if not line:
        return 1  # The janitor was gone before it could say what for.
    task = json.loads(line)
    run_span = trace.get_current_span(extract(task["trace"])).get_span_context()
    logs.configure("janitor-spark", task["log_level"], task["log_format"], within=run_span)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Spark starts its processes with it.
    os.environ.update({name.upper(): value for name, value in task["trace"].items()})
    os.environ.update(task["tls"])
    options = JobOptions(**task["options"])
    threading.Thread(target=_obey, args=(control, options.cancelled), daemon=True).start()
    report_snapshots(lambda name: result.say({"snapshot": [name.database, name.snapshot_id]}))
    end = _end_of(run, task, options, result)
    result.say_requests()
    result.say(end)
    return 0


def _end_of(
    run: RunJob, task: Mapping[str, Any], options: JobOptions, value: _JanitorPipe
) -> Mapping[str, Any]:
    try:
        result = run(task["job"], task["root"], options, value.progress)
    except JobCancelled:
        return {"end": "cancelled"}
    except JobFailed as error:
        if options.cancelled.is_set():
            return {"end": "cancelled"}
        return {"end": "failed", "error": str(error)}
    except Exception as error:  # whatever Spark raises, the history is to say so
        if options.cancelled.is_set():
            log.info("ended by the cancellation: %s", without_stack(error)[:ERROR_CHARS_MAX])
            return {"end": "cancelled"}
        log.exception("the job failed")
        why = f"{type(error).__name__}: {without_stack(error)[:ERROR_CHARS_MAX]}"
        return {"end": "failed", "error": why}
    return {"end": "done", **asdict(result)}


def _obey(control: BinaryIO, cancelled: threading.Event) -> None:
    """Cancel when the janitor asks for it; end, with the JVM, when the janitor is gone."""
    for line in control:
        if line.strip() == b"cancel":
            cancelled.set()
    os.killpg(os.getpgrp(), signal.SIGKILL)


class _JanitorPipe:
    """What the janitor reads: see `child`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._phase = 0
        self._at = float("-inf")
        self._counted = RequestCounts()

    def say(self, fields: Mapping[str, Any]) -> None:
        line = json.dumps(fields).encode() + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._number, line) :]
            except BrokenPipeError:
                sys.exit(1)  # The janitor is gone.

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase_number == self._phase and now - self._at < PROGRESS_S:
            return
        self._phase, self._at = progress.phase_number, now
        self.say({"progress": asdict(progress)})
        self.say_requests()

    def say_requests(self) -> None:
        """Report what this process has asked of stores since the last time."""
        with self._lock:
            new = OF_PROCESS.since(self._counted)
            self._counted.add(new)
        self.say({"requests": vars(new)})


def _run_job(job: str, root: str, options: JobOptions, report: Report) -> JobResult:
    """Do a job, with the module that does it: most bring Spark, which the others do without."""
    name = "verifying" if job in VERIFYING else "run"
    result: JobResult = import_module(f"services.janitor.jobs.{name}").run_job(
        job, root, options, report
    )
    return result


if __name__ == "__main__":
    exit_with(work(_run_job))
