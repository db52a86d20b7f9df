"""The audit log of `audit_log`, fed from Redis Streams, where `queue.backend` is `redis`.

A consumer group keeps what was read and not acknowledged. This program is the only consumer of its
group, always under the same name: what it had when it was killed it reads again at its start, by
asking for the entries behind 0 in place of new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import asyncio as aioredis
from redis import exceptions

from examples.events.audit_log import BATCH, AuditLog
from slatemq.errors import InvalidArgument
from slatemq.events import Event, decode_event

log = logging.getLogger("audit_log_redis")

CONSUMER = "audit-log"
BLOCK_MS = 5_000
DOWN_SECONDS = 1.0

STREAM_LOST = ("UNBLOCKED", "NOGROUP")
"""How errors begin whose cause is that the stream, and so the group, was removed."""


async def run(url: str, prefix: str, group: str, folder: Path) -> None:
    """Append until ended, through absences of Redis."""
    client = aioredis.Redis.from_url(url, protocol=2, socket_timeout=2 * BLOCK_MS / 1000)
    with AuditLog(folder) as audit_log:
        while True:
            try:
                await _consume(client, f"{prefix}:events", group, audit_log)
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                log.warning("Redis does not answer: %s", error)
            except exceptions.ResponseError as error:
                if not str(error).startswith(STREAM_LOST):
                    raise
                log.warning("the stream was removed, and begins again: %s", error)
            await asyncio.sleep(DOWN_SECONDS)


async def _consume(client: Any, stream: str, group: str, audit_log: AuditLog) -> None:
    try:
        # From the first entry that Redis still has; with "$" from the next one.
        await client.xgroup_create(stream, group, id="0", mkstream=True)
    except exceptions.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    behind = "0"
    while True:
        answer = await client.xreadgroup(
            group, CONSUMER, {stream: behind}, count=BATCH, block=BLOCK_MS
        )
        entries = answer[0][1] if answer else []
        if not entries:
            behind = ">"  # Nothing is left from before: new ones, from now on.
            continue
        await asyncio.to_thread(audit_log.append, events_of(entries))
        await client.xack(stream, group, *(entry_id for entry_id, _ in entries))


def events_of(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Event]:
    """The events of entries; what is not an event is logged, and left out."""
    events = []
    for entry_id, fields in entries:
        if not fields:
            continue  # It was removed meanwhile.
        try:
            events.append(decode_event(fields.get(b"data", b"")))
        except InvalidArgument as error:
            log.error("entry %s is not an event: %s", entry_id.decode(), error)
    return events


def main() -> None:
    """The command."""
    flags = argparse.ArgumentParser(
        prog="python -m examples.events.audit_log_redis",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--url", default="redis://localhost:6379", help="of Redis (%(default)s)")
    flags.add_argument("--prefix", default="slatemq", help="queue.redis.stream_prefix")
    flags.add_argument("--group", default="audit-log", help="its consumer group (%(default)s)")
    flags.add_argument("folder", type=Path, help="where the files are")
    given = flags.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(run(given.url, given.prefix, given.group, given.folder))
    except BlockingIOError:
        sys.exit(f"audit_log_redis: another process writes into {given.folder}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
