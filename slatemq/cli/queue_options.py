"""A queue on the command line: the options for its settings, and the tables that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slatemq.cli.durations import format_duration
from slatemq.cli.moments import BACKOFF, format_backoff
from slatemq.cli.parameters import DURATION, SECONDS, WORDS

if TYPE_CHECKING:
    from slatemq._admin.queue_models import Queue

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_PRIORITY = "128"
DEFAULT_BACKOFF = "exponential:1s..10m,multiplier=5,jitter=0.5"

_PRIORITY, _IN_FLIGHT = click.IntRange(0, 255), click.IntRange(1, 1_000_000)
_ATTEMPTS = click.IntRange(1, 65_535)

_SETTINGS: tuple[tuple[str, click.ParamType[Any], str | None, str, str], ...] = (
    ("--max-in-flight", _IN_FLIGHT, "N", "The most messages claimed at a time.", "100000"),
    ("--failed-retention", SECONDS, None, "How long dead letters stay listed.", "0: forever"),
    ("--done-retention", SECONDS, None, "How long done messages stay listed.", "1d"),
    ("--backoff", BACKOFF, None, "How long messages wait after a failure.", DEFAULT_BACKOFF),
    ("--default-delay", DURATION, None, "Delay messages without a delay of their own.", "0"),
    ("--max-total-lease", DURATION, None, "The longest time that one claim can hold.", "12h"),
    ("--max-lease", DURATION, None, "The longest lease that a claim can ask for.", "12h"),
    ("--lease", DURATION, None, "How long a claim holds a message.", "30s"),
    ("--max-attempts", _ATTEMPTS, "N", "Claims before a message fails.", "5"),
    ("--fallback-priority", _PRIORITY, "N", "Priority where --priority fails.", "128"),
    ("--priority", WORDS, "CEL", "Priority, 0 to 255, 0 the most urgent.", DEFAULT_PRIORITY),
    ("--filter", WORDS, "CEL", "Which messages it takes.", "the header `queue` is NAME"),
)


def settings_options(default_text: Callable[[str], str]) -> Callable[[F], F]:

    def add(function: F) -> F:
        for name, kind, metavar, what, default in _SETTINGS:
            text = what + default_text(default)
            function = click.option(name, type=kind, metavar=metavar, help=text)(function)
        return function

    return add


COUNTS = ("available", "delayed", "in flight", "done", "failed", "archived")


def queue_fields(one: Queue) -> dict[str, Any]:
    return {**asdict(one), "priority": priority_of(one)}


def priority_of(one: Queue) -> str:
    """The expression of a queue's priority, which the server leaves empty for the default."""
    return one.priority or DEFAULT_PRIORITY


def count_cells(one: Queue) -> list[int]:
    return [getattr(one.counts, f"{name.replace(' ', '_')}_count") for name in COUNTS]


OPEN = "open"
"""The state of a queue that works normally, which a list need not show."""


def state_of(one: Queue) -> str:
    if one.paused:
        return "paused"
    return "quarantine" if one.quarantine else OPEN


def settings_rows(one: Queue) -> list[tuple[str, str]]:
    """All of a queue for people, except the counts by priority."""
    counts = zip(COUNTS, count_cells(one), strict=True)
    age_ms = one.counts.oldest_claimable_age_ms
    return [
        ("queue", one.queue_id),
        ("state", state_of(one)),
        ("filter", one.filter),
        ("priority", priority_of(one)),
        ("fallback priority", str(one.fallback_priority)),
        ("max attempts", str(one.max_attempts)),
        ("backoff", format_backoff(one.backoff)),
        ("lease", format_duration(one.lease_ms)),
        ("max lease", format_duration(one.max_lease_ms)),
        ("max total lease", format_duration(one.max_total_lease_ms)),
        ("default delay", format_duration(one.default_delay_ms)),
        ("done retention", _retention(one.done_retention_s)),
        ("failed retention", _retention(one.failed_retention_s)),
        ("max in flight", str(one.max_in_flight)),
        *((name, str(count)) for name, count in counts),
        ("oldest claimable", "-" if age_ms is None else format_duration(age_ms)),
        *_quarantine_rows(one),
        *_replay_rows(one),
        ("broker shard", str(one.broker_shard)),
        ("created", format_time(one.created_at_ms)),
        ("updated", format_time(one.updated_at_ms)),
        ("etag", one.etag),
    ]


def priority_rows(one: Queue) -> list[tuple[int, int, int]]:
    return [
        (priority, counts.available_count, counts.delayed_count)
        for priority, counts in sorted(one.counts.by_priority.items())
    ]


def format_time(time_ms: int) -> str:
    """RFC 3339, UTC."""
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _retention(length_s: int) -> str:
    return format_duration(length_s * 1000) if length_s else "forever"


def _quarantine_rows(one: Queue) -> Iterator[tuple[str, str]]:
    if one.quarantine is not None:
        yield "in quarantine since", format_time(one.quarantine.since_ms)
        yield "in quarantine for", one.quarantine.reason


def _replay_rows(one: Queue) -> Iterator[tuple[str, str]]:
    if one.replay is None:
        return
    if one.replay.done:
        yield "replay", f"done, {_messages(one.replay.replayed_count)}"
        return
    for part in one.replay.ranges:
        progress = _share(part.replayed_count, part.message_count)
        if part.waits_for_ingest:
            progress = f"waits for ingest {part.ingest_shard}"
        yield f"replay of log {part.ingest_shard}", progress


def _share(replayed_count: int, message_count: int | None) -> str:
    if message_count is None:
        return f"{_messages(replayed_count)} so far"
    # Rounded down: 100 % means that nothing is left.
    percent = 100 * replayed_count // message_count if message_count else 100
    return f"{replayed_count} of {_messages(message_count)} ({percent}%)"


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"
