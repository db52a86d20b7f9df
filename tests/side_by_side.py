"""Which tests of a run go together in one process, beside those of others."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

WITH_SPARK: Final = frozenset(
    f"tests/integration/janitor/{name}.py"
    for name in (
        *("jobs/test_jobs", "jobs/test_jobs_killed", "jobs/test_job_logic"),
        *("spark/test_spark", "spark/test_report_numbers"),
    )
)
"""Their Spark takes twenty seconds of a processor to start and to warm up, in each process that has
one: they go together, and first."""

WITH_RABBITMQ: Final = frozenset(
    f"tests/integration/events/{name}.py"
    for name in (
        *("backends/test_conformance", "backends/test_rabbitmq_connections"),
        *("backends/test_rabbitmq_alarms", "backends/test_rabbitmq_exchanges"),
        *("backends/test_wrong_settings", "backends/test_permissions"),
        *("tasks/test_async_backends", "test_frozen_backends", "test_small_backends"),
    )
)
"""They share a server, which takes five seconds of a processor to start."""


ON_SOURCES: Final = frozenset(f"tests/unit/test_{name}.py" for name in ("house", "words"))
"""They share what they parse: all sources."""


def has_spark(node_id: str) -> bool:
    """Whether a test is in one of these files."""
    return node_id.partition("::")[0] in WITH_SPARK


def load_share(config: pytest.Config) -> None:
    """Load the files of tests that a run is about, in another order in each of its processes.

    All of them load all: where nothing is compiled yet, each compiles a part, and finds the rest.
    """
    given = getattr(config, "workerinput", None)
    if given is None:
        return
    left_out = [Path(one).absolute() for one in config.getoption("ignore") or ()]
    files = [
        file
        for one in config.args
        for file in _files_of(Path(one.partition("::")[0]))
        if not any(file.absolute().is_relative_to(folder) for folder in left_out)
    ]
    begin = len(files) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
    for file in files[begin:] + files[:begin]:
        parts = file.absolute().relative_to(config.rootpath).with_suffix("").parts
        # What is wrong with a file, or lacks on this machine, its collection tells.
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(parts))


def _files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """The tests of a file go together, and so do those of files that share what takes long."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in WITH_RABBITMQ:
            return "RabbitMQ"
        if file in ON_SOURCES:
            return "sources"
        return "Spark" if has_spark(nodeid) else super()._split_scope(nodeid)
