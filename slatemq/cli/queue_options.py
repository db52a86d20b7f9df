"""A queue on the command line: the options for its settings, and the tables that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from slatemq._counts import counted
from slatemq.cli.parameters import (
    BACKOFF,
    DURATION,
    FOREVER,
    SECONDS,
    Number,
    Parsed,
    format_backoff,
    format_duration,
    format_time,
)

if TYPE_CHECKING:
    from slatemq._admin.queue_models import Counts, Queue

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_PRIORITY = "128"
DEFAULT_BACKOFF = "exponential:1s..10m,multiplier=5,jitter=0.5"

CEL = Parsed("cel", str)


class Setting(NamedTuple):
    """A setting of a queue: an option of `queue create` and `update`, and a row of `queue show`."""

    option: str
    type: click.ParamType[Any]
    help: str
    default: str

    @property
    def keyword(self) -> str:
        """Its name in the calls of the client."""
        return self.option.replace("-", "_")

    def shown(self, one: Queue) -> str:
        """Its value in a queue, as the option takes it."""
        if self.option == "priority":
            return priority_of(one)
        unit, form = _SHOWN.get(self.type, ("", str))
        return form(getattr(one, self.keyword + unit))


_SHOWN: dict[click.ParamType[Any], tuple[str, Callable[[Any], str]]] = {
    DURATION: ("_ms", format_duration),
    SECONDS: ("_s", lambda length_s: format_duration(length_s * 1000) if length_s else FOREVER),
    BACKOFF: ("", format_backoff),
}
"""By type the unit in the field of Queue, and what makes its value text."""

SETTINGS = (
    Setting("filter", CEL, "Which messages it takes.", "the header `queue` is NAME"),
    Setting("priority", CEL, "Priority, 0 to 255, 0 the most urgent.", DEFAULT_PRIORITY),
    Setting("fallback-priority", Number(0, 255), "Priority where the expression fails.", "128"),
    Setting("max-attempts", Number(1, 65_535), "Claims before a message fails.", "5"),
    Setting("lease", DURATION, "How long a claim holds a message.", "30s"),
    Setting("max-lease", DURATION, "The longest lease that a claim can ask for.", "12h"),
    Setting("max-total-lease", DURATION, "The longest time that one claim can hold.", "12h"),
    Setting("default-delay", DURATION, "Delay messages without a delay of their own.", "0"),
    Setting("backoff", BACKOFF, "How long messages wait after a failure.", DEFAULT_BACKOFF),
    Setting("done-retention", SECONDS, "How long done messages stay listed.", "1d"),
    Setting("failed-retention", SECONDS, "How long dead letters stay listed.", "forever"),
    Setting(
        "max-in-flight", Number(1, 1_000_000), "The most messages claimed at a time.", "100000"
    ),
)


def settings_options(default_text: Callable[[str], str]) -> Callable[[F], F]:

    def add(function: F) -> F:
        for one in reversed(SETTINGS):
            text = one.help + default_text(one.default)
            function = click.option(f"--{one.option}", type=one.type, help=text)(function)
        return function

    return add


COUNTS = ("available", "delayed", "in flight", "done", "failed", "archived")


def queue_fields(one: Queue) -> dict[str, Any]:
    return {**asdict(one), "priority": priority_of(one)}


def priority_of(one: Queue) -> str:
    """The expression of a queue's priority, which the server leaves empty for the default."""
    return one.priority or DEFAULT_PRIORITY


def count_cells(one: Queue) -> list[int]:
    return cells_of(one.counts)


def cells_of(counts: Counts) -> list[int]:
    return [getattr(counts, f"{name.replace(' ', '_')}_count") for name in COUNTS]


OPEN = "open"
"""The state of a queue that works normally, which a list need not show."""


def state_of(one: Queue) -> str:
    if one.missing_partitions:
        return "partitions missing"
    if "paused" in one.settings_differ:
        return "paused in part"
    if one.settings_differ:
        return "settings differ"
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
        *(
            [("settings that differ", ", ".join(one.settings_differ))]
            if one.settings_differ
            else []
        ),
        *((setting.option.replace("-", " "), setting.shown(one)) for setting in SETTINGS),
        *((name, str(count)) for name, count in counts),
        ("oldest claimable", "-" if age_ms is None else format_duration(age_ms)),
        *_quarantine_rows(one),
        *_replay_rows(one),
        *_place_rows(one),
        ("created", format_time(one.created_at_ms)),
        ("updated", format_time(one.updated_at_ms)),
        ("etag", one.etag),
    ]


def _place_rows(one: Queue) -> list[tuple[str, str]]:
    if not one.partitions_count:
        return [("broker shard", str(one.broker_shard))]
    return [
        ("partitions", str(one.partitions_count)),
        ("ordering header", one.ordering_header or "-"),
    ]


def partition_rows(one: Queue) -> list[list[object]]:
    """The partitions of a queue with their counts, those that were not found, too."""
    rows: list[list[object]] = []
    for index in range(one.partitions_count):
        part = one.partitions.get(index)
        if part is None:
            rows.append([index, "-", "missing", *["-"] * len(COUNTS)])
        else:
            state = "paused" if part.paused else OPEN
            rows.append([index, part.broker_shard, state, *cells_of(part.counts)])
    return rows


def priority_rows(one: Queue) -> list[tuple[int, int, int]]:
    return [
        (priority, counts.available_count, counts.delayed_count)
        for priority, counts in sorted(one.counts.by_priority.items())
    ]


def missing_queues(shards: Iterable[int]) -> str:
    """That brokers did not list their queues: they are down, late, or refused it for now."""
    named = [str(shard) for shard in sorted(shards)]
    if len(named) == 1:
        return f"broker shard {named[0]} did not list its queues: they are missing"
    return f"broker shards {', '.join(named)} did not list their queues: they are missing"


def _quarantine_rows(one: Queue) -> Iterator[tuple[str, str]]:
    if one.quarantine is not None:
        yield "in quarantine since", format_time(one.quarantine.since_ms)
        yield "in quarantine for", one.quarantine.reason


def _replay_rows(one: Queue) -> Iterator[tuple[str, str]]:
    if one.replay is None:
        return
    if one.replay.done:
        yield "replay", f"done, {counted(one.replay.replayed_count, 'message')}"
        return
    for part in one.replay.ranges:
        progress = _share(part.replayed_count, part.message_count)
        if part.waits_for_ingest:
            progress = f"waits for ingest {part.ingest_shard}"
        yield f"replay of log {part.ingest_shard}", progress


def _share(replayed_count: int, message_count: int | None) -> str:
    if message_count is None:
        return f"{counted(replayed_count, 'message')} so far"
    # Rounded down: 100 % means that nothing is left.
    percent = 100 * replayed_count // message_count if message_count else 100
    return f"{replayed_count} of {counted(message_count, 'message')} ({percent}%)"
