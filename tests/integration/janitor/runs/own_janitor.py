"""A real janitor, as a process, with the jobs of own_worker."""

from __future__ import annotations

import sys
from dataclasses import replace

from libs.serving.main import main
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from services.janitor import service
from services.janitor.config import JanitorConfig
from services.janitor.rpc.janitor import NamedQueues
from services.janitor.runs import child
from services.janitor.runs.history import RunRequest
from services.janitor.service import JanitorProcess
from tests.integration.janitor.runs.mark import bear
from tests.ready_process import popen

WORKER = (sys.executable, "-m", "tests.integration.janitor.runs.own_worker")

OWN_JOBS = frozenset(
    {
        *("quick", "named", "slow", "stubborn", "fails", "babbles", "breaks", "dies", "states"),
        *("spark", "spark-stubborn", "traces", "context", "removes", "removes-and-dies"),
    }
)
"""What choose a job by standing for a queue; loading own_worker would load Spark."""


class RealQueues(NamedQueues):
    """The queues of the instance, besides names that are none."""

    async def check(self, ask: RunRequest) -> None:
        """See NamedQueues."""
        named = tuple(one for one in ask.queue_ids if one not in OWN_JOBS)
        await super().check(replace(ask, queue_ids=named))


class OwnJanitor(JanitorProcess):
    """A janitor that does these jobs."""

    def __init__(self, config: JanitorConfig, telemetry: Telemetry, root: Root) -> None:
        super().__init__(config, telemetry, root, WORKER)
        self._queues = RealQueues(self.directory, self.channels)


if __name__ == "__main__":
    bear()
    child.Popen = popen  # type: ignore[assignment, attr-defined]
    service.RELEASE_S = 60.0  # type: ignore[misc]  # A busy owner takes long.
    main("janitor", JanitorConfig, OwnJanitor)
