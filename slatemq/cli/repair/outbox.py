"""`slatemq outbox`: pushes that have not arrived, and what to do about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from slatemq._counts import counted
from slatemq.cli.entry_output import note_encrypted, shown
from slatemq.cli.output import payload_fields, say, write_items, write_json
from slatemq.cli.parameters import WORDS, Number, confirm, format_time, yes_option
from slatemq.cli.session import Group, Session, write_listing

if TYPE_CHECKING:
    from slatemq._admin.outbox import OutboxLine, RefusedPush
    from slatemq.client import Client

_PUSHES = click.argument("push_ids", type=WORDS, metavar="PUSH...", nargs=-1, required=True)


@click.group("outbox", cls=Group)
def outbox() -> None:
    """List pushes that have not arrived, and retry or discard refused ones."""


@outbox.command("ls")
def ls(session: Session) -> None:
    """List how many pushes wait, for each broker and ingest shard.

    Examples:
      slatemq outbox ls
      slatemq outbox ls --json

    A push waits in the outbox of its broker until its ingest has stored it. A
    halted outbox sends nothing: docs/how-to/operate.md says what to do.
    """
    write_listing(session, lambda client: client.outbox_lines(), asdict, _show_lines)


def _show_lines(found: Sequence[OutboxLine]) -> None:
    write_items(
        found,
        {
            "broker": lambda line: line.broker_shard,
            "ingest": lambda line: line.ingest_shard,
            "waiting": lambda line: line.waiting_count,
            "bytes": lambda line: line.waiting_bytes,
            "oldest": lambda line: (
                format_time(line.oldest_pushed_at_ms) if line.oldest_pushed_at_ms else ""
            ),
            "halted": lambda line: line.halted_reason,
        },
    )


@outbox.command("refused", epilog="Example:\n  slatemq outbox refused")
def refused(session: Session) -> None:
    """List the pushes that an ingest refused, with its reasons."""
    write_listing(session, lambda client: client.refused_pushes(), _fields, _show_refused)


def _show_refused(found: Sequence[RefusedPush]) -> None:
    write_items(
        found,
        {
            "push": lambda push: push.push_id,
            "queue": lambda push: push.queue_id,
            "bytes": lambda push: push.payload_bytes,
            "refused": lambda push: format_time(push.refused_at_ms),
            "reason": lambda push: push.reason,
        },
        cuts=("queue",),
    )


@outbox.command("show", epilog="Example:\n  slatemq outbox show 0-0-1f")
@click.argument("push_id", type=WORDS, metavar="PUSH")
def show(session: Session, push_id: str) -> None:
    """Show a refused push: the reason, its headers and payload."""
    push = session.call(lambda client: client.get_refused_push(push_id))
    note_encrypted(session, push.headers)
    if session.json:
        headers = dict(push.headers)
        write_json({**_fields(push), "headers": headers, **payload_fields(push.payload)})
        return
    say(f"push {push.push_id} to {push.queue_id or 'an unknown queue'}")
    say(f"  refused  {format_time(push.refused_at_ms)} by ingest {push.ingest_shard}")
    say(f"  reason   {push.reason}")
    for key, value in push.headers.items():
        say(f"  header   {key}: {value}")
    say(f"  payload  {shown(push.payload)}")


@outbox.command("retry")
@_PUSHES
def retry(session: Session, push_ids: tuple[str, ...]) -> None:
    """Send refused pushes again, behind those that wait.

    Examples:
      slatemq outbox retry 0-0-1f
      slatemq outbox refused --json | jq -r .push_id | xargs slatemq outbox retry

    Remove the cause first: restart an ingest that runs with older settings of the
    instance (`slatemq status` names it).
    """
    _each(session, push_ids, "retried", lambda client: client.retry_refused_push)


@outbox.command("discard", epilog="Example:\n  slatemq outbox discard 0-0-1f --yes")
@_PUSHES
@yes_option
def discard(session: Session, push_ids: tuple[str, ...], yes: bool) -> None:
    """Remove refused pushes permanently."""
    confirm(yes, f"Remove {counted(len(push_ids), 'push', 'pushes')} permanently?")
    _each(session, push_ids, "discarded", lambda client: client.discard_refused_push)


@outbox.command("resume")
@click.option("--broker", type=Number(0, 16_383), required=True, help="The broker shard.")
@click.option("--ingest", type=Number(0, 16_383), required=True, help="The ingest shard.")
@yes_option
def resume(session: Session, broker: int, ingest: int, yes: bool) -> None:
    """Let a halted outbox continue from the number that its ingest has.

    Example:
      slatemq outbox resume --broker 0 --ingest 0 --yes

    Only as a last resort: what the ingest has lost stays lost, and what it had
    before its broker was restored from a copy is stored twice.
    """
    confirm(yes, "Is there nothing left that could be repaired?")
    session.call(lambda client: client.resume_outbox(broker, ingest))
    session.show(
        {"broker_shard": broker, "ingest_shard": ingest, "resumed": True},
        f"the outbox of broker {broker} for ingest {ingest} is active again; see `outbox ls`",
    )


def _each(
    session: Session,
    push_ids: tuple[str, ...],
    done: str,
    call_of: Callable[[Client], Callable[[str], Awaitable[None]]],
) -> None:
    """Call for each push in turn, and print it; stop at the first that is refused."""

    async def work(client: Client) -> None:
        for push_id in push_ids:
            await call_of(client)(push_id)
            session.show({"push_id": push_id, done: True}, f"{done} {push_id}")

    session.call(work)


def _fields(push: RefusedPush) -> dict[str, Any]:
    fields = asdict(push)
    del fields["payload"], fields["headers"]
    return fields
