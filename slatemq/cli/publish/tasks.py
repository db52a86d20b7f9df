"""`slatemq task`: publishes that were accepted as tasks, and retrying those that failed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from slatemq._admin.task_ids import parse_task_id
from slatemq._counts import counted
from slatemq.cli.output import note, say, write_items, write_json
from slatemq.cli.parameters import DURATION, Number, Parsed, format_time
from slatemq.cli.publish.applied import check_failed
from slatemq.cli.session import Group, Session, write_listing
from slatemq.errors import DeadlineExceeded, InvalidArgument, SlateMQError

if TYPE_CHECKING:
    from slatemq._admin.tasks import Task


def _task_id(text: str) -> str:
    try:
        parse_task_id(text)
    except InvalidArgument as error:
        raise ValueError(error.description) from None
    return text


_TASK = click.argument("task_id", type=Parsed("task", _task_id), metavar="TASK")
_limit_option = partial(
    click.option,
    "--limit",
    metavar="N",
    default=100,
    show_default=True,
    help="At most N tasks of each ingest.",
)


@click.group("task", cls=Group)
def task() -> None:
    """Show publishes accepted as tasks, and retry those that failed."""


@task.command("show")
@_TASK
def show(session: Session, task_id: str) -> None:
    """Show the state of a task, and the IDs of its messages once it is applied.

    Example:
      slatemq task show task_01M82W8EBQ0007T39NZB3QEXHT

    Pending: in the queue backend, waiting to be applied or retried. Applied: its
    messages are durable; their IDs are known for seven days. Failed: in the
    backend's dead-letter place until `slatemq task retry`.
    """
    _print(session, session.call(lambda client: client.get_task(task_id)))


@task.command("wait")
@_TASK
@click.option(
    "--for", "length", type=DURATION, metavar="DURATION", help="Wait no longer.  [default: forever]"
)
def wait(session: Session, task_id: str, length: timedelta | None) -> None:
    """Wait until a task is applied or has failed.

    Examples:
      slatemq task wait task_01M82W8EBQ0007T39NZB3QEXHT
      slatemq task wait task_01M82W8EBQ0007T39NZB3QEXHT --for 1m --json

    Exit codes: 0 it is applied, 1 it has failed, 3 it was still pending when the
    time was over, or its ingest did not answer; it stays pending.
    """
    found = session.call(lambda client: client.wait_task(task_id, length))
    _print(session, found)
    check_failed(found)
    if found.state.value == "pending":
        raise DeadlineExceeded(f"{task_id} is still pending", reason="TASK_PENDING")


@task.command("failed")
@_limit_option(type=Number(1, 10_000))
def failed(session: Session, limit: int) -> None:
    """List the tasks that have failed, with their errors.

    Example:
      slatemq task failed --limit 10

    An item of the dead-letter place that is not a task is listed as unreadable,
    with its place in the backend. It is not retried: inspect it there.
    """
    write_listing(session, lambda client: client.failed_tasks(limit), _fields, _show_failed)


def _show_failed(found: Sequence[Task]) -> None:
    if not found:
        note("no task has failed")
        return
    write_items(
        found,
        {
            "task": lambda one: one.task_id or "unreadable",
            "failed": lambda one: format_time(one.ended_at_ms),
            "attempts": lambda one: one.attempts_count,
            "error": lambda one: one.error,
        },
    )


@task.command("pending")
@_limit_option(type=Number(1, 1_000))
def pending(session: Session, limit: int) -> None:
    """List the tasks that wait to be applied, with the errors of their attempts.

    Example:
      slatemq task pending --limit 10

    RabbitMQ shows only the tasks that are being applied, ActiveMQ the first 400.
    """
    write_listing(session, lambda client: client.pending_tasks(limit), _fields, _show_pending)


def _show_pending(found: Sequence[Task]) -> None:
    if not found:
        note("no task is known to wait")
        return
    write_items(
        found,
        {
            "task": lambda one: one.task_id,
            "accepted": lambda one: format_time(one.accepted_at_ms),
            "attempts": lambda one: one.attempts_count,
            "error": lambda one: one.error,
        },
    )


@task.command("retry")
def retry(session: Session) -> None:
    """Retry every task that has failed.

    Example:
      slatemq task failed
      slatemq task retry

    Remove the cause first. Attempts count from 0 again. A task that was applied
    is never applied again. Where an ingest is down, those of the others are
    retried.
    """
    try:
        count = session.call(lambda client: client.retry_failed_tasks())
    except SlateMQError as error:
        if count := int(error.metadata.get("retried_count", 0)):
            _show_retried(session, count)
        raise
    _show_retried(session, count)


def _show_retried(session: Session, count: int) -> None:
    if session.json:
        write_json({"retried_count": count})
    else:
        note(counted(count, "task is retried", "tasks are retried"))


def _print(session: Session, found: Task) -> None:
    if session.json:
        write_json(_fields(found))
        return
    say(f"task {found.task_id} is {found.state.value}")
    say(f"  accepted  {format_time(found.accepted_at_ms)}")
    if found.state.value == "pending":
        note("an ID that was never given out is shown as pending, too")
    if found.ended_at_ms:
        say(f"  {found.state.value:<8}  {format_time(found.ended_at_ms)}")
    for one in found.published:
        say(f"  message   {one.message_id}{' (a duplicate)' if one.duplicate else ''}")
    if found.error:
        say(f"  attempts  {found.attempts_count} failed")
        say(f"  error     {found.error}")


def _fields(found: Task) -> dict[str, Any]:
    return {
        "task_id": found.task_id,
        "state": found.state.value,
        "accepted_at_ms": found.accepted_at_ms,
        "ended_at_ms": found.ended_at_ms,
        "message_ids": [str(one.message_id) for one in found.published],
        "duplicates": [place for place, one in enumerate(found.published) if one.duplicate],
        "error": found.error,
        "attempts_count": found.attempts_count,
    }
