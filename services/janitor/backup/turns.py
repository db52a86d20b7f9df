"""One backup at a time below a backup root: another one would remove what this one needs.

::

    <backup root>/turns/00000007.json   {"taker": "janitor-0, process 4711", "token": "5be4…",
                                         "began_at_ms": …, "renewed_count": 12, "ended": false}

The highest number has the turn. Its taker writes the object again and again until it has ended; one
whose object stays as it is was killed, and the next taker creates the next number, which only one
can. The clocks of two machines are not compared.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from libs.storage.database.roots import Root
from libs.storage.errors import ObjectNotFound, StorageError
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects
from slatemq.errors import FailedPrecondition, Unavailable

log = logging.getLogger(__name__)

TURNS: Final = "turns"

RENEW_S: Final = 5.0
"""How often a taker writes its object, and looks whether another one has the turn."""

LOOK_S: Final = 2.0

DEAD_LOOKS: Final = 30
"""Looks at an object that stays as it is until its taker counts as killed: a minute, twelve times
as long as between two of its writes."""


class Turn:
    """The turn of this process, once `begin` has got it.

    Attributes:
        number: Greater than those of all turns before.
    """

    def __init__(self, objects: Objects, number: int, now_ms: int) -> None:
        self.number = number
        self._objects = objects
        self._path = f"{TURNS}/{number:08d}.json"
        self._fields = {
            "taker": f"{socket.gethostname()}, process {os.getpid()}",
            "token": secrets.token_hex(8),
            "began_at_ms": now_ms,
        }
        self._checked_s = 0.0
        self._is_over = asyncio.Event()

    async def begin(self) -> bool:
        """Whether no other process has this turn. Raises StoreUnavailable."""
        self._checked_s = time.monotonic()
        return await self._objects.put_if_absent(self._path, self._encoded(0))

    async def check(self) -> None:
        """Raises Unavailable where another backup has the turn, since this one stood still."""
        if time.monotonic() - self._checked_s >= RENEW_S:
            await self.look()

    async def look(self) -> None:
        """Like `check`, also where the last look was just now."""
        paths = await self._objects.list(TURNS)
        if not paths or paths[-1] != self._path:
            raise Unavailable(
                "this backup stood still for a minute, and another one has begun since",
                reason="BACKUP_REPLACED",
            )
        self._checked_s = time.monotonic()

    async def renew(self) -> None:
        """Shows that this process lives, until `end` is called."""
        for renewed_count in itertools.count(1):
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._is_over.wait()
            try:
                await self._objects.put(
                    self._path, self._encoded(renewed_count, is_ended=self._is_over.is_set())
                )
            except StorageError as error:
                log.warning("the backup root cannot be written: %s", error)
            if self._is_over.is_set():
                return

    def end(self) -> None:
        self._is_over.set()

    def _encoded(self, renewed_count: int, *, is_ended: bool = False) -> bytes:
        fields = {**self._fields, "renewed_count": renewed_count, "ended": is_ended}
        return json.dumps(fields).encode()


@asynccontextmanager
async def turn(
    root: Root, now_ms: int, sleep: Callable[[float], Awaitable[None]]
) -> AsyncIterator[Turn]:
    """The turn to take a backup below this backup root.

    Raises FailedPrecondition (BACKUP_RUNNING) while another one is taken; it takes a minute to know
    that one was killed.
    """
    objects = root.objects
    paths = await objects.list(TURNS)
    last = paths[-1] if paths else f"{TURNS}/0.json"
    if paths and not await _is_over(objects, last, sleep):
        raise await _running(root, last)
    number = int(last.rpartition("/")[2].partition(".")[0]) + 1
    mine = Turn(objects, number, now_ms)
    if not await mine.begin():
        raise await _running(root, f"{TURNS}/{number:08d}.json")
    for path in paths:
        await objects.delete(path)
    renewing = asyncio.create_task(mine.renew())
    try:
        yield mine
    finally:
        mine.end()
        await asyncio.wait([renewing])


async def _is_over(objects: Objects, path: str, sleep: Callable[[float], Awaitable[None]]) -> bool:
    """Whether the taker of this object has ended, or was killed."""
    seen: bytes | None = None
    for _ in range(DEAD_LOOKS):
        try:
            data = await objects.get(path)
        except ObjectNotFound:
            return False  # The one that has the turn now has removed it.
        if _fields_of(data).get("ended"):
            return True
        if seen is not None and data != seen:
            return False
        seen = data
        await sleep(LOOK_S)
    log.warning("the backup before this one was killed: %s", path)
    return True


async def _running(root: Root, path: str) -> FailedPrecondition:
    try:
        fields = _fields_of(await root.objects.get(path))
    except ObjectNotFound:
        fields = {}
    return FailedPrecondition(
        "BACKUP_RUNNING",
        f"another backup is being taken into {root.url}, by {fields.get('taker', 'a process')}: "
        "wait until it has ended",
    )


def _fields_of(data: bytes) -> Mapping[str, Any]:
    try:
        fields = load_json(data)
    except ValueError:
        return {}  # Written by hand perhaps; it never changes, and so it is over.
    return fields if isinstance(fields, dict) else {}
