"""The texts that name an entry (its handle) and prove a claim (its lease token).

A handle says where the broker looks for one message in one queue: `<queue>/<message ID>/<place>`,
the ID in hex. Without a place the broker searches the queue. The place of an entry of a partitioned
queue begins with the index of its partition: `2:f1a`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slatemq._checks import check_text, moved
from slatemq.errors import InvalidArgument


def handle_of(queue_id: str, message_id: int, place: str) -> str:
    """The handle of a message in a queue; without a place it costs a search of the queue."""
    known = f"{queue_id}/{message_id:x}"
    return f"{known}/{place}" if place else known


def queue_of_handle(handle: str) -> str:
    """The queue that a handle names; raises InvalidArgument for anything else."""
    check_text("handle", handle)
    queue_id, slash, rest = handle.partition("/")
    if not queue_id or not slash or not rest:
        raise InvalidArgument("handle", _FORM)
    return queue_id


def message_of_handle(handle: str) -> int:
    """The ID of the message that a handle names; raises InvalidArgument for anything else."""
    queue_of_handle(handle)
    number = handle.split("/")[1]
    if _NUMBER.fullmatch(number) is None:
        raise InvalidArgument("handle", _FORM)
    return int(number, 16)


def partition_of_handle(handle: str) -> int | None:
    """The partition that a handle names; None where it names none."""
    index, colon, _ = _place_of(handle).partition(":")
    return int(index) if colon and index.isascii() and index.isdigit() else None


def shard_of_handle(handle: str) -> int | None:
    """The broker shard of the lease that a handle names; None where it names none."""
    place = _place_of(handle)
    match = _TOKEN.fullmatch(place[1:]) if place.startswith("l") else None
    return int(match[1], 16) if match is not None else None


def _place_of(handle: str) -> str:
    """Empty where it has none."""
    return handle.split("/", 2)[2] if handle.count("/") > 1 else ""


def shard_of(token: str) -> int:
    """The broker shard that a lease token names; raises InvalidArgument for anything else."""
    check_text("lease_token", token)
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidArgument(
            "lease_token",
            "is not a lease token, which looks like 0-9d934e94a7438e3a",
            reason="NOT_A_LEASE_TOKEN",
        )
    return int(match[1], 16)


def places_by_shard(
    tokens: Sequence[str], heads: Sequence[str] | None = None
) -> tuple[dict[int, Sequence[int]], dict[int, InvalidArgument]]:
    """Where the tokens of each broker shard stand, and the errors of those that are not tokens.

    `heads`: those that speak for all, where the others only count on.
    """
    shard = _common_shard(tokens if heads is None else heads)
    if shard is not None:
        return {shard: range(len(tokens))}, {}
    places: dict[int, list[int]] = {}
    refused: dict[int, InvalidArgument] = {}
    for place, token in enumerate(tokens):
        try:
            places.setdefault(shard_of(token), []).append(place)
        except InvalidArgument as error:
            refused[place] = moved(error, f"lease_tokens[{place}]")
    return dict(places), refused


def _common_shard(tokens: Sequence[str]) -> int | None:
    """The shard that all of these name, as those of one claim do; None when they do not.

    Looking at each by itself takes five times as long.
    """
    try:
        match = _TOKENS.fullmatch("\n".join(tokens))
    except TypeError:
        return None
    # A text with a line break might look like two tokens.
    if match is None or match.string.count("\n") != len(tokens) - 1:
        return None
    return int(match[1], 16)


_FORM = "must be <queue>/<message ID in hex>/<place>"
_NUMBER = re.compile("[0-9a-f]{1,16}")
# The part after the shard is opaque to clients.
_TOKEN = re.compile(r"([0-9a-f]{1,8})-[A-Za-z0-9._-]{1,62}")
_TOKENS = re.compile(r"([0-9a-f]{1,8})-[A-Za-z0-9._-]{1,62}+(?:\n\1-[A-Za-z0-9._-]{1,62}+)*+")
