"""A progress bar on stderr, where that is a terminal. rich is loaded only to show one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Update = Callable[..., None]
"""Takes what has changed: `completed`, `advance`, `total`, `description`, and the fields."""

Columns = Callable[[], "tuple[ProgressColumn, ...]"]
"""Makes the columns of a bar, and imports them."""


@contextmanager
def progress(
    is_wanted: bool, what: str, total: float | None, columns: Columns | None = None, **fields: Any
) -> Iterator[Update]:
    """Show a bar with these columns, or the usual ones; yields the function that updates it."""
    if not is_wanted or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    shown = columns() if columns is not None else _usual_columns(what)
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, **fields)
        yield partial(bar.update, task)


def _usual_columns(what: str) -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    return TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
