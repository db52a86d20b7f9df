"""Calls to owners, with errors that name the owner that is down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DeadlineExceeded, Unavailable


@contextmanager
def asking(service: str, shard: int) -> Iterator[None]:
    """Calls to one shard raise SlateMQError in this block, which names a shard that is down."""
    try:
        with raising_slatemq_errors():
            yield
    except (Unavailable, DeadlineExceeded) as error:
        name = f"{service} {shard}"
        if name not in error.message:
            what = "is away" if isinstance(error, Unavailable) else "does not answer"
            error.message = f"{name} {what}: {error.message}"
            error.args = (error.message,)
        raise
