"""`slatemq outbox`: pushes that have not arrived, and what to do about them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from slatemq.cli.entry_output import shown
from slatemq.cli.groups import Group
from slatemq.cli.listings import Listing, listing_of
from slatemq.cli.output import payload_fields, say, write_json, write_table
from slatemq.cli.parameters import WORDS
from slatemq.cli.queue_options import format_time
from slatemq.cli.session import Session, pass_session, run, session_options

if TYPE_CHECKING:
    from slatemq._admin.outbox import OutboxLine, RefusedPush
    from slatemq.client import Client

LS_EPILOG = """\
\b
Examples:
  slatemq outbox ls
  slatemq outbox ls --json

\b
A push waits in the outbox of its broker until its ingest has stored it. A
halted outbox sends nothing: docs/how-to/operate.md says what to look at.
"""

RETRY_EPILOG = """\
\b
Examples:
  slatemq outbox retry 0-0-1f
  slatemq outbox refused --json | jq -r .push_id | xargs slatemq outbox retry

\b
Remove the cause first: an ingest that runs with older settings of the
instance (`slatemq status` names it) has to be started again.
"""

RESUME_EPILOG = """\
\b
Example:
  slatemq outbox resume --broker 0 --ingest 0 --yes

\b
Only when nothing can be put right: what the ingest has lost stays lost, and
what it had before its broker was restored from a copy comes twice.
"""

YES = click.option("--yes", is_flag=True, help="Do not ask. Nobody is asked without a terminal.")


@click.group("outbox", cls=Group)
def outbox() -> None:
    """See which pushes have not arrived, and retry or discard those refused."""


@outbox.command("ls", epilog=LS_EPILOG)
@session_options
@pass_session
def ls(session: Session) -> None:
    """List what waits, for each broker and ingest shard."""

    async def work() -> Listing[OutboxLine]:
        async with session.connect() as client:
            return await listing_of(client.outbox_lines())

    found = run(work())
    if session.json:
        for line in found.items:
            write_json(asdict(line))
        found.check_complete()
        return
    write_table(
        ("broker", "ingest", "waiting", "bytes", "oldest", "halted"),
        (
            (
                line.broker_shard,
                line.ingest_shard,
                line.waiting_count,
                line.waiting_bytes,
                format_time(line.oldest_pushed_at_ms) if line.oldest_pushed_at_ms else "",
                line.halted_reason,
            )
            for line in found.items
        ),
    )
    found.check_complete()


@outbox.command("refused", epilog="\b\nExample:\n  slatemq outbox refused")
@session_options
@pass_session
def refused(session: Session) -> None:
    """List the pushes that an ingest refused for good, with its reasons."""

    async def work() -> Listing[RefusedPush]:
        async with session.connect() as client:
            return await listing_of(client.refused_pushes())

    found = run(work())
    if session.json:
        for push in found.items:
            write_json(_fields(push))
        found.check_complete()
        return
    _show_refused(found.items)
    found.check_complete()


def _show_refused(found: Sequence[RefusedPush]) -> None:
    write_table(
        ("push", "queue", "bytes", "refused", "reason"),
        (
            (
                push.push_id,
                push.queue_id,
                push.payload_bytes,
                format_time(push.refused_at_ms),
                push.reason,
            )
            for push in found
        ),
        cuts=("queue",),
    )


@outbox.command("show", epilog="\b\nExample:\n  slatemq outbox show 0-0-1f")
@click.argument("push_id", type=WORDS, metavar="PUSH")
@session_options
@pass_session
def show(session: Session, push_id: str) -> None:
    """Show a refused push: why, its headers and payload."""

    async def work() -> RefusedPush:
        async with session.connect() as client:
            return await client.get_refused_push(push_id)

    push = run(work())
    if session.json:
        headers = dict(push.headers)
        write_json({**_fields(push), "headers": headers, **payload_fields(push.payload)})
        return
    say(f"push {push.push_id} to {push.queue_id or 'a queue that its row does not tell'}")
    say(f"  refused  {format_time(push.refused_at_ms)} by ingest {push.ingest_shard}")
    say(f"  reason   {push.reason}")
    for key, value in push.headers.items():
        say(f"  header   {key}: {value}")
    say(f"  payload  {shown(push.payload)}")


@outbox.command("retry", epilog=RETRY_EPILOG)
@click.argument("push_ids", type=WORDS, metavar="PUSH...", nargs=-1, required=True)
@session_options
@pass_session
def retry(session: Session, push_ids: tuple[str, ...]) -> None:
    """Send refused pushes once more, behind those that wait."""
    _each(session, push_ids, "retried", lambda client: client.retry_refused_push)


@outbox.command("discard", epilog="\b\nExample:\n  slatemq outbox discard 0-0-1f --yes")
@click.argument("push_ids", type=WORDS, metavar="PUSH...", nargs=-1, required=True)
@YES
@session_options
@pass_session
def discard(session: Session, push_ids: tuple[str, ...], yes: bool) -> None:
    """Throw refused pushes away, for good."""
    if not yes and sys.stdin.isatty():
        click.confirm(f"Throw away {len(push_ids)} pushes for good?", abort=True, err=True)
    _each(session, push_ids, "discarded", lambda client: client.discard_refused_push)


@outbox.command("resume", epilog=RESUME_EPILOG)
@click.option("--broker", type=click.IntRange(0, 16_383), required=True, help="Its shard.")
@click.option("--ingest", type=click.IntRange(0, 16_383), required=True, help="Its shard.")
@YES
@session_options
@pass_session
def resume(session: Session, broker: int, ingest: int, yes: bool) -> None:
    """Let a halted outbox go on from the number that its ingest has."""
    if not yes and sys.stdin.isatty():
        click.confirm("Is nothing left that could be put right?", abort=True, err=True)

    async def work() -> None:
        async with session.connect() as client:
            await client.resume_outbox(broker, ingest)

    run(work())
    if session.json:
        write_json({"broker_shard": broker, "ingest_shard": ingest, "resumed": True})
    else:
        say(f"the outbox of broker {broker} for ingest {ingest} tries again; see `outbox ls`")


def _each(
    session: Session,
    push_ids: tuple[str, ...],
    done: str,
    call_of: Callable[[Client], Callable[[str], Awaitable[None]]],
) -> None:
    """Does one after the other, and tells each; stops at the first that is refused."""

    async def work() -> None:
        async with session.connect() as client:
            call = call_of(client)
            for push_id in push_ids:
                await call(push_id)
                if session.json:
                    write_json({"push_id": push_id, done: True})
                else:
                    say(f"{done} {push_id}")

    run(work())


def _fields(push: RefusedPush) -> dict[str, Any]:
    """What a listing tells of a push."""
    fields = asdict(push)
    del fields["payload"], fields["headers"]
    return fields
