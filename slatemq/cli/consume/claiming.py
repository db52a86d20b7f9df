"""`slatemq claim`, `ack`, `nack` and `extend`: leases by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from slatemq._consume.handles import shard_of
from slatemq.cli.entry_output import Opened, note_encrypted, one_line, opened_with_note, shown
from slatemq.cli.failures import EXIT_REFUSED, error_fields, exit_code, sentence
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import (
    DURATION,
    WORDS,
    Number,
    consumer_option,
    flag,
    format_duration,
    format_time,
    queue_argument,
)
from slatemq.cli.session import Session, command
from slatemq.errors import INGEST_DOWN, InvalidArgument, SlateMQError, Unavailable

if TYPE_CHECKING:
    from slatemq._consume.delivered import Received
    from slatemq.client import Client

    Work = Callable[[Client, Sequence[str]], Awaitable[Sequence[int | SlateMQError | None]]]

CLAIM_MAX = 10_000
"""Messages of one call, as the server permits."""

WAIT_MAX = timedelta(seconds=60)
"""Wait of one call, as the server permits; longer waits are several calls."""


@command("claim")
@queue_argument
@click.option(
    "--max",
    "most",
    type=Number(min=1),
    default=1,
    help="Claim at most N messages; more than 10,000 take several calls.  [default: 1]",
)
@click.option(
    "--wait",
    type=DURATION,
    default=timedelta(0),
    help="How long to wait for the first message.  [default: 0]",
)
@click.option("--lease", type=DURATION, help="How long to hold them.  [default: the queue's]")
@consumer_option
def claim(
    session: Session, queue: str, most: int, wait: timedelta, lease: timedelta | None, consumer: str
) -> None:
    """Claim messages of QUEUE, and print them with their leases.

    The most urgent messages come first.

    Examples:
      slatemq claim orders
      slatemq claim orders --max 10 --wait 5s --lease 2m
      slatemq claim orders --json | jq -r .lease_token | xargs slatemq ack

    A claimed message is yours until its lease ends: `slatemq ack LEASE` marks it
    as done, `nack` returns it to the queue, `extend` extends the lease. Without
    any of them it is delivered again, and each claim counts as an attempt. If
    nothing is available, nothing is printed to stdout, and the exit code is 0.
    """

    async def work(client: Client) -> int:
        printed = 0
        left = wait
        while printed < most:
            asked = min(most - printed, CLAIM_MAX)
            step = min(left, WAIT_MAX)
            try:
                claimed = await client.claim(
                    queue, asked, wait=step, lease=lease, consumer_id=consumer
                )
            except Unavailable as error:
                if step == left:
                    raise
                if error.reason != INGEST_DOWN:
                    note(f"a claim has no answer, and is repeated: {error.message}")
                claimed = []  # There is time left, in which some may come.
            _show_all(session, claimed)
            if claimed and not printed:
                _note_cut(queue, lease, claimed[0])
            printed += len(claimed)
            left = timedelta(0) if claimed else left - step
            if not claimed and not left:
                break
        return printed

    if not session.call(work) and not session.json:
        note(f"nothing is available in {queue}")


def _show_all(session: Session, claimed: Sequence[Received]) -> None:
    """Prints messages; where that fails, the rest goes back: no caller knows their leases."""
    shown_count = 0
    try:
        for message in claimed:
            show(session, message)
            shown_count += 1
    finally:
        for message in claimed[shown_count:]:
            message.release_soon()


def _note_cut(queue: str, lease: timedelta | None, message: Received) -> None:
    if lease is not None and timedelta(milliseconds=message.lease_ms) < lease:
        longest = format_duration(message.lease_ms)
        note(f"leases of {queue} are at most {longest} (its --max-lease); `slatemq extend` extends")


def message_fields(message: Received, payload: Opened) -> dict[str, Any]:
    """A message for programs, named as in the protos; IDs are text."""
    return {
        "message_id": str(message.message_id),
        "handle": message.handle,
        **payload.fields,
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
    note_encrypted(session, message.headers)
    payload = opened_with_note(message)
    if session.json:
        write_json(message_fields(message, payload))
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
    say(f"  payload  {shown(payload.payload)}")


_LEASES = click.argument("leases", type=WORDS, nargs=-1, required=True, metavar="LEASE...")


@command("ack", epilog="Example:\n  slatemq ack 0-9d934e94a7438e3a")
@_LEASES
def ack(session: Session, leases: tuple[str, ...]) -> None:
    """Mark claimed messages as done; they are not delivered again."""
    _finish(session, leases, lambda client, tokens: client.ack(tokens), "acked")


@command("nack", epilog="Example:\n  slatemq nack LEASE --reason 'no such customer' --delay 10m")
@_LEASES
@click.option("--reason", type=WORDS, default="", help="Why, for the record of the attempt.")
@click.option(
    "--delay",
    type=DURATION,
    help="How long until it is available again; 0: immediately.  [default: the queue's backoff]",
)
@flag("--release", help="Do not count the attempts: the messages were not worked on.")
def nack(
    session: Session,
    leases: tuple[str, ...],
    reason: str,
    delay: timedelta | None,
    release: bool,
) -> None:
    """Return claimed messages to their queue; without attempts left they fail."""
    _finish(
        session,
        leases,
        lambda client, tokens: client.nack(tokens, reason, delay, release=release),
        "released" if release else "nacked",
    )


@command("extend", epilog="Example:\n  slatemq extend LEASE --lease 5m")
@_LEASES
@click.option(
    "--lease", type=DURATION, help="The new length, from now.  [default: that of the claim]"
)
def extend(session: Session, leases: tuple[str, ...], lease: timedelta | None) -> None:
    """Extend the leases of claimed messages."""
    _finish(session, leases, lambda client, tokens: client.extend(tokens, lease), "extended")


def _finish(session: Session, leases: Sequence[str], work: Work, done: str) -> None:
    """Print the outcome of each lease; the exit code is the worst of them."""
    results = session.call(lambda client: _by_shard(client, leases, work))
    for token, result in zip(leases, results, strict=True):
        _report(session, token, result, done)
    codes = {exit_code(result) for result in results if isinstance(result, SlateMQError)}
    if codes:
        # Refused is worse than unreachable: a retry will not help.
        sys.exit(EXIT_REFUSED if EXIT_REFUSED in codes else codes.pop())


async def _by_shard(
    client: Client, leases: Sequence[str], work: Work
) -> list[int | SlateMQError | None]:
    """A result for each lease; a bad lease, or a shard that is down, does not fail the others."""
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
    elif result is None:
        session.show(fields, f"{done} {token}")
    else:
        fields["lease_deadline_ms"] = result
        session.show(fields, f"{done} {token} until {format_time(result)}")
