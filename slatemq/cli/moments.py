"""Types of options that say when (`+5m`, `now`), and how retries wait (`exponential:1s..10m`)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import slatemq
from slatemq.cli.durations import format_duration, parse_duration
from slatemq.cli.parameters import Parsed, parse_time

if TYPE_CHECKING:
    from slatemq._admin.queue_models import Backoff

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
    """Milliseconds since 1970, given relative to now: each run makes another time of it."""


def _when(text: str) -> int:
    if text.startswith("+"):
        return FromNow(_now_ms() + _duration_ms(text[1:], text))
    return parse_time(text, "or +5m for 5 minutes from now")


def _start(text: str) -> int | Literal["now", "beginning"]:
    if text == "now":
        return "now"
    if text == "beginning":
        return "beginning"
    if text.startswith("-"):
        return max(_now_ms() - _duration_ms(text[1:], text), 0)
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


WHEN = Parsed("time", _when)
START = Parsed("start", _start)
BACKOFF = Parsed("backoff", _backoff)


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


def _now_ms() -> int:
    return int(time.time() * 1000)
