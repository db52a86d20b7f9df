"""Sets of message IDs that take little memory: most IDs follow one another."""

from __future__ import annotations

from array import array
from bisect import bisect_right


class IdRuns:
    """IDs that were added in ascending order, as runs; membership takes a bisection."""

    def __init__(self) -> None:
        self._firsts = array("Q")
        self._lasts = array("Q")
        self.count = 0

    def add(self, message_id: int) -> None:
        if self._lasts and self._lasts[-1] == message_id - 1:
            self._lasts[-1] = message_id
        else:
            self._firsts.append(message_id)
            self._lasts.append(message_id)
        self.count += 1

    def __contains__(self, message_id: int) -> bool:
        at = bisect_right(self._firsts, message_id) - 1
        return at >= 0 and message_id <= self._lasts[at]

    @property
    def last(self) -> int:
        return self._lasts[-1] if self._lasts else 0
