"""Log entries as messages, for tests: TailLog sends them as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libs.storage.records.metadata import MessageMetadata, decode_log_entry, encode_log_entry
from slatemq.v1.ingest_pb2 import LogEntry


def logged(
    message_id: int, headers: Mapping[str, str] | None = None, **facts: Any
) -> MessageMetadata:
    """A message of the log: `facts` of MessageMetadata are 0 or none unless they are named."""
    plain = {"created_at_ms": 0, "received_at_ms": 0, "visible_at_ms": 0, "retention_s": 0}
    return MessageMetadata(message_id, headers=headers or {}, **{**plain, **facts})


@dataclass
class DecodedEntry:
    """A log entry and its messages."""

    sequence: int
    messages: list[MessageMetadata] = field(default_factory=list)

    @classmethod
    def of(cls, entry: LogEntry) -> DecodedEntry:
        """The same entry, decoded."""
        return cls(entry.sequence, decode_log_entry(entry.value))

    def encoded(self) -> LogEntry:
        """The same entry as TailLog sends it."""
        return LogEntry(sequence=self.sequence, value=encode_log_entry(self.messages))
