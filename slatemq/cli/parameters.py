"""What options and arguments are made of. A value that cannot be is wrong usage: exit code 2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from slatemq._rpc.endpoints import addresses_of
from slatemq.cli.completion import queue_names
from slatemq.cli.durations import parse_duration
from slatemq.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Words(click.ParamType[str]):
    """Text that can be sent: UTF-8."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                self.fail("must be UTF-8", param, ctx)
        return value


class _QueueName(_Words):
    """The name of a queue, which shells complete."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return queue_names(ctx, incomplete)


class _Duration(click.ParamType[timedelta]):
    """A span; gives a timedelta."""

    name = "duration"

    def __init__(self, whole_seconds: bool = False) -> None:
        self._whole_seconds = whole_seconds

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, timedelta):
            return value
        try:
            length_ms = parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._whole_seconds and length_ms % 1000:
            self.fail(f"{value!r} is kept in whole seconds: leave out the milliseconds", param, ctx)
        return timedelta(milliseconds=length_ms)


class _Time(click.ParamType[int]):
    """A point in time; gives milliseconds since the Unix epoch."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, int):
            return value
        if re.fullmatch(r"\d{1,18}", value, re.ASCII):
            return int(value)
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r} is no time: write 2026-11-21T08:30:00Z, or milliseconds since 1970",
                param,
                ctx,
            )
        if time.tzinfo is None:
            self.fail(f"{value!r} has no time zone: add Z for UTC, or e.g. +01:00", param, ctx)
        since = (time - _EPOCH) // timedelta(milliseconds=1)
        if since < 0:
            self.fail(f"{value!r} is before 1970", param, ctx)
        return since


class _Header(click.ParamType[tuple[str, str]]):
    """`key=value`; gives the pair. The value may have further `=`, and may be empty."""

    name = "k=v"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, tuple):
            return value
        text = WORDS.convert(value, param, ctx)
        key, equals, content = text.partition("=")
        if not equals or not key:
            self.fail(f"{text!r} is no header: write key=value", param, ctx)
        return key, content


class _Endpoint(click.ParamType[str]):
    """`host:port`, several with commas."""

    name = "host:port"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return ",".join(addresses_of(value))
        except InvalidArgument as error:
            self.fail(error.description, param, ctx)


class _MessageID(click.ParamType[int]):
    """The ID of a message."""

    name = "id"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"\d{1,19}", value, re.ASCII) or not 0 < int(value) < 1 << 63:
            self.fail(
                f"{value!r} is no message ID: that is a whole number, as publish and claim print "
                "it, e.g. 281474976710657",
                param,
                ctx,
            )
        return int(value)


class _Which(click.ParamType[str]):
    """The handle of a message in a queue, or the message's ID."""

    name = "handle or id"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        text = WORDS.convert(value, param, ctx)
        if "/" not in text:
            try:
                MESSAGE_ID.convert(text, param, ctx)
            except click.BadParameter as error:
                self.fail(
                    f"{error.message}; a handle has slashes, as `message ls` prints it", param, ctx
                )
        return text


WORDS = _Words()
QUEUE = _QueueName()
DURATION = _Duration()
SECONDS = _Duration(whole_seconds=True)
TIME = _Time()
HEADER = _Header()
MESSAGE_ID = _MessageID()
WHICH = _Which()
ENDPOINT = _Endpoint()


def header_option(what: str) -> Callable[[F], F]:
    """`--header k=v`, any number of times, and `--to QUEUE`, which is one of them."""

    def add(function: F) -> F:
        function = click.option(
            "--header", "pairs", type=HEADER, multiple=True, help=f"A header of {what}; repeatable."
        )(function)
        return click.option(
            "--to", type=QUEUE, metavar="QUEUE", help="The same as --header queue=QUEUE."
        )(function)

    return add


def queues_option(function: F) -> F:
    """`--queue QUEUE`, any number of times."""
    return click.option(
        "--queue",
        "queues",
        type=QUEUE,
        multiple=True,
        metavar="QUEUE",
        help="Only this one; repeatable.",
    )(function)


def headers_of(to: str | None, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers given on the command line; one given twice is wrong usage."""
    headers: dict[str, str] = {}
    named = [("queue", to)] if to is not None else []
    for key, value in [*named, *pairs]:
        if key in headers:
            also = " (--to sets it)" if key == "queue" and to is not None else ""
            raise click.UsageError(f"the header {key!r} is given twice{also}")
        headers[key] = value
    return headers
