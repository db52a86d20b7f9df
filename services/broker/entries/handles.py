"""Handles: the texts that say which entry of which queue is meant, and where to look first.

    <queue ID>/<message ID in hex>/<place>
    <queue ID>/<message ID in hex>/<index of the partition>:<place>   of a partitioned queue

    place   (empty)                     nowhere in particular: the queue is searched
            p<received at, ms>          published then
            l<lease token>              claimed under this lease
            a<priority>.<r|t>.<order>   available: ready or timed, in the bucket of this lane order
            i<order>                    in flight
            d<order>, f<order>          done or failed, in the row of this order
            x<order>                    archived, in the row of this order

Orders are in hex. What a place says may be over: it is where to begin.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from libs.storage.layout.buckets import MAX_ORDER, BucketKind, order_in_time
from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.broker.core.leases import LeaseOwner
from services.broker.core.waiting.bucket import Place
from services.broker.requests.queues import QUEUE_ID
from services.broker.requests.tokens import parse_token
from slatemq.errors import InvalidArgument

FIELD = "handle"

_KINDS = {"r": BucketKind.READY, "t": BucketKind.TIMED}
_MARKS = {kind: mark for mark, kind in _KINDS.items()}
_PLACE = re.compile(
    r"(?:(?P<partition>\d{1,4}):)?(?:p(?P<received>\d{1,15})|l(?P<lease>[A-Za-z0-9._-]{1,64})"
    r"|a(?P<priority>\d{1,3})\.(?P<kind>[rt])\.(?P<order>[0-9a-f]{1,26})"
    r"|(?P<list>[idfx])(?P<row>[0-9a-f]{1,16}))",
    re.ASCII,
)


class Handle(NamedTuple):
    """What a handle says; `mark` and `number` as above, `waiting` for the mark `a`."""

    queue_id: str
    message_id: int
    mark: str = ""
    number: int = 0
    waiting: Place | None = None
    partition: int | None = None


def parse_handle(text: str, shard: int) -> Handle:
    """A handle from its text; raises InvalidArgument. `shard` is this broker's number."""
    queue_id, _, rest = text.partition("/")
    number, _, place = rest.partition("/")
    if not QUEUE_ID.fullmatch(queue_id):
        raise InvalidArgument(FIELD, "must be <queue ID>/<message ID in hex>/<place>")
    if not re.fullmatch(r"[0-9a-f]{1,16}", number, re.ASCII) or int(number, 16) > MAX_MESSAGE_ID:
        raise InvalidArgument(FIELD, f"{number[:32]!r} is not a message ID in hex")
    handle = Handle(queue_id, int(number, 16))
    if not place:
        return handle
    found = _PLACE.fullmatch(place)
    if found is None:
        raise _no_place(place)
    if found["partition"]:
        handle = handle._replace(partition=int(found["partition"]))
    return _placed(handle, found, shard)


def _placed(handle: Handle, found: re.Match[str], shard: int) -> Handle:
    if found["received"]:
        return handle._replace(mark="p", number=int(found["received"]))
    if found["lease"]:
        its_shard, lease = parse_token(found["lease"], FIELD)
        # A lease of another shard says nothing here: as if there were no place.
        return handle._replace(mark="l", number=lease) if its_shard == shard else handle
    if found["priority"]:
        priority, order = int(found["priority"]), int(found["order"], 16)
        kind = _KINDS[found["kind"]]
        if priority <= 255 and order_in_time(kind, order) <= MAX_ORDER:
            return handle._replace(mark="a", waiting=Place(priority, kind, order))
    elif int(found["row"], 16) <= MAX_ORDER:
        return handle._replace(mark=found["list"], number=int(found["row"], 16))
    raise _no_place(found[0])


def _no_place(text: str) -> InvalidArgument:
    problem = f"ends with {text[:64]!r}, which is not a place of an entry: copy it from a listing"
    return InvalidArgument(FIELD, problem)


def waiting_handle(queue: LeaseOwner, message_id: int, place: Place) -> str:
    kind = _MARKS[place.kind]
    return f"{_head(queue, message_id)}a{place.priority}.{kind}.{place.order:x}"


def listed_handle(queue: LeaseOwner, message_id: int, mark: str, order: int) -> str:
    """The handle of an entry in flight (`i`), done (`d`), failed (`f`), archived (`x`)."""
    return f"{_head(queue, message_id)}{mark}{order:x}"


def _head(queue: LeaseOwner, message_id: int) -> str:
    partition = queue.settings.partition
    head = f"{queue.queue_id}/{message_id:x}/"
    return head if partition is None else f"{head}{partition.index}:"
