"""The page of a report: one file without anything from elsewhere, for phones and large screens.

Charts are SVG, drawn here: small enough for a phone, with the numbers in their titles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from html import escape
from typing import Any, Final, NamedTuple

WIDTH: Final = 360
"""About that of a phone: text keeps its size there."""

HEIGHT: Final = 190
LEFT: Final = 64
"""The labels of an axis are in it: texts such as 47.7 MiB."""

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


ATTEMPTS: Final = (
    ("1", 1, 1),
    ("2", 2, 2),
    ("3", 3, 3),
    ("4_to_5", 4, 5),
    ("6_or_more", 6, 65_535),
)
"""How often an entry was claimed until it was acked or failed: classes, with their bounds."""

RANKS_SHOWN: Final = 10

Row = Mapping[str, Any]

_STYLE: Final = """\
:root{color-scheme:light dark;--ink:#1c2024;--soft:#60646c;--line:#d9d9e0;--paper:#fcfcfd;
--card:#fff;--c1:#3358d4;--c2:#18794e;--c3:#ce2c31;--c4:#8e4ec6}
@media(prefers-color-scheme:dark){:root{--ink:#edeef0;--soft:#b0b4ba;--line:#363a3f;--paper:#111113;
--card:#18191b;--c1:#9eb1ff;--c2:#3dd68c;--c3:#ff9592;--c4:#d19dff}}
*{box-sizing:border-box}body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--paper);
color:var(--ink);font:1rem/1.5 system-ui,sans-serif}h1{font-size:1.4rem;margin:.2rem 0}
h2{font-size:1.05rem;margin:0 0 .5rem}p{color:var(--soft);margin:.2rem 0 1rem}
.cards,.charts{display:grid;gap:.75rem;margin-bottom:.75rem}
.cards{grid-template-columns:repeat(auto-fit,minmax(9rem,1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr))}
.card,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.8rem}
.card b{display:block;font-size:1.3rem}.card span,.key{color:var(--soft);font-size:.85rem}
svg{display:block;width:100%;height:auto;max-width:36rem}svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}.key i{display:inline-block;width:.7rem;height:.7rem;border-radius:.15rem;
margin:0 .3rem 0 .7rem}.table{overflow-x:auto}table{border-collapse:collapse;width:100%;
font-variant-numeric:tabular-nums}th,td{padding:.35rem .6rem;text-align:right;white-space:nowrap;
border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left}"""

_CLAIM: Final = (("claim_ms_p50", "half"), ("claim_ms_p95", "95 %"), ("claim_ms_p99", "99 %"))
_ACK: Final = (("ack_ms_p50", "half"), ("ack_ms_p95", "95 %"), ("ack_ms_p99", "99 %"))
_FLOW: Final = (
    ("published_count", "published"),
    ("acked_count", "acked"),
    ("failed_count", "failed"),
)


def page(
    run: str, now_ms: int, rows: Sequence[Row], days_count: int, queues_count: int | None = None
) -> str:
    """The page for rows of `report.queue_days`; rows without a queue are of all together.

    `queues_count` is how many queues there are, where the rows are not of all.
    """
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    days = [now.date() - timedelta(days=back) for back in range(days_count - 1, -1, -1)]
    together = {row["day"]: row for row in rows if row["queue"] is None}
    queues: dict[str, list[Row]] = {}
    for row in rows:
        if row["queue"] is not None:
            queues.setdefault(row["queue"], []).append(row)
    some = queues_count is not None and queues_count > len(queues)
    text = f"<p>{len(queues)} of {queues_count}: the busiest, and those that wait the longest.</p>"
    title = f"SlateMQ, {days[0].isoformat()} to {days[-1].isoformat()}"
    return f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{_STYLE}
</style></head><body>
<h1>{title}</h1>
<p>As of {now:%Y-%m-%d %H:%M:%S} UTC. What is no longer kept is not counted. Run {escape(run)}.</p>
<div class="cards">{_cards(together.values(), now)}</div>
<div class="charts">{_charts(days, together, queues, now)}</div>
<section><h2>Queues</h2>{text if some else ""}
<div class="table">{_table(queues, now)}</div></section>
</body></html>
"""


