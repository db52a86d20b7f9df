"""Which messages of one publish are stored already, by their dedupe keys."""

from __future__ import annotations

from collections.abc import Mapping

from services.ingest.write.dedupe_keys import DedupeKeys

__all__ = ["Duplicates"]

_BESIDE: int = 0
"""Stands for the ID of a message that is stored by the same publish."""


class Duplicates:
    """The dedupe keys of one publish, from its begin to its commit.

    Attributes:
        found: The places of those that are not to be stored, with the IDs that they get; complete
            once `take` was called.
    """

    def __init__(self, known: DedupeKeys, keys: Mapping[int, str]) -> None:
        self.found: dict[int, int] = {}
        self._known = known
        self._keys = keys
        self._names = dict.fromkeys(keys.values())

    async def hold(self) -> None:
        """Hold the keys, and read what is stored of them; `release` follows."""
        await self._known.hold(self._names)

    def release(self) -> None:
        self._known.release(self._names)

    def look(self, now_ms: int) -> None:
        """Find the messages that are stored already, beside those found before."""
        firsts: set[str] = set()
        for at, key in self._keys.items():
            if at in self.found:
                continue
            message_id = self._known.message_id(key, now_ms)
            if message_id:
                self.found[at] = message_id
            elif key in firsts:
                self.found[at] = _BESIDE
            firsts.add(key)

    def take(self, first_id: int, now_ms: int) -> list[tuple[str, int]]:
        """Let the keys of those that are stored, from this ID on, stand for them.

        Gives them for `DedupeKeys.put`.
        """
        taken: list[tuple[str, int]] = []
        before = sorted(self.found)
        passed = 0
        for at, key in self._keys.items():
            while passed < len(before) and before[passed] < at:
                passed += 1
            if at not in self.found:
                taken.append((key, first_id + at - passed))
                self._known.take(*taken[-1], now_ms)
            elif self.found[at] == _BESIDE:
                self.found[at] = self._known.message_id(key, now_ms)
        return taken

    def in_order(self) -> tuple[tuple[int, int], ...]:
        """The places and IDs of the duplicates, by ascending place."""
        return tuple(sorted(self.found.items()))
