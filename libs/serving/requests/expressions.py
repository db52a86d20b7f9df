"""Expressions in requests: what is wrong with one, and where, in the same words for all callers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from libs.filters import FilterError
from slatemq.errors import InvalidArgument


@contextmanager
def checking_expression(field: str) -> Iterator[None]:
    """Makes the FilterError of an expression an InvalidArgument that names the field."""
    try:
        yield
    except FilterError as error:
        line, column = error.position
        raise InvalidArgument(
            field,
            str(error),
            reason="INVALID_EXPRESSION",
            metadata={"line": str(line), "column": str(column)},
        ) from error
