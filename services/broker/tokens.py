"""Lease tokens as consumers see them: the broker shard, then the lease.

<shard, hex>-<lease, 16 hex digits>        e.g. 0-0123456789abcdef
"""

from __future__ import annotations

import re

from slatemq.errors import InvalidArgument

_TOKEN = re.compile(r"([0-9a-f]{1,4})-([0-9a-f]{16})")


def token_text(shard: int, lease: int) -> str:
    """The token of a lease of this shard."""
    return f"{shard:x}-{lease:016x}"


def parse_token(text: str, field: str) -> tuple[int, int]:
    """Shard and lease; InvalidArgument naming `field` when it is no token at all."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise InvalidArgument(field, "is not a lease token", reason="NOT_A_LEASE_TOKEN")
    return int(match[1], 16), int(match[2], 16)
