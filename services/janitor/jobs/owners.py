"""The owners of the databases, for a task of Spark that sends them what it has found.

Who they are and where is in the topology, which the task reads itself. Every call may be repeated,
so one that fails for now is, for a while; then the task fails, and the job with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from libs.serving import limits
from libs.serving.access import inherited_tls
from libs.serving.peers.calls import Backoff
from libs.serving.peers.channels import Channels, inherited
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import StoreUnavailable
from services.janitor.asking import asking, is_moving
from slatemq.errors import Aborted, DeadlineExceeded, ResourceExhausted, Unavailable

log = logging.getLogger(__name__)

CALL_S: Final = 60.0
CALL_BYTES_A_S: Final = 1 << 20
"""How long a call may take: a minute, and as long as its request at this pace: an owner may have to
store what it brings."""

PATIENCE_S: Final = 120.0
"""A process that is killed is back in seconds, one that moves in a minute."""

_PASSING: Final = (
    Unavailable,
    ResourceExhausted,
    DeadlineExceeded,
    Aborted,
    StoreUnavailable,
)

T = TypeVar("T")
Method = Callable[[grpc.aio.Channel], Callable[..., Awaitable[T]]]
"""Such as `lambda channel: PurgeServiceStub(channel).PurgeMessages`."""


class Owners:
    """Calls the owners, for code without an event loop; made by `owners_of`."""

    def __init__(self, root: Root, runner: asyncio.Runner, patience_s: float) -> None:
        self.root = root
        self._runner = runner
        self._patience_s = patience_s
        self._directory = TopologyDirectory(root.objects)
        # However large payloads may be here: an owner bounds what it takes.
        self._channels = Channels(
            self._directory,
            payload_bytes_max=limits.PAYLOAD_BYTES_CEILING,
            carrier=inherited(),
            tls=inherited_tls(os.environ),
        )

    def call(
        self, service: str, shard: int, method: Method[T], request: Message, queue_id: str = ""
    ) -> T:
        """Call an owner, repeatedly while it is down. Raises SlateMQError, StorageError.

        While the queue with this ID is moving, that is raised at once: minutes may pass.
        """
        return self._runner.run(self._patiently(service, shard, method, request, queue_id))

    def run(self, work: Awaitable[T]) -> T:
        """Wait for something else: an object, a snapshot."""

        async def waited() -> T:
            return await work

        return self._runner.run(waited())

    async def _patiently(
        self, service: str, shard: int, method: Method[T], request: Message, queue_id: str
    ) -> T:
        until = time.monotonic() + self._patience_s
        backoff = Backoff()
        while True:
            try:
                with asking(service, shard):
                    stub_method = method(await self._channels.to(service, shard))
                    timeout_s = CALL_S + request.ByteSize() / CALL_BYTES_A_S
                    return await stub_method(request, timeout=timeout_s)
            except _PASSING as error:
                if time.monotonic() > until or is_moving(error, queue_id):
                    raise
                log.info("trying again: %s", error)
            await asyncio.sleep(backoff.next_seconds())

    async def close(self) -> None:
        await self._channels.close()
        await self._directory.close()


@contextmanager
def owners_of(root: str, patience_s: float = PATIENCE_S) -> Iterator[Owners]:
    with asyncio.Runner() as runner:
        owners = Owners(open_root(root), runner, patience_s)
        try:
            yield owners
        finally:
            runner.run(owners.close())
