"""Which broker may have a queue of a simulated world, and when: by its clock the queue goes.

This is what clients know: where a queue was created, and which moves they began. From the beginning
of a move until its answer either broker may have the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.simulation.judge import NEVER


@dataclass
class Stay:
    """A time during which a broker may have a queue, or a partition of one.

    Attributes:
        shard: Of the broker; None: any.
    """

    shard: int | None
    since_ms: int = 0
    until_ms: int = NEVER


ANYWHERE: Final = (Stay(None),)


class Places:
    """The stays of each partition; a queue without any has one, the first."""

    def __init__(self) -> None:
        self._stays: dict[str, list[list[Stay]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stays

    def created(self, name: str, shards: Sequence[int | None]) -> None:
        """A queue is on these shards, by partition; None: one that is not known."""
        self._stays[name] = [[Stay(shard)] for shard in shards]

    def moving(self, name: str, partition: int, shard: int | None, now_ms: int) -> None:
        """A partition may move from now on, to this shard; None: to any."""
        self._stays[name][partition].append(Stay(shard, now_ms))

    def moved(self, name: str, partition: int, shard: int, now_ms: int) -> None:
        """A partition is on this shard now, and on none where it was before."""
        stays = self._stays[name][partition]
        for stay in stays:
            if stay.shard != shard and stay.until_ms == NEVER:
                stay.until_ms = now_ms
        if all(stay.until_ms != NEVER for stay in stays):
            stays.append(Stay(shard, now_ms))

    def of(self, name: str, partition: int | None = None) -> Sequence[Stay]:
        """Those of a partition; None: those of all."""
        stays = self._stays.get(name)
        if not stays:
            return ANYWHERE
        if partition is None:
            return [stay for one in stays for stay in one]
        return stays[partition]
