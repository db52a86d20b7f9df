"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass

from libs.serving.process.config import ServingConfig
from libs.serving.process.settings import setting

SHARDS_MAX = 16_384
"""Ingest shards have 14 bits in a message ID."""

HOLD_MS_MAX = 1_500
"""Brokers wait a few seconds for a range with edits and moves; other routers of the log step in two
seconds after they saw it, or later."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServingConfig):
    """The SlateMQ router: judges published messages by the queues' filters."""

    shard: int = setting(
        "Number of this router, by which routers divide the logs. Two of the same number harm "
        "nothing, but do the work of one, and replace each other's address in the topology.",
        default=0,
        minimum=0,
        maximum=SHARDS_MAX - 1,
    )
    ingest_shards: str = setting(
        "Ingest shards whose logs this router reads, such as 0,2,8-15; empty means all there are. "
        "Routers that have the same ones divide them, and step in for one another.",
        default="",
    )
    hold_ms: int = setting(
        "How long a piece of a log without any match waits for one before it goes to the broker, "
        "in ms. Edits of messages just published, and moves of queues, wait for it.",
        default=1_000,
        minimum=0,
        maximum=HOLD_MS_MAX,
    )
    buffer_messages: int = setting(
        "Messages held for one log and one broker shard; some 200 bytes of memory each, and a "
        "kilobyte until they are judged.",
        default=262_144,
        minimum=1,
    )
    buffer_bytes: int = setting(
        "Bytes of log held for one log and one broker shard, as received; in memory they take "
        "several times as much until they are judged.",
        default=24 * 1024 * 1024,
        minimum=1,
    )
    buffers_bytes_max: int = setting(
        "Memory in bytes that messages of all logs take together until all broker shards have "
        "them, as the router reckons it. Beyond it each log is read on in small pieces.",
        default=256 * 1024 * 1024,
        minimum=1,
    )


def parse_shards(text: str) -> frozenset[int] | None:
    """The shards in a list such as `0,2,8-15`; None, for all, where it is empty.

    Raises:
        ValueError: The text is no such list, or a shard is not 0-16,383.
    """
    if not text.strip():
        return None
    shards: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"ingest_shards: {part!r} is neither a shard nor a range like 8-15")
        begin, end = int(first), int(last or first)
        if not begin <= end < SHARDS_MAX:
            raise ValueError(f"ingest_shards: {part!r} is not within 0-{SHARDS_MAX - 1}")
        shards.update(range(begin, end + 1))
    return frozenset(shards)
