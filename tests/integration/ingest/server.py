"""A real ingest server in this process, on port 0, and one in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from libs.serving import limits
from libs.serving.grpc_port import LateHandlers
from libs.serving.peers.channels import open_channel
from libs.serving.peers.elsewhere import Elsewhere
from libs.serving.peers.topology import TopologyServicer
from libs.serving.process.exits import EXIT_USAGE
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import Root, open_root
from libs.storage.records.metadata import MessageMetadata, decode_log_entry
from services.ingest.config import IngestConfig
from services.ingest.rpc.ingest import IngestServicer
from services.ingest.service import IngestProcess
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc, topology_pb2_grpc
from tests.configs import config_of
from tests.integration.waiting import WAIT_SECONDS
from tests.log_entries import DecodedEntry
from tests.ready_process import create_subprocess
from tests.stored_messages import StoredMessages

ROOT = Path(__file__).resolve().parents[3]


class Ingest:
    """A client of one ingest server; raises slatemq.errors."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = ingest_pb2_grpc.IngestServiceStub(channel)

    @classmethod
    @asynccontextmanager
    async def at(cls, address: str) -> AsyncIterator[Ingest]:
        async with open_channel(address) as channel:
            yield cls(channel)

    async def publish(self, *messages: ingest_pb2.PublishRun, request_id: str = "") -> list[int]:
        request = ingest_pb2.PublishRequest(runs=messages, request_id=request_id)
        with raising_slatemq_errors():
            return list((await self.stub.Publish(request, timeout=30)).message_ids)

    async def send(self, *payloads: bytes, request_id: str = "", **headers: str) -> list[int]:
        messages = [message(payload, **headers) for payload in payloads]
        return await self.publish(*messages, request_id=request_id)

    async def read(self, *ids: int, max_bytes: int = 0, with_etags: bool = False) -> StoredMessages:
        request = ingest_pb2.BatchGetMessagesRequest(
            message_ids=ids, max_bytes=max_bytes, with_etags=with_etags
        )
        with raising_slatemq_errors():
            return StoredMessages.of(await self.stub.BatchGetMessages(request, timeout=30))

    async def payloads(self, *ids: int) -> list[bytes]:
        answer = await self.read(*ids)
        assert not answer.missing_ids
        return [one.payload for one in answer.messages]

    async def status(self) -> ingest_pb2.GetLogStatusResponse:
        with raising_slatemq_errors():
            answer: ingest_pb2.GetLogStatusResponse = await self.stub.GetLogStatus(
                ingest_pb2.GetLogStatusRequest()
            )
            return answer

    async def tail(self, after: int = 0, count: int = 1) -> list[DecodedEntry]:
        """The next `count` entries of the log."""
        call = self.stub.TailLog(ingest_pb2.TailLogRequest(after_sequence=after), timeout=30)
        entries: list[DecodedEntry] = []
        with raising_slatemq_errors():
            async for update in call:
                entries += map(DecodedEntry.of, update.entries)
                if len(entries) >= count:
                    break
        call.cancel()
        return entries

    async def log(self) -> list[MessageMetadata]:
        """Every message in the log up to where it ends now."""
        durable = (await self.status()).durable_sequence
        found: list[MessageMetadata] = []
        call = self.stub.TailLog(ingest_pb2.TailLogRequest(), timeout=30)
        with raising_slatemq_errors():
            async for update in call:
                for entry in update.entries:
                    found += decode_log_entry(entry.value)
                # Where the last messages are removed, a heartbeat says that there are no more.
                if not update.entries or found[-1].message_id >= durable:
                    break
        call.cancel()
        return found


def message(payload: bytes = b"", **headers: str) -> ingest_pb2.PublishRun:
    return ingest_pb2.PublishRun(payloads=[payload], headers=headers)


class Server:
    """The process's own parts on a server of this process."""

    def __init__(
        self, config: IngestConfig, telemetry: Telemetry, root: Root | None = None
    ) -> None:
        self.gate = Gate(config.concurrent_calls_max)
        self.service = IngestProcess(config, telemetry, root or open_root(config.root))
        self.address = ""
        self._server = grpc.aio.server(
            interceptors=[
                CallGuard(
                    self.gate,
                    telemetry,
                    elsewhere=Elsewhere(self.service.directory, self.service.grpc_services),
                )
            ],
            options=limits.server_options(config.instance.payload_bytes_max),
        )
        self._handlers = LateHandlers()
        self._server.add_generic_rpc_handlers((self._handlers,))

    async def start(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        await self.service.start(self.address, self.address)
        self.service.add_to(self._handlers.registry)
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(
            TopologyServicer(self.service.directory), self._handlers.registry
        )
        self.gate.open()

    @property
    def servicer(self) -> IngestServicer:
        assert self.service._servicer is not None
        return self.service._servicer

    @property
    def commits(self) -> GroupCommit:
        assert self.service._shard is not None
        return self.service._shard.publisher.commits

    async def stop(self) -> None:
        await self.service.drain()
        await self._server.stop(5)
        await self.service.stop()


@asynccontextmanager
async def serving(
    root: str | Root = "memory:///", telemetry: Telemetry | None = None, **settings: Any
) -> AsyncIterator[Ingest]:
    """An ingest on the root of this URL, or on one that outlives it."""
    url, opened = (root, None) if isinstance(root, str) else ("memory:///", root)
    config = config_of(IngestConfig, root=url, **settings)
    server = Server(config, telemetry or Telemetry(), opened)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield Ingest(channel)
    finally:
        await server.stop()


@asynccontextmanager
async def process(
    root: str, ready_file: Path, *flags: str, module: str = "services.ingest"
) -> AsyncIterator[tuple[Any, str]]:
    """An ingest in a process of its own, and its address; killed at the end if it still runs.

    Its log is beside the ready file, and ends with `.log`.
    """
    _forget(ready_file)
    command = ["-m", module, "--root", root, "--ready-file", str(ready_file), *flags]
    with ready_file.with_suffix(".log").open("wb") as log:
        started = await create_subprocess(sys.executable, *command, cwd=ROOT, stderr=log)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while (address := _address(ready_file)) is None:
                assert started.returncode is None, "ended before it served"
                await asyncio.sleep(0.01)
        yield started, address
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def refused_start(data: Path, config: Path) -> str:
    """What an ingest says that ends at its start for a wrong setting of this file."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.ingest", "--root", data.as_uri(), "--port", "0"),
        *("--config", str(config)),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            _, said = await started.communicate()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
    assert started.returncode == EXIT_USAGE
    return said.decode()


def _forget(ready_file: Path) -> None:
    ready_file.unlink(missing_ok=True)


def _address(ready_file: Path) -> str | None:
    return str(json.loads(ready_file.read_text())["peer_address"]) if ready_file.exists() else None
