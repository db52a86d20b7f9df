"""Options that say when: `+5m`, `now`, `beginning`; and how retries wait: `exponential:1s..10m`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import click

import slatemq
from slatemq.cli.durations import format_duration, parse_duration
from slatemq.cli.parameters import TIME

if TYPE_CHECKING:
    from slatemq._admin.queue_models import Backoff, BackoffKind

NO_BACKOFF = "none"

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


class FromNow(int):
    """Milliseconds since 1970, given as so long from now: another time whenever it is given."""


class _When(click.ParamType[int]):
    """A point in time, or `+5m` for one so long from now; gives milliseconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, str) and value.startswith("+"):
            return FromNow(_now_ms() + _duration_ms(value[1:], value, self.fail))
        return _time(value, param, ctx, "or +5m for so long from now")


class _Start(click.ParamType[Any]):
    """`now`, `beginning`, a point in time, or `-2h` for one so long ago."""

    name = "start"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value in ("now", "beginning"):
            return value
        if isinstance(value, str) and value.startswith("-"):
            return max(_now_ms() - _duration_ms(value[1:], value, self.fail), 0)
        return _time(value, param, ctx, "or now, beginning, or -2h for so long ago")


def _time(value: Any, param: Any, ctx: Any, also: str) -> Any:
    try:
        return TIME.convert(value, param, ctx)
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message}, {also}", ctx=ctx, param=param) from error


class _Backoff(click.ParamType[Any]):
    """How a message waits after a failed attempt."""

    name = "backoff"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value == NO_BACKOFF:
            return slatemq.Backoff.none()
        waits, *parameters = value.split(",")
        found = _BACKOFF.fullmatch(waits)
        if found is None:
            self.fail(
                f"{value!r} is no backoff: write none, fixed:10s, linear:5s..1m or "
                "exponential:1s..10m, with ,multiplier=3 (exponential only) and ,jitter=0.5 "
                "behind it if need be",
                param,
                ctx,
            )
        # Loads protobuf now, and not before: the help of a command can do without.
        kind = slatemq.BackoffKind(found["kind"])
        initial_ms = _duration_ms(found["initial"], value, self.fail)
        longest = found["max"]
        if longest and kind == "fixed":
            self.fail(f"{value!r}: fixed is always the same wait, and has no longest", param, ctx)
        given = _numbers(kind, parameters, value, self.fail)
        if longest:
            given["max_ms"] = _duration_ms(longest, value, self.fail)
        if kind == "exponential":
            given.setdefault("multiplier", 2.0)
        return slatemq.Backoff(kind, initial_ms, **given)


WHEN = _When()
START = _Start()
BACKOFF = _Backoff()


def format_backoff(backoff: Backoff) -> str:
    """A backoff as it is written on the command line."""
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


def _numbers(
    kind: BackoffKind, parameters: Iterable[str], whole: str, fail: Callable[[str], NoReturn]
) -> dict[str, Any]:
    """The parameters behind a backoff's waits; one that its kind does not have is named."""
    given: dict[str, Any] = {}
    for parameter in parameters:
        name, _, number = parameter.partition("=")
        if name not in _PARAMETERS[kind]:
            known = " and ".join(_PARAMETERS[kind])
            fail(f"{whole!r}: {kind.value} has no {name or 'such parameter'}, only {known}")
        if name in given:
            fail(f"{whole!r}: {name} is given twice")
        if not _NUMBER.fullmatch(number):
            fail(f"{whole!r}: {name} must be a number, not {number!r}")
        given[name] = float(number)
    return given


def _duration_ms(text: str, whole: str, fail: Callable[[str], NoReturn]) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        fail(f"{whole!r}: {error}")


def _now_ms() -> int:
    return int(time.time() * 1000)
