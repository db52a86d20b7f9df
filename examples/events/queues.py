"""The queue of events that an example consumes from, where `queue.backend` is `slatemq`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import slatemq
from slatemq.errors import AlreadyExists

ATTEMPTS_MAX = 65_535
"""For consumers that can do nothing without an event: they try for ever."""


async def ensure_queue(
    client: slatemq.Client, queue_id: str, prefix: str, types: Sequence[str], **settings: Any
) -> None:
    """Create the queue, with these settings, or change the filter of the one that is there.

    `prefix` is the setting `queue.slatemq.queue_prefix`; no `types` means all of them.
    """
    wanted = f'headers["slatemq-events"] == {json.dumps(prefix)}'
    if types:
        wanted += f" && headers.type in {json.dumps(list(types))}"
    try:
        await client.create_queue(queue_id, filter=wanted, **settings)
    except AlreadyExists:
        await client.update_queue(queue_id, filter=wanted)


def parser(program: str, description: str | None, queue_id: str) -> argparse.ArgumentParser:
    """What the command lines have in common."""
    made = argparse.ArgumentParser(
        prog=f"python -m examples.events.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    endpoint = os.environ.get("SLATEMQ_ENDPOINT") or "127.0.0.1:7420"
    made.add_argument("--endpoint", default=endpoint, help="any process of SlateMQ: HOST:PORT")
    made.add_argument("--queue", default=queue_id, help="its queue of events (%(default)s)")
    made.add_argument(
        "--prefix", default="slatemq", help="queue.slatemq.queue_prefix of the instance"
    )
    return made
