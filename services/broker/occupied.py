"""Which milliseconds beyond the cached part of a lane may have buckets: a map of bits.

A delayed message needs to know what its millisecond holds already. To ask the database costs some
hundred microseconds each; of most milliseconds it is known here that nothing is there. A bit stands
for every millisecond that is the same modulo the size of the map, and is never taken back: so it
says "nothing" for certain, and "something" perhaps.
"""

from __future__ import annotations

from weakref import WeakSet

from libs.storage.buckets import MAX_ORDER_N

MAP_BYTES = 2 << 20
"""Of one lane's map: 16 million milliseconds, some five hours, apart from one another."""

MAPS_MAX = 16
"""Maps in memory at most (32 MB); lanes beyond that ask the database."""

_SHIFT = MAX_ORDER_N.bit_length()


class Occupied:
    """The map of one lane."""

    __slots__ = ("__weakref__", "_bits")

    def __init__(self) -> None:
        self._bits = bytearray(MAP_BYTES)

    def add(self, order: int) -> None:
        """Notes that the millisecond of this order has a bucket."""
        place = (order >> _SHIFT) % (MAP_BYTES * 8)
        self._bits[place >> 3] |= 1 << (place & 7)

    def may_have(self, order: int) -> bool:
        """Whether the millisecond of this order may have a bucket."""
        place = (order >> _SHIFT) % (MAP_BYTES * 8)
        return bool(self._bits[place >> 3] >> (place & 7) & 1)


def take_map() -> Occupied | None:
    """A map for a lane of which everything is in memory at this moment, while there are any."""
    if len(_in_use) >= MAPS_MAX:
        return None
    taken = Occupied()
    _in_use.add(taken)
    return taken


_in_use: WeakSet[Occupied] = WeakSet()
