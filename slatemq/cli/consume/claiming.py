"""`slatemq claim`, `ack`, `nack` and `extend`: leases by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from slatemq._consume.handles import shard_of
from slatemq.cli.durations import format_duration
from slatemq.cli.entry_output import one_line, shown
from slatemq.cli.failures import EXIT_REFUSED, error_fields, exit_code, sentence
from slatemq.cli.output import note, payload_fields, say, write_json
from slatemq.cli.parameters import DURATION, QUEUE, WORDS
from slatemq.cli.queue_options import format_time
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.errors import InvalidArgument, SlateMQError

if TYPE_CHECKING:
    from slatemq._consume.consumer import Received
    from slatemq.client import Client

    Work = Callable[[Client, Sequence[str]], Awaitable[Sequence[int | SlateMQError | None]]]

CLAIM_MAX = 10_000
"""Messages in one call, as the server takes it."""

WAIT_MAX = timedelta(seconds=60)
"""Of one call, as the server takes it; longer waits are several calls."""

CLAIM_EPILOG = """\
\b
Examples:
  slatemq claim orders
  slatemq claim orders --max 10 --wait 5s --lease 2m
  slatemq claim orders --json | jq -r .lease_token | xargs slatemq ack

\b
A claimed message is yours until its lease ends: `slatemq ack LEASE` says that
it is done, `nack` gives it back, `extend` keeps it longer. Without any of
them it comes again, and each claim counts as an attempt. Nothing there is no
error: nothing is printed, and the exit code is 0.
"""


@click.command("claim", epilog=CLAIM_EPILOG)
@click.argument("queue", type=QUEUE)
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Messages at most; more than 10,000 are several calls.  [default: 1]",
)
@click.option(
    "--wait",
    type=DURATION,
    default=timedelta(0),
    help="How long to wait for a first one; each minute is a call.  [default: 0]",
)
@click.option("--lease", type=DURATION, help="How long to hold them.  [default: the queue's]")
@click.option(
    "--consumer", type=WORDS, default="", metavar="ID", help="Who claims, for the records."
)
@session_options
@pass_session
def claim(
    session: Session, queue: str, most: int, wait: timedelta, lease: timedelta | None, consumer: str
) -> None:
    """Claim messages of QUEUE, the most urgent first, and print them with their leases."""

    async def work() -> int:
        printed = 0
        async with session.connect() as client:
            left = wait
            while printed < most:
                asked = min(most - printed, CLAIM_MAX)
                step = min(left, WAIT_MAX)
                claimed = await client.claim(
                    queue, asked, wait=step, lease=lease, consumer_id=consumer
                )
                for message in claimed:
                    show(session, message)
                if claimed and not printed:
                    _note_cut(queue, lease, claimed[0])
                printed += len(claimed)
                left = timedelta(0) if claimed else left - step
                if not claimed and not left:
                    break
        return printed

    if not run(work()) and not session.json:
        note(f"nothing is available in {queue}")


def _note_cut(queue: str, lease: timedelta | None, message: Received) -> None:
    longest = timedelta(milliseconds=message.lease_ms)
    if lease is not None and longest < lease:
        most = format_duration(message.lease_ms)
        note(
            f"leases of {queue} last {most} at most (its --max-lease): `slatemq extend` makes them "
            "longer later"
        )


def message_fields(message: Received) -> dict[str, Any]:
    """A message for programs, named as in the protos; IDs are text."""
    return {
        "message_id": str(message.message_id),
        "handle": message.handle,
        **payload_fields(message.payload),
        "headers": dict(message.headers),
        "created_at_ms": message.created_at_ms,
        "received_at_ms": message.received_at_ms,
        "retention_s": message.retention_s,
        "lease_token": message.lease_token,
        "lease_deadline_ms": message.lease_deadline_ms,
        "attempts_count": message.attempts_count,
        "priority": message.priority,
    }


def show(session: Session, message: Received) -> None:
    """Print a claimed message."""
    if session.json:
        write_json(message_fields(message))
        return
    left_s = max(0, round(message.lease_deadline_ms / 1000 - time.time()))
    headers = " ".join(f"{key}={value}" for key, value in sorted(message.headers.items()))
    say(
        f"message {message.message_id}  attempt {message.attempts_count}  "
        f"priority {message.priority}  lease ends in {format_duration(left_s * 1000)}"
    )
    say(f"  lease    {message.lease_token}")
    if headers:
        say(f"  headers  {one_line(headers)}")
    say(f"  payload  {shown(message.payload)}")


_LEASES = click.argument("leases", type=WORDS, nargs=-1, required=True, metavar="LEASE...")


@click.command("ack", epilog="\b\nExample:\n  slatemq ack 0-9d934e94a7438e3a")
@_LEASES
@session_options
@pass_session
def ack(session: Session, leases: tuple[str, ...]) -> None:
    """Say that claimed messages are processed: they are done, for good."""

    async def work(client: Client, tokens: Sequence[str]) -> Sequence[SlateMQError | None]:
        return await client.ack(tokens)

    _finish(session, leases, work, "acked")


@click.command(
    "nack", epilog="\b\nExample:\n  slatemq nack LEASE --reason 'no such customer' --delay 10m"
)
@_LEASES
@click.option("--reason", type=WORDS, default="", help="Why, for the record of the attempt.")
@click.option(
    "--delay",
    type=DURATION,
    help="When it may come again; 0: at once.  [default: as the queue's backoff says]",
)
@click.option(
    "--release", is_flag=True, help="Nobody worked on them: the attempts are not counted."
)
@session_options
@pass_session
def nack(
    session: Session,
    leases: tuple[str, ...],
    reason: str,
    delay: timedelta | None,
    release: bool,
) -> None:
    """Give claimed messages back: they come again, or fail when no attempts are left."""

    async def work(client: Client, tokens: Sequence[str]) -> Sequence[SlateMQError | None]:
        return await client.nack(tokens, reason, delay, release=release)

    _finish(session, leases, work, "released" if release else "nacked")


@click.command("extend", epilog="\b\nExample:\n  slatemq extend LEASE --lease 5m")
@_LEASES
@click.option(
    "--lease", type=DURATION, help="The new length, from now.  [default: that of the claim]"
)
@session_options
@pass_session
def extend(session: Session, leases: tuple[str, ...], lease: timedelta | None) -> None:
    """Keep claimed messages longer: their leases end so much after now."""

    async def work(client: Client, tokens: Sequence[str]) -> Sequence[int | SlateMQError]:
        return await client.extend(tokens, lease)

    _finish(session, leases, work, "extended")


def _finish(session: Session, leases: Sequence[str], work: Work, done: str) -> None:
    """Tell what became of each lease; the exit code is the worst of them."""

    async def ask() -> list[int | SlateMQError | None]:
        async with session.connect() as client:
            return await _by_shard(client, leases, work)

    results = run(ask())
    for token, result in zip(leases, results, strict=True):
        _report(session, token, result, done)
    codes = {exit_code(result) for result in results if isinstance(result, SlateMQError)}
    if codes:
        # Refused says more than unreachable: a repeat will not help.
        sys.exit(EXIT_REFUSED if EXIT_REFUSED in codes else codes.pop())


async def _by_shard(
    client: Client, leases: Sequence[str], work: Work
) -> list[int | SlateMQError | None]:
    """One result for each lease: what is wrong with one, or one shard away, spares the others."""
    results: dict[str, int | SlateMQError | None] = {}
    by_shard: dict[int, list[str]] = {}
    for token in dict.fromkeys(leases):
        try:
            by_shard.setdefault(shard_of(token), []).append(token)
        except SlateMQError as error:
            results[token] = error
    for tokens in by_shard.values():
        try:
            results.update(zip(tokens, await work(client, tokens), strict=True))
        except SlateMQError as error:
            if isinstance(error, InvalidArgument) or len(by_shard) == 1:
                raise
            results.update(dict.fromkeys(tokens, error))
    return [results[token] for token in leases]


def _report(session: Session, token: str, result: int | SlateMQError | None, done: str) -> None:
    fields: dict[str, Any] = {"lease_token": token, "ok": not isinstance(result, SlateMQError)}
    if isinstance(result, SlateMQError):
        if session.json:
            write_json({**fields, "error": error_fields(result)})
        else:
            note(f"{token}: {sentence(result)}")
    elif session.json:
        write_json(fields if result is None else {**fields, "lease_deadline_ms": result})
    elif result is None:
        say(f"{done} {token}")
    else:
        say(f"{done} {token} until {format_time(result)}")
