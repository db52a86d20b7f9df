"""The error of a bad filter or priority."""

from __future__ import annotations

__all__ = ["FilterError"]


class FilterError(ValueError):
    """The expression is invalid at `position`.

    Attributes:
        message: What is wrong, for people.
        position: Line and column, both from 1, counted in characters.
        offset: The number of characters before that place.
    """

    def __init__(self, message: str, position: tuple[int, int] = (1, 1), offset: int = 0) -> None:
        super().__init__(f"line {position[0]}, column {position[1]}: {message}")
        self.message = message
        self.position = position
        self.offset = offset
