"""The live view as text, for a terminal of any size: what is shown, in which order.

::

    slatemq top  127.0.0.1:7420  12:30:05  every 2s          ─┐
    4 of 4 services serving, lag 0                             ├ head
    in 120/s  out 118/s  waiting 1203  in flight 40  failed 2 ─┘

    queue       in/s  out/s  retry/s  waiting ▼  …           ─┐ as many columns as fit,
    orders       120    118        0       1203  …            ─┘ as many rows as fit
    q quit  s sort  r reverse  / filter  p pause  ↑↓ scroll
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from slatemq._admin.rates import (
    UNKNOWN,
    QueueRates,
    Sample,
    lag_of,
    lags_of,
    rate_fields,
    rates_between,
    whole_lag,
)
from slatemq._counts import counted
from slatemq.cli.output import cut, printable
from slatemq.cli.queue_options import OPEN, missing_queues, state_of

if TYPE_CHECKING:
    from slatemq._admin.instance import Status
    from slatemq._admin.queue_models import Queue

NAME_WIDTH: Final = 12
"""Columns of numbers are left out until the names of queues have at least this width."""

LEAST_NAME_WIDTH: Final = 7
"""Of the column of names, however narrow the terminal is."""

NUMBER_WIDTH: Final = 6
"""Of numbers as they are shown."""

COUNT_SHOWN_MAX: Final = 99_999
"""Larger numbers are shown in thousands or millions."""

KEYS: Final = "q quit  s sort  r reverse  / filter  p pause  ↑↓ scroll"


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue: its state, what it holds, and what passes through it.

    Attributes:
        lag: Stored messages that are not yet routed to the queue's broker shard; of its
            partitions the most; None: unknown.
    """

    queue: Queue
    rates: QueueRates
    lag: int | None

    @property
    def name(self) -> str:
        state = state_of(self.queue)
        name = printable(self.queue.queue_id)
        return name if state == OPEN else f"{name} ({state})"

    def fields(self) -> dict[str, Any]:
        """For programs."""
        counts = self.queue.counts
        return {
            "queue_id": self.queue.queue_id,
            "state": state_of(self.queue),
            "broker_shard": self.queue.broker_shard,
            **rate_fields(self.rates),
            "available_count": counts.available_count,
            "delayed_count": counts.delayed_count,
            "in_flight_count": counts.in_flight_count,
            "failed_count": counts.failed_count,
            "oldest_claimable_age_ms": counts.oldest_claimable_age_ms,
            "lag_count": self.lag,
        }


class Column(NamedTuple):
    """A column of numbers: its head, its value in a row, and how that is shown."""

    head: str
    value: Callable[[QueueRow], float | None]
    shown: Callable[[float], str]


def short_count(count: float) -> str:
    """At most six characters."""
    if count <= COUNT_SHOWN_MAX:
        return f"{count:.0f}"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count / 1e3:.0f}k"


def short_rate(per_s: float) -> str:
    """At most six characters; what is not 0 is not shown as 0."""
    if 0 < per_s < 10:
        return f"{per_s:.1f}" if per_s >= 0.05 else "<0.1"
    return short_count(per_s)


def short_age(age_ms: float) -> str:
    """At most four characters."""
    seconds = age_ms / 1000
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


COLUMNS: Final = (
    Column("in/s", lambda row: row.rates.in_per_s, short_rate),
    Column("out/s", lambda row: row.rates.out_per_s, short_rate),
    Column("retry/s", lambda row: row.rates.retried_per_s, short_rate),
    Column("waiting", lambda row: row.queue.counts.available_count, short_count),
    Column("delayed", lambda row: row.queue.counts.delayed_count, short_count),
    Column("flight", lambda row: row.queue.counts.in_flight_count, short_count),
    Column("failed", lambda row: row.queue.counts.failed_count, short_count),
    Column("oldest", lambda row: row.queue.counts.oldest_claimable_age_ms, short_age),
    Column("lag", lambda row: row.lag, short_count),
)

BAD: Final = "red"
"""The style of what is wrong. In a terminal of few rows, that is shown in place of the title."""

