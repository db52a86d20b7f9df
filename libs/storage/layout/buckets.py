"""Bucket numbers: the last part of every active, done and failed key.

    bucket (u64)      | priority u8 (56-63) | kind 2 bits (54-55) | order 54 bits (0-53) |
    order (54 bits)   | epoch 5 bits (49-53) | milliseconds 43 bits (6-48) | n 6 bits (0-5) |

Numbers sort like (priority, kind, epoch, ms, n). Done and failed buckets have priority and kind 0.
All functions raise ValueError for a part out of bounds.

The milliseconds of a timed bucket are the time at which its messages fall due, and many commits may
add messages for one time. So the key of a timed bucket has a second number after the bucket number,
which its queue uses once: a new bucket never has the key of a stored one.

    lane order (103 bits)  | order 54 bits (49-102), with n = 0 | number 49 bits (0-48) |

In memory both are one lane order; the lane order of a ready bucket is its order.
"""

from enum import IntEnum
from typing import NamedTuple

ORDER_BITS = 54
MAX_ORDER = (1 << ORDER_BITS) - 1
MAX_BUCKET = (1 << 64) - 1
MAX_PRIORITY = 255  # the least urgent; 0 is the most urgent
MAX_EPOCH = (1 << 5) - 1
MAX_ORDER_MS = (1 << 43) - 1  # milliseconds since 1970: lasts until 2248
MAX_ORDER_N = (1 << 6) - 1
NUMBER_BITS = 49
MAX_NUMBER = (1 << NUMBER_BITS) - 1
MAX_LANE_ORDER = (1 << ORDER_BITS + NUMBER_BITS) - 1


class BucketKind(IntEnum):
    """What an active bucket contains. 3 is not in use."""

    READY = 0
    TIMED = 1
    IN_FLIGHT = 2


class Order(NamedTuple):
    """An order taken apart: the queue's incarnation, milliseconds since 1970, and a counter."""

    epoch: int
    ms: int
    n: int


class Bucket(NamedTuple):
    priority: int
    kind: BucketKind
    order: int


def _within(name: str, number: int, maximum: int) -> int:
    if not 0 <= number <= maximum:
        raise ValueError(f"{name} = {number} is not within 0..{maximum}")
    return number


def order_of(epoch: int, ms: int, n: int) -> int:
    if not (0 <= epoch <= MAX_EPOCH and 0 <= ms <= MAX_ORDER_MS and 0 <= n <= MAX_ORDER_N):
        _within("epoch", epoch, MAX_EPOCH)
        _within("ms", ms, MAX_ORDER_MS)
        _within("n", n, MAX_ORDER_N)
    return (epoch << 43 | ms) << 6 | n


def last_order(epoch: int) -> int:
    """The highest order of an epoch, where a scan of the epoch's buckets ends."""
    return order_of(epoch, MAX_ORDER_MS, MAX_ORDER_N)


def split_order(order: int) -> Order:
    _within("order", order, MAX_ORDER)
    return Order(order >> 49, order >> 6 & MAX_ORDER_MS, order & MAX_ORDER_N)


def number_of(order: int) -> int:
    """The order without its epoch, as a number that a queue uses once in each epoch."""
    return order & MAX_NUMBER


def lane_order(kind: BucketKind, order: int, number: int = 0) -> int:
    """The lane order of these parts; without a number, the first one of its time."""
    return order << NUMBER_BITS | number if kind == BucketKind.TIMED else order


def last_lane_order(kind: BucketKind, order: int) -> int:
    return lane_order(kind, order, MAX_NUMBER)


def order_in_time(kind: BucketKind, lane_order: int) -> int:
    """The order of a lane order, comparable with those of lanes of other kinds."""
    return lane_order >> NUMBER_BITS if kind == BucketKind.TIMED else lane_order


def bucket_number(priority: int, kind: BucketKind, order: int) -> int:
    if not (0 <= priority <= MAX_PRIORITY and 0 <= kind <= 2 and 0 <= order <= MAX_ORDER):
        _within("priority", priority, MAX_PRIORITY)
        _within("kind", kind, 2)
        _within("order", order, MAX_ORDER)
    return (priority << 2 | kind) << ORDER_BITS | order


def kind_of(number: int) -> int:
    """The kind of a bucket number, 3 included."""
    return number >> ORDER_BITS & 3


def split_bucket(number: int) -> Bucket:
    """The inverse of `bucket_number`; a number of kind 3 is refused too."""
    _within("bucket", number, MAX_BUCKET)
    kind = BucketKind(number >> ORDER_BITS & 3)
    return Bucket(number >> 56, kind, number & MAX_ORDER)
