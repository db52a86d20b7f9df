"""Types of options and arguments, and options that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from slatemq._rpc.endpoints import addresses_of
from slatemq.cli.durations import parse_duration
from slatemq.errors import InvalidArgument, SlateMQError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

COMPLETION_S = 1.0
"""How long a shell waits for the names of queues before it completes nothing."""

COMPLETIONS_MAX = 200

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Parsed(click.ParamType[T]):
    """Values that `parse` makes of UTF-8 text; its ValueError is wrong usage: exit code 2."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("must be UTF-8", param, ctx)
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _QueueName(Parsed[str]):
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        import asyncio

        found: list[str] = []

        async def collect() -> None:
            session: Any = ctx.find_root().obj
            async with asyncio.timeout(COMPLETION_S), session.connect() as client:
                async for queue in client.list_queues(incomplete):
                    found.append(queue.queue_id)
                    if len(found) == COMPLETIONS_MAX:
                        return

        with suppress(SlateMQError, TimeoutError, click.UsageError):
            asyncio.run(collect())
        return [CompletionItem(name) for name in found]


def _duration(text: str) -> timedelta:
    return timedelta(milliseconds=parse_duration(text))


def _seconds(text: str) -> timedelta:
    length_ms = parse_duration(text)
    if length_ms % 1000:
        raise ValueError(f"{text!r} must be whole seconds: leave out the milliseconds")
    return timedelta(milliseconds=length_ms)


def parse_time(text: str, others: str = "") -> int:
    """Milliseconds since the Unix epoch; `others` names further forms, for the ValueError."""
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return int(text)
    also = f", {others}" if others else ""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a valid time: write 2026-11-21T08:30:00Z, or milliseconds since "
            f"1970{also}"
        ) from None
    if time.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z for UTC, or e.g. +01:00{also}")
    since = (time - _EPOCH) // timedelta(milliseconds=1)
    if since < 0:
        raise ValueError(f"{text!r} is before 1970")
    return since


def _header(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not a valid header (expected KEY=VALUE)")
    return key, value


def _message_id(text: str) -> int:
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not 0 < int(text) < 1 << 63:
        raise ValueError(
            f"{text!r} is not a valid message ID (expected a whole number, as publish and claim "
            "print it, e.g. 281474976710657)"
        )
    return int(text)


def _handle_or_id(text: str) -> str:
    if "/" not in text:
        try:
            _message_id(text)
        except ValueError as error:
            raise ValueError(f"{error}; a handle has slashes, as `message ls` prints it") from None
    return text


def _endpoint(text: str) -> str:
    try:
        return ",".join(addresses_of(text))
    except InvalidArgument as error:
        raise ValueError(error.description) from None


WORDS = Parsed("text", str)
QUEUE = _QueueName("text", str)
DURATION = Parsed("duration", _duration)
SECONDS = Parsed("duration", _seconds)
TIME = Parsed("time", parse_time)
HEADER = Parsed("k=v", _header)
MESSAGE_ID = Parsed("id", _message_id)
WHICH = Parsed("handle or id", _handle_or_id)
ENDPOINT = Parsed("host:port", _endpoint)

queue_argument = click.argument("queue", type=QUEUE)

etag_option = click.option("--etag", type=WORDS, default="", help="Only if this is still its etag.")

consumer_option = click.option(
    "--consumer", type=WORDS, default="", metavar="ID", help="Name of the consumer."
)

yes_option = click.option(
    "--yes",
    is_flag=True,
    help="Do not ask for confirmation (never asked when stdin is not a terminal).",
)

queues_option = click.option(
    "--queue",
    "queues",
    type=QUEUE,
    multiple=True,
    metavar="QUEUE",
    help="Only this queue; repeatable.",
)

search_option = click.option(
    "--in",
    "queues",
    type=QUEUE,
    multiple=True,
    metavar="QUEUE",
    help="Search only this queue; repeatable.",
)

ids_option = click.option(
    "--id",
    "ids",
    type=MESSAGE_ID,
    multiple=True,
    metavar="ID",
    help="Only the message with this ID; repeatable.",
)


def confirm(yes: bool, question: str) -> None:
    """Ask, unless `yes` or without a terminal. Raises click.Abort after a no."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


def header_option(what: str) -> Callable[[F], F]:
    """`--header k=v`, any number of times, and `--to QUEUE`, short for one of them."""

    def add(function: F) -> F:
        function = click.option(
            "--header", "pairs", type=HEADER, multiple=True, help=f"A header of {what}; repeatable."
        )(function)
        return click.option(
            "--to", type=QUEUE, metavar="QUEUE", help="Short for --header queue=QUEUE."
        )(function)

    return add


def headers_of(to: str | None, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers given on the command line. Raises UsageError for one given twice."""
    headers: dict[str, str] = {}
    named = [("queue", to)] if to is not None else []
    for key, value in [*named, *pairs]:
        if key in headers:
            also = " (--to sets it)" if key == "queue" and to is not None else ""
            raise click.UsageError(f"the header {key!r} is given twice{also}")
        headers[key] = value
    return headers
