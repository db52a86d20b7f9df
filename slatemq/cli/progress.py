"""How far something is: a bar on stderr, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

Update = Callable[..., None]
"""Takes what has changed: `completed`, `advance`, `total`, `description`, and the fields."""


@contextmanager
def progress(
    is_wanted: bool,
    what: str,
    total: float | None,
    columns: tuple[str | ProgressColumn, ...] = (),
    **fields: Any,
) -> Iterator[Update]:
    """A bar with these columns, or the usual ones; gives what to tell how far it is."""
    console = Console(stderr=True)
    if not is_wanted or not console.is_terminal:
        yield lambda **_: None
        return
    usual = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*(columns or usual), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, **fields)
        yield partial(bar.update, task)
