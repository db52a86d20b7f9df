"""The trace of a publish that is a task: from the call that enqueued it to its messages.

The context travels beside the request in the task's payload, `{"trace": {"traceparent": …}}`: a
repeated request may come in another trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace

from libs.events.tasks import WriteTask
from libs.serving import telemetry as conventions
from libs.serving.telemetry import Telemetry
from services.ingest import wire
from services.ingest.batches import Accepted, Columns

_TRACE: Final = "trace"

_APPLY: Final = {
    conventions.MESSAGING_SYSTEM: "slatemq",
    conventions.MESSAGING_OPERATION_NAME: "apply",
    conventions.MESSAGING_OPERATION_TYPE: "process",
}


class TaskTraces:
    """Carries trace contexts with tasks, where there are traces.

    Attributes:
        complete: What puts the current context into the headers of a publish, for the publisher.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.complete: Callable[[Columns], None] | None = None
        if telemetry.traces:
            self.complete = wire.carry_trace

    @property
    def is_on(self) -> bool:
        return self._telemetry.traces

    def carried(self) -> dict[str, Any]:
        """The members of a task's payload that carry the current context."""
        carrier: dict[str, str] = {}
        if self._telemetry.traces:
            conventions.inject(carrier)
        return {_TRACE: carrier} if carrier else {}

    @contextmanager
    def applying(self, task: WriteTask, accepted: Accepted) -> Iterator[None]:
        """A span under that of the call that enqueued the task."""
        if not self._telemetry.traces:
            yield
            return
        carrier = task.payload.get(_TRACE)
        facts: dict[str, str | int] = {
            **_APPLY,
            conventions.MESSAGING_BATCH_MESSAGE_COUNT: len(accepted.payloads),
            "slatemq.task_id": task.task_id,
        }
        with self._telemetry.tracer.start_as_current_span(
            "apply",
            context=conventions.extract(carrier if isinstance(carrier, dict) else {}),
            kind=trace.SpanKind.CONSUMER,
            attributes=facts,
        ):
            yield

    def of_one_try(self, accepted: Accepted) -> Accepted:
        """A copy of a publish, whose headers may be completed without changing the original."""
        if self.complete is None:
            return accepted
        return accepted.only(range(len(accepted.payloads)))
