"""Refusals of the server in the words of the command line: its options, and lengths with units."""

from __future__ import annotations

import re

from slatemq.cli.durations import format_duration
from slatemq.errors import InvalidArgument

RESETTABLE = {
    name: name.replace("-", "_")
    for name in (
        "filter",
        "priority",
        "fallback-priority",
        "max-attempts",
        "lease",
        "max-lease",
        "max-total-lease",
        "default-delay",
        "backoff",
        "done-retention",
        "failed-retention",
        "max-in-flight",
    )
}
"""Options of queues that can be taken back, with their fields."""

_FIELD = re.compile(r"(?:queue|message)\.(?P<name>\w+?)(?P<unit>_ms|_s)?")

_OPTIONS = {*RESETTABLE.values(), "delay", "visible_at", "retention", "created_at", "dedupe_key"}

_BOUNDS = re.compile(r"(?P<least>\d+)\.\.(?P<most>\d+)(?P<why> \([^)]*\))?, not (?P<given>\d+)")


def in_options(error: InvalidArgument) -> str:
    """What was wrong, about the option that was given; as it is where none was."""
    found = _FIELD.fullmatch(error.field)
    if found is None or found["name"] not in _OPTIONS:
        return error.message
    option = "--" + found["name"].replace("_", "-")
    rule = error.description
    if found["unit"]:
        scale = 1 if found["unit"] == "_ms" else 1000

        def lengths(bounds: re.Match[str]) -> str:
            least, most, given = (
                format_duration(int(bounds[name]) * scale) for name in ("least", "most", "given")
            )
            return f"{least} to {most}{bounds['why'] or ''}, not {given}"

        rule = _BOUNDS.sub(lengths, rule)
    return f"{option}: {rule}"
