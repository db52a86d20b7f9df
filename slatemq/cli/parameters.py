"""Types of options and arguments, options that several commands share, and how values are shown."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

import slatemq
from slatemq._rpc.endpoints import addresses_of
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import now_ms

if TYPE_CHECKING:
    from slatemq._admin.queue_models import Backoff

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

COMPLETION_S = 1.0
"""How long a shell waits for the names of queues before it completes nothing."""

COMPLETIONS_MAX = 200

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}

_DURATION = re.compile(
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?!s))?(?:(?P<s>\d+)s)?(?:(?P<ms>\d+)ms)?",
    re.ASCII,
)

DIGITS_MAX = 15

DURATION_MS_MAX = 4_294_967_295_000
"""The longest that any setting takes: 2^32 - 1 seconds, some 136 years."""

NO_BACKOFF = "none"

FOREVER = "forever"
"""A retention without an end; 0 says the same."""

_BACKOFF = re.compile(
    r"(?P<kind>fixed|linear|exponential):(?P<initial>[0-9a-z]+)(?:\.\.(?P<max>[0-9a-z]+))?",
    re.ASCII,
)

_PARAMETERS = {
    "fixed": ("jitter",),
    "linear": ("jitter",),
    "exponential": ("multiplier", "jitter"),
}

_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)


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


class Number(click.IntRange):
    """A whole number within bounds, shown as N."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            bounds = f"at least {self.min}" if self.max is None else f"{self.min} to {self.max}"
            self.fail(f"must be a whole number, {bounds}, not {value!r}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


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


def parse_duration(text: str) -> int:
    """Milliseconds: numbers with units, larger units first, or a bare 0. Raises ValueError."""
    if text == "0":
        return 0
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        raise ValueError(
            f"{text!r} is not a valid duration: write numbers with units (d, h, m, s, ms), the "
            "larger units first, e.g. 500ms, 30s, 1h30m, 7d"
        )
    parts = {unit: digits for unit, digits in found.groupdict().items() if digits}
    length = DURATION_MS_MAX + 1
    if all(len(digits) <= DIGITS_MAX for digits in parts.values()):
        length = sum(int(digits) * _UNITS_MS[unit] for unit, digits in parts.items())
    if length > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is too long: at most 136 years")
    return length


def format_duration(length_ms: int) -> str:
    """The shortest form that `parse_duration` reads, with a unit even where it is 0."""
    if length_ms == 0:
        return "0s"
    written, left = "", length_ms
    for unit, size in _UNITS_MS.items():
        count, left = divmod(left, size)
        if count:
            written += f"{count}{unit}"
    return written


def _duration(text: str) -> timedelta:
    return timedelta(milliseconds=parse_duration(text))


def _seconds(text: str) -> timedelta:
    if text == FOREVER:
        return timedelta()
    length_ms = parse_duration(text)
    if length_ms % 1000:
        raise ValueError(f"{text!r} must be whole seconds: leave out the milliseconds")
    return timedelta(milliseconds=length_ms)


def parse_time(text: str, others: str = "") -> int:
    """Milliseconds since the Unix epoch; `others` names further forms, for the ValueError."""
    if re.fullmatch(r"\d{1,19}", text, re.ASCII) and int(text) < 1 << 63:
        return int(text)
    also = f", {others}" if others else ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a valid time: write 2026-11-21T08:30:00Z, or milliseconds since "
            f"1970{also}"
        ) from None
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z for UTC, or e.g. +01:00{also}")
    since = (moment - _EPOCH) // timedelta(milliseconds=1)
    if since < 0:
        raise ValueError(f"{text!r} is before 1970")
    return since


