"""Messages of a queue file as an import sends them, with request IDs and dedupe keys.

These must be the same when the run after a kill sends a batch again, and differ for anything else
that is imported: files often begin alike, and are filled and emptied again. So they include the
secret of the run. Only a message with its ID, from an export, has the same key in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from slatemq import textqueue
from slatemq._consume.commands import Push
from slatemq.cli.files.queue_files import Content
from slatemq.models import OutgoingMessage


class Item(NamedTuple):
    """An entry of the file, and its message."""

    entry: textqueue.Entry
    content: Content


def push_of(queue_id: str, content: Content) -> Push:
    return Push(queue_id, content.payload, content.headers, retention=content.retention_s)


def outgoing_of(item: Item, secret: str) -> OutgoingMessage:
    """A publish; within the dedupe window an exported message is published once."""
    content = item.content
    return OutgoingMessage(
        content.payload,
        content.headers,
        content.created_at_ms,
        content.retention_s,
        dedupe_key="tq-" + _key(item, secret),
    )


def request_id(target: str, batch: Sequence[Item], secret: str) -> str:
    """Unique to this batch of this run, and this target."""
    digest = hashlib.blake2b(f"{target} {secret} ".encode(), digest_size=16)
    for item in batch:
        digest.update(_key(item, secret).encode())
    return digest.hexdigest()


def _key(item: Item, secret: str) -> str:
    """Identifies a message by its content, and its ID or else its place in the file."""
    entry, content = item
    name = f"in {secret} at {entry.offset}"
    if content.message_id:
        name = f"id {content.message_id} of {content.created_at_ms}"
    digest = hashlib.blake2b(f"{name} {sorted(content.headers.items())} ".encode(), digest_size=16)
    digest.update(content.payload)
    return digest.hexdigest()
