"""The partition that a call is for, as its metadata says: the queue may have moved meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

from slatemq.errors import PARTITION, InvalidArgument

_named: ContextVar[str] = ContextVar("named_partition", default="")


def note_partition(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Keeps what the metadata of a call names, for the task that serves the call."""
    for key, value in metadata:
        if key == PARTITION:
            _named.set(value if isinstance(value, str) else value.decode("latin-1"))


def named_partition(queue_id: str) -> int | None:
    """The partition of this queue that the call is for; None where it names none.

    Raises InvalidArgument.
    """
    named = _named.get()
    if not named:
        return None
    of, _, index = named.partition("/")
    if not (index.isascii() and index.isdigit() and len(index) <= 4):
        raise InvalidArgument(PARTITION, "must be <queue ID>/<index of the partition>")
    return int(index) if of == queue_id else None
