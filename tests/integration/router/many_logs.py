"""Many logs and many broker shards, most of which do not answer, around a real router process."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.layout.ids import message_id
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from slatemq.v1 import ingest_pb2
from tests.integration.router.peers import (
    LogMemory,
    MemoryBroker,
    MemoryIngest,
    Running,
    ShardMemory,
)

WAIT_SECONDS = 300
"""For what comes about within seconds, on a machine that has other things to do."""

QUEUE = "all"


class Sizes(NamedTuple):
    """How much there is.

    Attributes:
        logs_count: Logs.
        brokers_count: Broker shards, of which the first one answers.
        messages_count: Messages in each log. No two have the same headers.
        entry_messages: How many of them each entry has.
        answer_bytes: How much of a log is in one answer; an ingest puts 4 MiB into one.
    """

    logs_count: int
    brokers_count: int
    messages_count: int
    entry_messages: int
    answer_bytes: int = 4 << 20


class LongLog(MemoryIngest):
    """The log of one ingest shard, as it is stored."""

    def __init__(self, shard: int, sizes: Sizes) -> None:
        super().__init__(LogMemory(shard))
        self._sizes = sizes
        self.first = message_id(shard, 1)
        self.last = self.first + sizes.messages_count - 1
        self.is_full = asyncio.Event()
        """Until then it is empty."""

    @property
    def end(self) -> int:
        return self.last if self.is_full.is_set() else 0

    @functools.cache  # noqa: B019 - as long as the test
    def value(self, first: int) -> bytes:
        """The entry that begins with this message."""
        last = min(first + self._sizes.entry_messages - 1, self.last)
        return encode_log_entry(
            [
                MessageMetadata(
                    *(one, 1_000, 2_000, 0, 0),
                    {"customer": f"{one:020}", "kind": "order", "region": f"r{one % 9}"},
                    payload_bytes=5,
                )
                for one in range(first, last + 1)
            ]
        )

    def entries_after(self, position: int) -> Iterator[ingest_pb2.LogEntry]:
        passed = max(0, position + 1 - self.first) // self._sizes.entry_messages
        begin = self.first + passed * self._sizes.entry_messages
        for first in range(begin, self.last + 1, self._sizes.entry_messages):
            yield ingest_pb2.LogEntry(sequence=first, value=self.value(first))

    async def GetLogStatus(  # noqa: N802
        self, request: ingest_pb2.GetLogStatusRequest, context: Any
    ) -> ingest_pb2.GetLogStatusResponse:
        return ingest_pb2.GetLogStatusResponse(
            shard=self.memory.shard, durable_sequence=self.end, first_sequence=self.first
        )

    async def TailLog(  # noqa: N802
        self, request: ingest_pb2.TailLogRequest, context: Any
    ) -> AsyncIterator[ingest_pb2.TailLogResponse]:
        if not self.is_full.is_set():
            yield ingest_pb2.TailLogResponse(durable_sequence=self.end)
            await self.is_full.wait()
        response, size_bytes = ingest_pb2.TailLogResponse(durable_sequence=self.last), 0
        for entry in self.entries_after(request.after_sequence):
            response.entries.append(entry)
            size_bytes += len(entry.value)
            if size_bytes > self._sizes.answer_bytes:
                yield response
                response, size_bytes = ingest_pb2.TailLogResponse(durable_sequence=self.last), 0
        if response.entries:
            yield response
        while True:
            await asyncio.sleep(5)
            yield ingest_pb2.TailLogResponse(durable_sequence=self.last)


class ManyLogs:
    """The router's process, and the brokers.

    Attributes:
        process: The router.
        answering: The shard of the broker that answers.
        silent: Those of the others.
    """

    process: asyncio.subprocess.Process

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.answering = ShardMemory()
        self.silent: list[ShardMemory] = []
        self.brokers: list[MemoryBroker] = []
        self.logs: list[LongLog] = []

    def fill(self) -> None:
        """Let the logs have their messages."""
        for log in self.logs:
            log.is_full.set()

    def memory(self, what: str) -> int:
        """VmRSS or VmHWM of the router, in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024
        raise AssertionError(what)

    async def routed(self, shard: ShardMemory) -> None:
        """Wait until this broker has as many messages as there are."""
        wanted = self._sizes.logs_count * self._sizes.messages_count
        async with asyncio.timeout(WAIT_SECONDS):
            while len(shard.assigned.get(QUEUE, ())) < wanted:
                assert self.process.returncode is None, "the router ended"
                await asyncio.sleep(0.05)


@asynccontextmanager
async def many_logs(folder: Path, sizes: Sizes, *settings: str) -> AsyncIterator[ManyLogs]:
    """A router with these settings between all of them; all but one broker answer nothing."""
    (folder / "data").mkdir()
    root, ready = (folder / "data").as_uri(), folder / "ready"
    directory = TopologyDirectory(open_root(root).objects)
    command = [sys.executable, "-m", "services.router", "--parent-pid", str(os.getpid())]
    command += ["--root", root, "--ready-file", str(ready), *settings]
    async with AsyncExitStack() as stack:
        there = ManyLogs(sizes)
        for number in range(sizes.brokers_count):
            memory = ShardMemory(number) if number else there.answering
            await memory.set_queue(QUEUE, "true")
            broker = MemoryBroker(memory)
            there.brokers.append(broker)
            if number:
                broker.answering.clear()
                there.silent.append(memory)
            await _served(stack, Running(directory, broker))
        for shard in range(sizes.logs_count):
            there.logs.append(LongLog(shard, sizes))
            await _served(stack, Running(directory, there.logs[-1]))
        there.process = await asyncio.create_subprocess_exec(*command)
        stack.push_async_callback(_ended, there.process)
        async with asyncio.timeout(WAIT_SECONDS):
            while not ready.exists():
                assert there.process.returncode is None, "the router ended while starting"
                await asyncio.sleep(0.02)
        yield there


async def _served(stack: AsyncExitStack, running: Running) -> None:
    await running.start()
    stack.push_async_callback(running.stop)


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
        await process.wait()
