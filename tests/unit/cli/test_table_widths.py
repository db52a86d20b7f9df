"""Tables in a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slatemq._admin.instance import EventsStatus, Status
from slatemq._admin.janitor import JobRun, JobRunState
from slatemq._admin.outbox import RefusedPush
from slatemq._admin.queue_models import queue_of
from slatemq._admin.redrives import Redrive, RedriveState
from slatemq._admin.tasks import Task, TaskState
from slatemq.cli import janitor, output
from slatemq.cli.publish import events, tasks
from slatemq.cli.queue import inspecting, queues
from slatemq.cli.repair import dead_letters, outbox
from slatemq.models import Explanation, RouteStatus, ServiceStatus
from slatemq.v1 import queue_pb2

LONG = "production.billing.invoices.created.v2"


def queue_with_letters(name: str, *, paused: bool) -> queue_pb2.Queue:
    queue = queue_pb2.Queue(queue_id=name, filter="true", paused=paused)
    queue.counts.available_count = 1_234_567
    queue.counts.archived_count = 3
    return queue


def redrive(name: str, into: str) -> Redrive:
    return Redrive("f" * 16, name, into, "", 0, RedriveState.RUNNING, 1, 0, 12_345, 345, 345, "", 0)


@pytest.mark.parametrize("paused", [True, False])
def test_a_list_of_queues_with_long_names_fits_a_terminal_and_is_whole_in_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    found = [queue_of(queue_with_letters(name, paused=paused)) for name in (LONG, "short")]
    queues._show_queues(found)
    whole = capfdbinary.readouterr().out.decode()
    assert LONG in whole

    monkeypatch.setattr(output, "line_width", lambda: 80)
    queues._show_queues(found)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert max(map(len, lines)) <= 80
    name = lines[1].split("  ")[0]
    assert name.startswith("production.")
    assert name.endswith("… (paused)" if paused else "…")
    assert lines[2].startswith("short (paused) " if paused else "short ")


def test_a_list_of_redrives_with_long_names_fits_a_terminal_and_is_whole_in_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [redrive(LONG, LONG), redrive(LONG, f"{LONG}.again"), redrive("a", "b")]
    dead_letters._show_redrives(found)
    assert f"{LONG} into {LONG}.again" in capfdbinary.readouterr().out.decode()

    monkeypatch.setattr(output, "line_width", lambda: 80)
    dead_letters._show_redrives(found)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert "… into produ" in lines[2]
    assert lines[3].endswith("a into b")


LAST_ID = (1 << 64) - 1
TIME_MS = 1_767_225_600_123


def shown_status() -> None:
    found = [queue_of(queue_with_letters(name, paused=True)) for name in (LONG, "short")]
    services = [ServiceStatus("ingest", 12, "192.168.100.200:17420", False, "waits for the store")]
    routes = [RouteStatus(255, 255, LAST_ID, LAST_ID, 123_456_789)]
    inspecting._show(Status(services, routes, found, []))


def shown_events() -> None:
    events._show_status(
        [
            EventsStatus(
                "ingest",
                12,
                enabled=True,
                backend="rabbitmq",
                consistency="write-through",
                cursor=LAST_ID,
                lag_count=123,
                lag_ms=12_300,
                lost_count=1_234,
            )
        ]
    )


def shown_explanations() -> None:
    inspecting._show_explanations([Explanation(LONG * 2, False, 128, "its filter is false")])


def shown_tasks() -> None:
    name = "task_01KE8ZJ5Q0000000000000000"
    tasks._show_failed([Task(name, TaskState.FAILED, TIME_MS, TIME_MS, (), "the queue", 10)])


def shown_refused() -> None:
    push = RefusedPush("0-12-1f3a", LONG * 2, "its payload is", TIME_MS, TIME_MS, 12_345_678, 0, 12)
    outbox._show_refused([push])


def shown_runs() -> None:
    run_id = "20261231-235959-999-unreferenced-0a1b2c"
    state = JobRunState.INTERRUPTED
    run = JobRun(run_id, "report", True, (), True, state, 0, TIME_MS, TIME_MS, TIME_MS, None)
    janitor._show_runs([run])


@pytest.mark.parametrize(
    "show",
    [
        shown_status,
        shown_events,
        shown_explanations,
        shown_tasks,
        shown_refused,
        shown_runs,
    ],
)
def test_a_table_fits_a_terminal_with_long_names_and_is_whole_in_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    show: Callable[[], None],
) -> None:
    show()
    assert "…" not in capfdbinary.readouterr().out.decode()

    monkeypatch.setattr(output, "line_width", lambda: 80)
    show()
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert max(map(len, lines)) <= 80, "\n".join(lines)


def test_a_lag_that_no_router_knows_is_shown_as_unknown(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    routes = [RouteStatus(0, 0, 5, 5, 0), RouteStatus(1, 0, 0, 0, 0, is_current=False)]

    inspecting._show(Status([], routes, [], []))

    lines = [line.split() for line in capfdbinary.readouterr().out.decode().splitlines()]
    assert ["0", "0", "0", "5", "5"] in lines
    assert ["1", "0", "unknown", "0", "0"] in lines
