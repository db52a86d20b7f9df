"""Runs a service that notes when messages pass certain functions.

`python -m benchmarks.waterfall.marked FILE MODULE [ARGUMENT…]`: FILE gets lines of JSON when
the process ends: the name of the mark, the time by the machine's monotonic clock, and the first
and last ID of the messages that passed.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Span = tuple[int, int]
"""The first and the last ID of some messages."""

passed: list[tuple[str, float, int, int]] = []


def note(name: str, when: float, spans: Iterable[Span]) -> None:
    passed.extend((name, when, first, last) for first, last in spans)


def mark(owner: Any, name: str, as_mark: str, spans: Callable[..., Iterable[Span]]) -> None:
    """Note what passes when a function is called."""
    function = getattr(owner, name)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        note(as_mark, time.monotonic(), spans(*args))
        return await function(*args, **kwargs)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        note(as_mark, time.monotonic(), spans(*args))
        return function(*args, **kwargs)

    setattr(owner, name, awaited if inspect.iscoroutinefunction(function) else called)


def mark_after(owner: Any, name: str, as_mark: str, spans: Callable[..., Iterable[Span]]) -> None:
    """Note what has passed once a coroutine function has returned."""
    function = getattr(owner, name)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        result = await function(*args, **kwargs)
        note(as_mark, time.monotonic(), spans(*args))
        return result

    setattr(owner, name, awaited)


def mark_ingest() -> None:
    from services.ingest.read.tailing import MetadataLog
    from services.ingest.rpc.ingest import IngestServicer
    from services.ingest.write.publishing import Publisher

    arrived_s: dict[int, float] = {}
    drain = Publisher.drain

    async def timed(self: Any, batch: Any) -> None:
        when = time.monotonic()
        arrived = [arrived_s.pop(id(waiting), when) for waiting in self._waiting]
        await drain(self, batch)
        commit = self._in_flight.get(batch.commit)
        if commit is None:
            return
        # Publishes get their IDs in the order in which they came.
        for (first, accepted), came in zip(commit.payloads, arrived, strict=False):
            span = (first, first + len(accepted.payloads) - 1)
            note("accepted", came, [span])
            note("commit begun", when, [span])

    enqueue = Publisher._enqueue

    def enqueued(self: Any, waiting: Any) -> None:
        arrived_s[id(waiting)] = time.monotonic()
        enqueue(self, waiting)

    Publisher.drain, Publisher._enqueue = timed, enqueued  # type: ignore[method-assign]
    mark(
        MetadataLog,
        "append",
        "stored",
        lambda _, entries: [(one.sequence, one.last_message_id) for one in entries],
    )
    mark(
        IngestServicer,
        "BatchGetMessages",
        "payload asked for",
        lambda _, request, __: [(one, one) for one in request.message_ids],
    )


def mark_router() -> None:
    from services.router.brokers import BrokerLink
    from services.router.tails import Tail

    mark(
        Tail, "_take", "read by router", lambda _, entries, __: [(e.first, e.last) for e in entries]
    )
    mark(
        BrokerLink,
        "_call",
        "judged",
        lambda _, pieces: [(piece.previous + 1, piece.last) for _, piece in pieces],
    )


def mark_broker() -> None:
    from services.broker.delivery import responses
    from services.broker.rpc.assignment import AssignmentServicer

    def of_ranges(_: Any, ranges: Any) -> Iterable[Span]:
        return [(one.previous + 1, one.last) for one in ranges]

    mark(
        AssignmentServicer,
        "Assign",
        "assigned",
        lambda _, request, __: [
            (one.previous_sequence + 1, one.last_sequence) for one in request.ranges
        ],
    )
    mark_after(AssignmentServicer, "_fetch", "payload there", of_ranges)
    mark_after(AssignmentServicer, "_apply", "claimed", lambda _, one: of_ranges(_, [one]))
    # Before the others import it by name.
    mark(
        responses,
        "encode_messages",
        "claim stored",
        lambda _, given, *__: [(item[0], item[0]) for one in given for item in one.claimed.items],
    )


MARKERS = {"services.ingest": mark_ingest, "services.router": mark_router}
MARKERS["services.broker"] = mark_broker


def main(out: str, module: str, *arguments: str) -> None:
    def write() -> None:
        with Path(out).open("w") as file:
            file.writelines(json.dumps(one) + "\n" for one in passed)

    atexit.register(write)
    sys.argv = [module, *arguments]
    MARKERS[module]()
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