BY_NAME: Final = -1
"""The place of the queues' names among the columns by which rows are sorted."""

LEFT_OUT_FIRST: Final = ("lag", "retry/s", "delayed", "failed", "flight", "oldest", "out/s", "in/s")

BY_WAITING: Final = [column.head for column in COLUMNS].index("waiting")


def rows_of(before: Sample | None, now: Sample) -> list[QueueRow]:
    """All queues of a sample, with their rates since the one before."""
    rates = rates_between(before, now)
    lags = lags_of(now.status)
    return [
        QueueRow(queue, rates.get(queue.queue_id, UNKNOWN), lag_of(queue, lags))
        for queue in now.status.queues
    ]


class Board:
    """What is shown, and how: changed by looks at the instance, and by keys.

    Attributes:
        is_paused: Whether the numbers stand still, and nothing is asked.
        problem: Why the last sample failed; empty when it did not.
    """

    def __init__(self, endpoint: str, interval: str) -> None:
        self.is_paused = False
        self.problem = ""
        self._title = f"slatemq top  {endpoint}"
        self._interval = interval
        self._sample: Sample | None = None
        self._at = ""
        self._rows: Sequence[QueueRow] = ()
        self._sort = BY_WAITING
        self._reverse = False
        self._filter = ""
        self._is_typing = False
        self._first = 0
        self._page = 1

    def update(self, sample: Sample) -> None:
        """Show another sample."""
        self._rows = rows_of(self._sample, sample)
        self._sample = sample
        self._at = datetime.now().astimezone().strftime("%H:%M:%S")
        self.problem = ""

    def press(self, key: str) -> bool:
        """Act on a key; False: it ends the view."""
        if self._is_typing:
            self._type(key)
            return True
        if key == "q":
            return False
        if key == "/":
            self._is_typing, self._filter, self._first = True, "", 0
        elif key == "escape":
            self._filter = ""
        elif key in ("p", " "):
            self.is_paused = not self.is_paused
        elif key == "r":
            self._reverse = not self._reverse
        elif key in ("s", "right", "S", "left"):
            step = 1 if key in ("s", "right") else -1
            self._sort = (self._sort + 1 + step) % (len(COLUMNS) + 1) - 1
        else:
            self._scroll(key)
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self._is_typing = False
            self._filter = self._filter if key == "enter" else ""
        elif key == "backspace":
            self._filter = self._filter[:-1]
        elif len(key) == 1:
            self._filter += key

    def _scroll(self, key: str) -> None:
        steps = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "pageup": -self._page,
            "pagedown": self._page,
        }
        self._first = 0 if key == "home" else max(0, self._first + steps.get(key, 0))

    def rows(self) -> list[QueueRow]:
        """The rows that match the filter, sorted: the largest first, names from a to z."""
        wanted = self._filter.lower()
        found = [row for row in self._rows if wanted in row.queue.queue_id.lower()]
        found.sort(key=lambda row: row.queue.queue_id, reverse=self._reverse)
        if self._sort != BY_NAME:
            value = COLUMNS[self._sort].value
            found.sort(key=lambda row: _number(value(row)), reverse=not self._reverse)
        return found

    def lines(self, width: int, height: int) -> list[Text]:
        """The whole view, in at most `width` columns and `height` rows."""
        title, state, sums = self._head()
        if height > 8:
            head = [title, state, sums, Text()]
        else:
            head = [state if state.style == BAD else title]
        rows = self.rows()
        self._page = max(1, height - len(head) - 2)
        self._first = max(0, min(self._first, len(rows) - self._page))
        shown = rows[self._first : self._first + self._page]
        table = self._table(shown, rows, width)
        table += [Text()] * (self._page + 1 - len(table))
        lines = [*head, *table, self._foot(len(rows), len(shown))]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines[:height]

    def _head(self) -> tuple[Text, Text, Text]:
        state = "PAUSED" if self.is_paused else f"every {self._interval}"
        title = Text(f"{self._title}  {self._at}  {state}", style="bold")
        if self._sample is None:
            return title, _state(None, self.problem), Text()
        return title, _state(self._sample.status, self.problem), Text(_sums(self._rows))

    def _table(self, shown: Sequence[QueueRow], rows: Sequence[QueueRow], width: int) -> list[Text]:
        longest = max([LEAST_NAME_WIDTH, *(cell_len(row.name) for row in rows)])
        columns = _fitting(width - min(longest, NAME_WIDTH), self._sort)
        widths = {one: _width(column) for one, column in columns.items()}
        left = width - sum(each + 2 for each in widths.values())
        name_width = min(longest, max(left, LEAST_NAME_WIDTH))
        arrow = "▲" if self._reverse != (self._sort == BY_NAME) else "▼"
        names = "queue" + (arrow if self._sort == BY_NAME else "")
        head = Text(names.ljust(name_width), style="bold")
        for one, column in columns.items():
            title = column.head + (arrow if one == self._sort else "")
            head.append("  ")
            head.append(title.rjust(widths[one]), style="reverse" if one == self._sort else "")
        return [head, *(_line(row, name_width, columns, widths) for row in shown)]

    def _foot(self, count: int, shown: int) -> Text:
        if self._is_typing:
            return Text(f"filter: {self._filter}▏  Enter keeps it, Esc clears it", style="reverse")
        filtered = f"  filter: {printable(self._filter)} (Esc clears it)" if self._filter else ""
        part = f"{self._first + 1}-{self._first + shown} of " if shown < count else ""
        return Text(f"{part}{counted(count, 'queue')}{filtered}  {KEYS}", style="dim")


