"""An ingest that sends itself SIGKILL at one step of its tasks: `KILL_AT` names the step.

As in `KILL_AT=enqueued python -m tests.integration.events.tasks.killed_ingest --root …`; without
the variable it is any ingest. The steps are those of the BleepStore design, 3 to 7.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from libs.events.backend import QueueBackend
from libs.serving.main import main
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import TaskBodies
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.queued import Tasks

STEPS: dict[str, tuple[type, str, bool]] = {
    "body written": (TaskBackend, "enqueue", False),
    "enqueued": (TaskBackend, "enqueue", True),
    "dequeued": (TaskConsumer, "_begin", False),
    "body read": (TaskConsumer, "_store", False),
    "messages durable": (TaskBodies, "remove", False),
    "body removed": (QueueBackend, "complete_task", False),
    "complete": (QueueBackend, "complete_task", True),
}
"""The class and method of each step, and whether it is over after that rather than before."""

SYNC_STEPS = {**STEPS, "outcome known": (Tasks, "apply", True)}
"""With `sync` a call waits: a kill before its answer comes behind all that it waited for."""

AFTER_CALLS = 3
"""So that the step of other publishes is over when that of one is not."""


def killing(method: Callable[..., Awaitable[Any]], after: bool) -> Callable[..., Awaitable[Any]]:
    """The method, at whose third call the process ends.

    Calls before the process serves do not count: it would end before its test knows it.
    """
    calls = 0
    is_serving = Path(sys.argv[sys.argv.index("--ready-file") + 1]).exists

    @wraps(method)
    async def killed(*arguments: Any) -> Any:
        nonlocal calls
        calls += is_serving()
        is_last = calls == AFTER_CALLS
        if is_last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await method(*arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return killed


if __name__ == "__main__":
    step = os.environ.get("KILL_AT")
    if step is not None:
        owner, name, after = SYNC_STEPS[step]
        setattr(owner, name, killing(getattr(owner, name), after))
    main("ingest", IngestConfig, IngestProcess)
