"""Owners that cannot read their tables: the store answers all but those reads.

After a start nothing is cached, so claims need reads, of queues and of payloads. A publish needs
none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import grpc.aio

from services.stack.process import until_serving
from slatemq.v1 import snapshot_pb2, snapshot_pb2_grpc
from tests.acceptance.local_stack import LocalStack, peer_address
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import LONG_LEASE_MS, PUBLISH_BATCH, Run, make_lines
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.faults.verified import faults_of
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

OWNERS = ("ingest", "broker")
TABLES = "/compacted/"
FAILURES = (Outcome.REFUSE, Outcome.RESET, Outcome.HANG)


async def _restart_from_tables(stack: LocalStack) -> None:
    """Kill the owners when all that they have is in tables."""
    for owner in OWNERS:
        async with grpc.aio.insecure_channel(await peer_address(stack, owner)) as channel:
            stub = snapshot_pb2_grpc.SnapshotServiceStub(channel)
            await stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest())
    killed = {owner: stack.signal(owner, signal.SIGKILL) for owner in OWNERS}
    for owner, pid in killed.items():
        await asyncio.to_thread(stack.wait_restarted, owner, pid)
        await until_serving(stack.endpoints[owner])


async def _routed(stubs: Stubs, entries: int) -> None:
    while sum(queue.counts.available_count for queue in await stubs.list_queues()) < entries:
        await asyncio.sleep(0.05)


async def _work(stack: LocalStack, store: FaultyStore, run: Run, seconds: float) -> None:
    messages = len(run.lines) - len(FAILURES)
    lines, extra = run.lines[:messages], run.lines[messages:]
    async with Stubs() as stubs:
        await stubs.connect(stack.endpoint)
        await run.create_queues(stubs)
        for begin in range(0, messages, PUBLISH_BATCH):
            await run.publish_batch(stubs, lines[begin : begin + PUBLISH_BATCH])
        await _routed(stubs, Run(lines).entries_count)
        await _restart_from_tables(stack)
        pids = stack.pids

        consuming: asyncio.Task[None] | None = None
        for outcome, line in zip(FAILURES, extra, strict=True):
            fault = Fault(outcome, "GET", TABLES)
            store.set(fault)
            consuming = consuming or asyncio.create_task(run.consume(stubs))
            while not fault.happened:
                assert not consuming.done(), "all was delivered without a read of a table"
                await asyncio.sleep(0.05)
            await run.publish_batch(stubs, [line])
            await asyncio.sleep(seconds)
            run.note_standstill()
            print(f"{outcome.value}: {fault.happened} reads of tables, a publish answered")
        store.set()
        assert consuming is not None
        await consuming
        await run.find_nothing_more(stubs)
        assert stack.pids == pids, "an owner has ended"


def run_failing_reads(folder: Path, messages: int, seconds: float) -> tuple[Run, list[str]]:
    """A workload that is consumed while reads of tables fail, each way for `seconds`.

    Also returns the faults of the store that is left. A wait that runs out ends the run early.
    """
    run = Run(make_lines(messages + len(FAILURES)), LONG_LEASE_MS)
    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with moto() as port, faulty_store(port) as store:
        url = root_url(store.port, "reads")
        with LocalStack(folder, "--store", url, ready=True) as stack:
            try:
                with run.ending_early():
                    asyncio.run(_work(stack, store, run, seconds))
            finally:
                store.set()
                print(stack.said)
        return run, faults_of(url)
