"""Messages of a queue file as what an import sends, and the names under which it may be repeated.

A name must be the same when a batch is sent again by the run after one that was killed, and another
for whatever else is imported: files often begin alike, and are filled and emptied again. So it has
the secret of the run in it. Only a message that has its ID, from an export, is the same everywhere.
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
    """An entry of the file, and what it says."""

    entry: textqueue.Entry
    content: Content


def push_of(queue_id: str, content: Content) -> Push:
    """For one queue alone."""
    return Push(queue_id, content.payload, content.headers, retention=content.retention_s)


def outgoing_of(item: Item, secret: str) -> OutgoingMessage:
    """For whatever queues want it; of an exported message one within the dedupe window."""
    content = item.content
    return OutgoingMessage(
        content.payload,
        content.headers,
        content.created_at_ms,
        content.retention_s,
        dedupe_key="tq-" + _key(item, secret),
    )


def request_id(target: str, batch: Sequence[Item], secret: str) -> str:
    """The same for the same batch of the same run, into the same queue."""
    digest = hashlib.blake2b(f"{target} {secret} ".encode(), digest_size=16)
    for item in batch:
        digest.update(_key(item, secret).encode())
    return digest.hexdigest()


def _key(item: Item, secret: str) -> str:
    """Names a message: by its ID, or its place in the file where it has none, and its content."""
    entry, content = item
    name = f"in {secret} at {entry.offset}"
    if content.message_id:
        name = f"id {content.message_id} of {content.created_at_ms}"
    digest = hashlib.blake2b(f"{name} {sorted(content.headers.items())} ".encode(), digest_size=16)
    digest.update(content.payload)
    return digest.hexdigest()
