"""What the keys of many active buckets say, as columns."""

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
    """Of each bucket: its order, whether it is timed, and its own number, which is 0 if not."""

    orders: Ints
    timed: npt.NDArray[np.bool_]
    numbers: Ints

    def at(self, places: Ints) -> ActiveKeys:
        """Those of the buckets in these places."""
        return ActiveKeys(self.orders[places], self.timed[places], self.numbers[places])


def active_keys(rows: Sequence[Row], queue: str) -> ActiveKeys:
    """What the keys of a queue's active buckets say."""
    head = len(queue_head(RecordType.ACTIVE, queue))
    # Behind the bucket number there is another one where the bucket is timed.
    words = b"".join([key[head:].ljust(16, b"\x00") for key, _ in rows])
    buckets, numbers = np.frombuffer(words, ">u8").astype(np.int64).reshape(-1, 2).T
    timed = np.equal(buckets >> ORDER_BITS & 3, BucketKind.TIMED)
    return ActiveKeys(buckets & MAX_ORDER, timed, numbers)