def format_time(time_ms: int) -> str:
    """RFC 3339, UTC; outside the years 1 to 9999 the milliseconds, as `parse_time` reads them."""
    try:
        moment = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return str(time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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


class FromNow(int):
    """Milliseconds since 1970, given relative to now: each run makes another time of it."""


def _when(text: str) -> int:
    if text.startswith("+"):
        return FromNow(now_ms() + _duration_ms(text[1:], text))
    return parse_time(text, "or +5m for 5 minutes from now")


def _start(text: str) -> int | Literal["now", "beginning"]:
    if text == "now":
        return "now"
    if text == "beginning":
        return "beginning"
    if text.startswith("-"):
        return max(now_ms() - _duration_ms(text[1:], text), 0)
    return parse_time(text, "or now, beginning, or -2h for 2 hours ago")


def _backoff(text: str) -> Backoff:
    if text == NO_BACKOFF:
        return slatemq.Backoff.none()
    waits, *parameters = text.split(",")
    found = _BACKOFF.fullmatch(waits)
    if found is None:
        raise ValueError(
            f"{text!r} is not a valid backoff: write none, fixed:10s, linear:5s..1m or "
            "exponential:1s..10m, optionally followed by ,jitter=0.5 and (exponential only) "
            ",multiplier=3"
        )
    # Loads protobuf only now: the help of a command does without.
    kind = slatemq.BackoffKind(found["kind"])
    initial_ms = _duration_ms(found["initial"], text)
    longest = found["max"]
    if longest and kind == "fixed":
        raise ValueError(f"{text!r}: fixed is always the same wait: leave out ..{longest}")
    numbers = _numbers(kind.value, parameters, text)
    if longest:
        numbers["max_ms"] = _duration_ms(longest, text)
    if kind == "exponential":
        numbers.setdefault("multiplier", 2.0)
    return slatemq.Backoff(kind, initial_ms, **numbers)


WORDS = Parsed("text", str)
QUEUE = _QueueName("queue", str)
DURATION = Parsed("duration", _duration)
SECONDS = Parsed("duration", _seconds)
TIME = Parsed("time", parse_time)
HEADER = Parsed("k=v", _header)
MESSAGE_ID = Parsed("id", _message_id)
WHICH = Parsed("handle or id", _handle_or_id)
ENDPOINT = Parsed("host:port", _endpoint)
WHEN = Parsed("time", _when)
START = Parsed("start", _start)
BACKOFF = Parsed("backoff", _backoff)

flag = partial(click.option, is_flag=True)
"""An option without a value."""

queue_argument = click.argument("queue", type=QUEUE)

etag_option = click.option("--etag", type=WORDS, default="", help="Only if this is still its etag.")

consumer_option = click.option(
    "--consumer", type=WORDS, default="", metavar="ID", help="Name of the consumer."
)

yes_option = flag(
    "--yes", help="Do not ask for confirmation (never asked when stdin is not a terminal)."
)

queues_option = click.option(
    "--queue", "queues", type=QUEUE, multiple=True, help="Only this queue; repeatable."
)

search_option = click.option(
    "--in", "queues", type=QUEUE, multiple=True, help="Search only this queue; repeatable."
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
        return click.option("--to", type=QUEUE, help="Short for --header queue=QUEUE.")(function)

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


def format_backoff(backoff: Backoff) -> str:
    """The form that the command line reads."""
    if backoff.kind == NO_BACKOFF:
        return NO_BACKOFF
    text = f"{backoff.kind.value}:{format_duration(backoff.initial_ms)}"
    if backoff.kind != "fixed":
        text += f"..{format_duration(backoff.max_ms)}"
    if backoff.kind == "exponential" and backoff.multiplier != 2:
        text += f",multiplier={backoff.multiplier:g}"
    if backoff.jitter:
        text += f",jitter={backoff.jitter:g}"
    return text


def _numbers(kind: str, parameters: Iterable[str], whole: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for parameter in parameters:
        name, _, number = parameter.partition("=")
        if name not in _PARAMETERS[kind]:
            known = " and ".join(_PARAMETERS[kind])
            raise ValueError(f"{whole!r}: {kind} has no {name or 'such parameter'}, only {known}")
        if name in numbers:
            raise ValueError(f"{whole!r}: {name} is given twice")
        if not _NUMBER.fullmatch(number):
            raise ValueError(f"{whole!r}: {name} must be a number, not {number!r}")
        numbers[name] = float(number)
    return numbers


def _duration_ms(text: str, whole: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{whole!r}: {error}") from None
