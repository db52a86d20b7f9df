"""Lease tokens as consumers see them, and who may use them.

<shard, hex>-<lease, 16 hex digits>        e.g. 0-0123456789abcdef
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from libs.access.current import require
from services.broker.core.lease_table import LeaseTable
from slatemq.errors import InvalidArgument, PermissionDenied

_TOKEN = re.compile(r"([0-9a-f]{1,4})-([0-9a-f]{16})")


def token_text(shard: int, lease: int) -> str:
    return f"{shard:x}-{lease:016x}"


def parse_token(text: str, field: str) -> tuple[int, int]:
    """Shard and lease; InvalidArgument naming `field` when it is not a token."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise InvalidArgument(field, "is not a lease token", reason="NOT_A_LEASE_TOKEN")
    return int(match[1], 16), int(match[2], 16)


def token_parts(shard: int, leases: Sequence[int]) -> tuple[bytes, list[bytes]]:
    """The tokens of many leases of this shard, in ASCII: what all begin with, and their ends."""
    digits = struct.pack(f">{len(leases)}Q", *leases).hex(",", 8).encode()
    return b"%x-" % shard, digits.split(b",") if leases else []


def parse_tokens(texts: Sequence[str], shard: int) -> Sequence[int] | None:
    """The leases of many tokens; None when one of them is not a token of this shard.

    Looks at all of them in a row, not at each: lines of one width, each with the shard in front.
    """
    count, prefix = len(texts), f"{shard:x}-"
    width = len(prefix) + 17
    lines = "\n".join((*texts, ""))
    if len(lines) != width * count or lines != lines.lower():
        return None
    if any(lines[at::width] != sign * count for at, sign in enumerate(prefix)):
        return None
    try:
        # Passes over white space: as many bytes as there should be are made by digits alone.
        digits = bytes.fromhex(lines.replace(prefix, ""))
    except ValueError:
        return None
    if len(digits) != 8 * count or lines[width - 1 :: width] != "\n" * count:
        return None
    return struct.unpack(f">{count}Q", digits)


def denied_queues(leases: LeaseTable, tokens: Sequence[int]) -> dict[str, PermissionDenied]:
    """The queues of running leases from which the caller may not consume, each with the error.

    A lease token is not to be guessed, but it can be passed on, and outlives a change of the
    policy.
    """
    denied = {}
    for queue_id in leases.queue_ids(tokens):
        try:
            require("consume", queue_id)
        except PermissionDenied as error:
            denied[queue_id] = error
    return denied
