"""Which ingest shard a dedupe key belongs to: the rule of `PublishRun.dedupe_keys`.

Rendezvous hashing: each shard draws a number for the key, the highest one has it. A new shard takes
over its share of the keys from all others, and no other key moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def dedupe_shard(key: str, shards: Iterable[int]) -> int:
    """The one of these ingest shards that the key belongs to; ValueError when there are none."""
    hashed = hashlib.blake2b(key.encode(), digest_size=8)

    def drawn(shard: int) -> tuple[bytes, int]:
        draw = hashed.copy()
        draw.update(shard.to_bytes(4, "big"))
        return draw.digest(), shard

    return max(map(drawn, shards))[1]
