"""Bucket numbers: the last part of every active, done and failed key.

    bucket (u64)      | priority u8 (56-63) | kind 2 bits (54-55) | order 54 bits (0-53) |
    order (54 bits)   | epoch 5 bits (49-53) | milliseconds 43 bits (6-48) | n 6 bits (0-5) |

Numbers compare as (priority, kind, epoch, ms, n) do. Done and failed buckets have priority and
kind 0. All functions raise ValueError for a part out of bounds.
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


class BucketKind(IntEnum):
    """What an active bucket holds. 3 is not in use."""

    READY = 0
    TIMED = 1
    IN_FLIGHT = 2


class Order(NamedTuple):
    """An order taken apart: the queue's incarnation, milliseconds since 1970, and a counter."""

    epoch: int
    ms: int
    n: int


class Bucket(NamedTuple):
    """A bucket number taken apart."""

    priority: int
    kind: BucketKind
    order: int


def _within(name: str, number: int, maximum: int) -> int:
    if not 0 <= number <= maximum:
        raise ValueError(f"{name} = {number} is not within 0..{maximum}")
    return number


def order_of(epoch: int, ms: int, n: int) -> int:
    """The order made of these parts."""
    if not (0 <= epoch <= MAX_EPOCH and 0 <= ms <= MAX_ORDER_MS and 0 <= n <= MAX_ORDER_N):
        _within("epoch", epoch, MAX_EPOCH)
        _within("ms", ms, MAX_ORDER_MS)
        _within("n", n, MAX_ORDER_N)
    return (epoch << 43 | ms) << 6 | n


def last_order(epoch: int) -> int:
    """The highest order of an epoch, where a scan of the epoch's buckets ends."""
    return order_of(epoch, MAX_ORDER_MS, MAX_ORDER_N)


def split_order(order: int) -> Order:
    """The inverse of `order_of`."""
    _within("order", order, MAX_ORDER)
    return Order(order >> 49, order >> 6 & MAX_ORDER_MS, order & MAX_ORDER_N)


def bucket_number(priority: int, kind: BucketKind, order: int) -> int:
    """The bucket number made of these parts."""
    if not (0 <= priority <= MAX_PRIORITY and 0 <= kind <= 2 and 0 <= order <= MAX_ORDER):
        _within("priority", priority, MAX_PRIORITY)
        _within("kind", kind, 2)
        _within("order", order, MAX_ORDER)
    return (priority << 2 | kind) << ORDER_BITS | order


def split_bucket(number: int) -> Bucket:
    """The inverse of `bucket_number`; a number of kind 3 is refused too."""
    _within("bucket", number, MAX_BUCKET)
    kind = BucketKind(number >> ORDER_BITS & 3)
    return Bucket(number >> 56, kind, number & MAX_ORDER)