def _state(status: Status | None, problem: str) -> Text:
    """How the processes are, and how far routing lags."""
    if problem or status is None:
        return Text(problem or "asking…", style=BAD if problem else "")
    down = {f"{one.service} {one.shard}": one.detail for one in status.services if not one.serving}
    bad = [f"down: {', '.join(down)}"] if down else []
    if status.unlisted_brokers:
        bad.append(missing_queues(status.unlisted_brokers))
    if bad:
        bad += (f"{name}: {printable(detail)}" for name, detail in down.items())  # may be long
        return Text("; ".join(bad), style=BAD)
    lag = whole_lag(lags_of(status))
    shown = "unknown" if lag is None else short_count(lag)
    notes = "".join(f"; {printable(one)}" for one in status.refusals)
    count = len(status.services)
    return Text(f"{count} of {count} services serving, lag {shown}{notes}")


def _sums(rows: Sequence[QueueRow]) -> str:
    heads = ("in/s", "out/s", "waiting", "flight", "failed")
    columns = {column.head: column for column in COLUMNS}
    parts = []
    for head in heads:
        values = [value for row in rows if (value := columns[head].value(row)) is not None]
        sum_shown = columns[head].shown(sum(values)) if values else "-"
        parts.append(f"{head} {sum_shown}")
    return "all queues:  " + "  ".join(parts)


def _fitting(width: int, sort: int) -> Mapping[int, Column]:
    """The columns of numbers for which there is room, by their places; that of the order stays."""
    kept = dict(enumerate(COLUMNS))
    for head in LEFT_OUT_FIRST:
        if sum(_width(column) + 2 for column in kept.values()) <= width:
            break
        place = next(one for one, column in enumerate(COLUMNS) if column.head == head)
        if place != sort:
            del kept[place]
    return kept


def _width(column: Column) -> int:
    return max(len(column.head) + 1, NUMBER_WIDTH)


def cell_of(column: Column, row: QueueRow) -> str:
    value = column.value(row)
    return "-" if value is None else column.shown(value)


def _line(
    row: QueueRow, name_width: int, columns: Mapping[int, Column], widths: Mapping[int, int]
) -> Text:
    name = cut(row.name, name_width)
    is_open = state_of(row.queue) == OPEN
    line = Text(name + " " * (name_width - cell_len(name)), style="" if is_open else "yellow")
    for one, column in columns.items():
        is_bad = column.head == "failed" and row.queue.counts.failed_count > 0
        line.append("  ")
        line.append(cell_of(column, row).rjust(widths[one]), style="red" if is_bad else "")
    return line


def _number(value: float | None) -> float:
    return -1.0 if value is None else value