_NUMBERS: Final = ("published", "bytes", "acked", "failed", "waiting", "oldest waits for")


def _numbers(rows: Iterable[Row], now: datetime) -> tuple[str, ...]:
    """What _NUMBERS names, of these rows together."""
    rows = list(rows)
    return (
        f"{_sum(rows, 'published_count'):,}",
        size(_sum(rows, "published_bytes")),
        f"{_sum(rows, 'acked_count'):,}",
        f"{_sum(rows, 'failed_count'):,}",
        f"{_sum(rows, 'waiting_count'):,}",
        _waited(rows, now),
    )


def _cards(rows: Iterable[Row], now: datetime) -> str:
    return "".join(
        f'<div class="card"><b>{value}</b><span>{name}</span></div>'
        for value, name in zip(_numbers(rows, now), _NUMBERS, strict=True)
    )


def _charts(
    days: Sequence[date],
    together: Mapping[date, Row],
    queues: Mapping[str, Sequence[Row]],
    now: datetime,
) -> str:
    def series(columns: Iterable[tuple[str, str]]) -> list[Series]:
        return [
            Series(name, [together[day][column] if day in together else None for day in days])
            for column, name in columns
        ]

    rows = list(together.values())
    attempts = [
        (
            name.replace("_to_", "–").replace("_or_more", " or more"),
            _sum(rows, f"attempts_{name}_count"),
        )
        for name, _, _ in ATTEMPTS
    ]
    waits = sorted(
        ((queue, _waited_ms(some, now)) for queue, some in queues.items()), key=lambda one: -one[1]
    )
    items = [
        ("Messages a day", bars(days, series(_FLOW), amount)),
        ("From publishing to the first claim", lines(days, series(_CLAIM), duration)),
        ("From publishing to the ack", lines(days, series(_ACK), duration)),
        ("Attempts until acked or failed", ranks(attempts, amount)),
        ("Bytes published a day", bars(days, series((("published_bytes", "bytes"),)), size)),
        (
            "Oldest waiting, by queue",
            ranks([one for one in waits if one[1]][:RANKS_SHOWN], duration),
        ),
    ]
    return "".join(f"<section><h2>{title}</h2>{chart}</section>" for title, chart in items)


def _table(queues: Mapping[str, Sequence[Row]], now: datetime) -> str:
    heads = ("queue", *_NUMBERS)
    lines_ = [(escape(queue), *_numbers(rows, now)) for queue, rows in sorted(queues.items())]
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines_)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _sum(rows: Iterable[Row], column: str) -> int:
    return sum(row[column] or 0 for row in rows)


def _waited_ms(rows: Iterable[Row], now: datetime) -> int:
    since = [row["oldest_waiting_at"] for row in rows if row["oldest_waiting_at"] is not None]
    # Spark gives times of its session's zone, UTC, without saying so.
    oldest = min((one if one.tzinfo else one.astimezone(UTC) for one in since), default=now)
    return max(0, int((now - oldest).total_seconds() * 1000))


def _waited(rows: Iterable[Row], now: datetime) -> str:
    waited_ms = _waited_ms(rows, now)
    return duration(waited_ms) if waited_ms else "–"


def amount(value: float) -> str:
    return _scaled(value, 1000, ("", "k", "M", "G"))


def size(value: float) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    unit = 0
    while value >= (step if value % 1 == 0 and not unit else ROUNDED) and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    return f"{_digits(value)}{units[unit]}"


ROUNDED: Final = 999.5
"""From here on three digits are too few."""


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < ROUNDED else f"{value:.0f}"


def duration(ms: float) -> str:
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= length:
            return f"{_digits(ms / length)} {unit}"
    return f"{ms:.0f} ms"
