"""The filters of redrives, and what they see of a dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from libs.filters import CONTENT_VARIABLES, Facts, Filter, context, timestamp
from libs.filters.engine import cel
from libs.filters.signatures import Type
from libs.storage.records.queues import FailedMessage
from slatemq.v1.message_pb2 import Message

DEAD_LETTER_VARIABLES: Final[Mapping[str, Type]] = {
    **CONTENT_VARIABLES,
    "message_id": "int",
    "reason": "string",
    "attempts": "int",
    "failed_at": "timestamp",
}
"""What a redrive's filter sees."""


@lru_cache(maxsize=128)
def dead_letter_filter(source: str) -> Filter:
    """A redrive's filter; raises FilterError."""
    return Filter(source, DEAD_LETTER_VARIABLES)


def seen(dead_letter: FailedMessage, content: Message) -> cel.Context:
    more = {
        "reason": dead_letter.reason,
        "attempts": dead_letter.attempts,
        "failed_at": timestamp(dead_letter.failed_at_ms),
    }
    facts = Facts(
        dict(content.headers),
        content.created_at_ms,
        content.received_at_ms,
        len(content.payload),
        message_id=content.message_id,
    )
    return context(facts, DEAD_LETTER_VARIABLES, more)
