"""The keys of active buckets as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from libs.storage.arrow.columns import Ints
from libs.storage.database.binding import Row
from libs.storage.layout.buckets import MAX_ORDER, ORDER_BITS, BucketKind
from libs.storage.layout.keys import RecordType, queue_head


class ActiveKeys(NamedTuple):
    """For each bucket: its order, whether it is timed, and its number, 0 unless it is timed."""

    orders: Ints
    timed: npt.NDArray[np.bool_]
    numbers: Ints

    def at(self, places: Ints) -> ActiveKeys:
        return ActiveKeys(self.orders[places], self.timed[places], self.numbers[places])


def active_keys(rows: Sequence[Row], queue: str) -> ActiveKeys:
    head = len(queue_head(RecordType.ACTIVE, queue))
    # The key of a timed bucket has another number after the bucket number.
    words = b"".join([key[head:].ljust(16, b"\x00") for key, _ in rows])
    buckets, numbers = np.frombuffer(words, ">u8").astype(np.int64).reshape(-1, 2).T
    timed = np.equal(buckets >> ORDER_BITS & 3, BucketKind.TIMED)
    return ActiveKeys(buckets & MAX_ORDER, timed, numbers)
