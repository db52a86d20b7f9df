"""Charts as SVG, drawn here: small enough for a phone, with the numbers in their titles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import date
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 360
"""About that of a phone: text keeps its size there."""

HEIGHT: Final = 190
LEFT: Final = 48
TOP: Final = 8
BOTTOM: Final = 20
ROW: Final = 24
NAME_LENGTH: Final = 22

Format = Callable[[float], str]


class Series(NamedTuple):
    """Values by day; None for a day without one."""

    name: str
    values: Sequence[float | None]


def bars(days: Sequence[date], series: Sequence[Series], record: Format) -> str:
    """A bar for each series side by side, day by day."""
    top = _rounded(max((value or 0 for one in series for value in one.values), default=0))
    parts = _frame([(share, record(top * share)) for share in (0, 0.5, 1)], days)
    slot = (WIDTH - LEFT) / len(days)
    width = max(slot * 0.8 / len(series), 1)
    for number, one in enumerate(series):
        for at, value in enumerate(one.values):
            if value:
                x = LEFT + at * slot + slot * 0.1 + number * width
                height = max((HEIGHT - TOP - BOTTOM) * value / top, 1)
                parts.append(
                    f'<rect x="{x:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{width:.1f}" '
                    f'height="{height:.1f}" fill="var(--c{number + 1})">'
                    f"<title>{days[at]}: {record(value)} {escape(one.name)}</title></rect>"
                )
    return _drawn(parts, HEIGHT) + (_key(series) if len(series) > 1 else "")


def lines(days: Sequence[date], series: Sequence[Series], record: Format) -> str:
    """Lines on a logarithmic scale that begins at 1."""
    highest = max((value or 0 for one in series for value in one.values), default=0)
    steps = max(1, math.ceil(math.log10(max(highest, 10))))
    every = math.ceil(steps / 4)
    parts = _frame([(at / steps, record(10**at)) for at in range(0, steps + 1, every)], days)
    slot = (WIDTH - LEFT) / len(days)
    for number, one in enumerate(series):
        points = [
            (LEFT + (at + 0.5) * slot, _y(math.log10(max(value, 1)) / steps), days[at], value)
            for at, value in enumerate(one.values)
            if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        colour = f"var(--c{number + 1})"
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}">'
            f"<title>{day}: {record(value)} ({escape(one.name)})</title></circle>"
            for x, y, day, value in points
        ]
    return _drawn(parts, HEIGHT) + _key(series)


def ranks(rows: Sequence[tuple[str, float]], record: Format) -> str:
    """Bars below each other, each with its name."""
    if not rows:
        return "<p>None.</p>"
    top = max(value for _, value in rows) or 1
    left, right = 130, 60
    parts = []
    for number, (name, value) in enumerate(rows):
        y = number * ROW
        short = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
        width = max((WIDTH - left - right) * value / top, 1 if value else 0)
        parts.append(
            f'<text x="0" y="{y + 16}">{escape(short)}<title>{escape(name)}</title></text>'
            f'<rect x="{left}" y="{y + 5}" width="{width:.1f}" height="14" fill="var(--c1)"/>'
            f'<text x="{left + width + 5:.1f}" y="{y + 16}">{record(value)}</text>'
        )
    return _drawn(parts, ROW * len(rows) + 4)


def _frame(marks: Sequence[tuple[float, str]], days: Sequence[date]) -> list[str]:
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"/>'
        f'<text x="{LEFT - 5}" y="{_y(share) + 4:.1f}" text-anchor="end">{text}</text>'
        for share, text in marks
    ]
    ends = [(LEFT, "start", days[0]), (WIDTH, "end", days[-1])] if len(days) > 1 else []
    return parts + [
        f'<text x="{x}" y="{HEIGHT - 5}" text-anchor="{anchor}">{day.isoformat()}</text>'
        for x, anchor, day in ends or [(LEFT, "start", days[0])]
    ]


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _rounded(value: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … that is not less."""
    if value <= 0:
        return 1
    step = 10.0 ** math.floor(math.log10(value))
    return next(step * factor for factor in (1, 2, 5, 10) if step * factor >= value)


def _drawn(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _key(series: Sequence[Series]) -> str:
    names = [
        f'<i style="background:var(--c{number})"></i>{escape(one.name)}'
        for number, one in enumerate(series, 1)
    ]
    return f'<div class="key">{"".join(names)}</div>'
