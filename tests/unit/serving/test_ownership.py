"""What a process does that may have been replaced without knowing it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from libs.serving.peers.topology import CHANGE, Peer, TopologyDirectory
from libs.serving.process.ownership import STANDSTILL_S, Announcement, Ownership, Standstill
from libs.serving.requests.gate import Gate
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import Fenced, StoreUnavailable
from tests.manual_clock import ManualClock


class Proofs:
    """Proves when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = 0
        self.free = asyncio.Event()
        self.error: Exception | None = None

    def clock(self) -> float:
        return self.now_s

    async def prove(self) -> None:
        self.count += 1
        await self.free.wait()
        if self.error is not None:
            raise self.error


async def test_a_process_that_runs_has_nothing_to_prove() -> None:
    proofs = Proofs()
    standstill = Standstill(proofs.prove, proofs.clock)
    for _ in range(20):
        proofs.now_s += STANDSTILL_S / 2
        assert standstill.proof() is None
    assert proofs.count == 0


async def test_after_a_standstill_every_call_waits_for_one_proof() -> None:
    proofs = Proofs()
    standstill = Standstill(proofs.prove, proofs.clock)
    proofs.now_s += 2 * STANDSTILL_S
    waiting = [standstill.proof(), standstill.proof()]
    await asyncio.sleep(0)
    assert all(one is not None and not one.done() for one in waiting)
    proofs.free.set()
    for one in waiting:
        assert one is not None
        await one
    assert proofs.count == 1
    await asyncio.sleep(0)
    assert standstill.proof() is None


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_standstill_during_a_proof_has_one_of_its_own_that_all_calls_wait_for(
    is_seen: bool,
) -> None:
    proofs = Proofs()
    standstill = Standstill(proofs.prove, proofs.clock)
    proofs.now_s += 2 * STANDSTILL_S
    waiting = [standstill.proof()]
    await asyncio.sleep(0)
    assert proofs.count == 1

    # When the process stands still again, and the proof that it had begun before comes about
    proofs.now_s += 2 * STANDSTILL_S
    if is_seen:
        waiting.append(standstill.proof())
    proofs.free.set()
    proofs.free.clear()
    for _ in range(10):
        await asyncio.sleep(0)

    # Then another one is begun, and none is answered before
    assert proofs.count == 2
    assert all(one is not None and not one.done() for one in waiting)
    proofs.free.set()
    for one in waiting:
        assert one is not None
        await one
    assert proofs.count == 2
    assert standstill.proof() is None


async def test_whichever_looks_first_the_standstill_is_seen() -> None:
    # Given a look that comes before the first call
    proofs = Proofs()
    standstill = Standstill(proofs.prove, proofs.clock)
    proofs.now_s += 2 * STANDSTILL_S
    watching = asyncio.create_task(standstill.watch())
    await asyncio.sleep(0)
    # Then the call waits all the same
    waiting = standstill.proof()
    assert waiting is not None
    proofs.free.set()
    await waiting
    watching.cancel()


async def test_a_process_that_was_replaced_meanwhile_answers_nothing_any_more() -> None:
    proofs = Proofs()
    proofs.free.set()
    proofs.error = Fenced("another process has opened this database")
    gate = Gate(1)
    gate.standstill = Standstill(proofs.prove, proofs.clock)
    proofs.now_s += 2 * STANDSTILL_S
    for _ in range(3):
        waiting = gate.proof()
        assert waiting is not None
        with pytest.raises(Fenced):
            await waiting
    assert proofs.count == 1


class Nothing:
    """A source without changes."""

    async def drain(self, batch: Batch) -> None:
        pass


class Owner:
    """A process on a shard, as far as the topology is concerned."""

    def __init__(self, root: Root, database: Database, port: int) -> None:
        self.database = database
        self.peer = Peer("broker", 0, f"127.0.0.1:{port}")
        self.commits = GroupCommit(database, ManualClock(), Nothing())
        self.running = asyncio.create_task(self.commits.run())
        self.directory = TopologyDirectory(root.objects)
        self.ownership = Ownership(self.commits, self.directory, self.peer, check_s=0.01)

    @classmethod
    async def open(cls, root: Root, port: int) -> Owner:
        return cls(root, await root.database("broker/0", Kind.BROKER), port)

    async def close(self) -> None:
        await self.commits.close()
        await asyncio.wait([self.running])
        if not self.running.cancelled():
            self.running.exception()
        await self.database.close()


async def test_a_process_that_was_overtaken_while_it_started_leaves_no_address(
    tmp_path: Path,
) -> None:
    root = open_root((tmp_path / "data").as_uri())
    # Given one that has opened the shard, and another that has taken it over and announced itself
    first = await Owner.open(root, 1)
    second = await Owner.open(root, 2)
    await second.ownership.announce()

    # When the first one goes on
    with pytest.raises(Fenced):
        await first.ownership.announce()

    # Then the second one is where everybody looks
    topology = await TopologyDirectory(root.objects).read()
    assert topology.address("broker", 0) == second.peer.address
    await first.close()
    await second.close()


async def test_an_owner_puts_its_address_right_and_one_that_was_replaced_does_not(
    tmp_path: Path,
) -> None:
    root = open_root((tmp_path / "data").as_uri())
    first = await Owner.open(root, 1)
    await first.ownership.announce()
    second = await Owner.open(root, 2)
    await second.ownership.announce()
    keeping = asyncio.create_task(second.ownership.keep())
    fresh = TopologyDirectory(root.objects)
    for wrong in (first.peer, None):
        # Given an entry that the first one wrote at the last moment, or that was removed
        if wrong is None:
            await root.objects.delete(second.peer.path)
        else:
            await first.directory.announce(wrong)

        # Then the owner's is back soon
        async with asyncio.timeout(60):
            while await fresh.entry(second.peer) != second.peer:
                await asyncio.sleep(0.01)
    keeping.cancel()

    # And the first one, which looks too, ends its looking
    async with asyncio.timeout(60):
        await first.ownership.keep()
    assert (await fresh.read(0)).address("broker", 0) == second.peer.address
    await first.close()
    await second.close()


async def test_a_router_puts_its_address_right_where_no_process_serves_at_the_one_that_is_there(
    tmp_path: Path,
) -> None:
    root = open_root((tmp_path / "data").as_uri())
    directory, fresh = TopologyDirectory(root.objects), TopologyDirectory(root.objects)
    own = Peer("router", 0, "127.0.0.1:1")
    announcement = Announcement(directory, own, check_s=0.01)
    await announcement.announce()
    keeping = asyncio.create_task(announcement.keep())
    with socket.socket() as bound:  # Nothing listens there.
        bound.bind(("127.0.0.1", 0))
        dead = Peer("router", 0, f"127.0.0.1:{bound.getsockname()[1]}")
        for wrong in (dead, None):
            # Given an entry of one that wrote it at the last moment, or none
            if wrong is None:
                await root.objects.delete(own.path)
            else:
                await fresh.announce(wrong)

            # Then the process's own is back soon
            async with asyncio.timeout(60):
                while await fresh.entry(own) != own:
                    await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.wait([keeping])
    # And at the end there is none
    await announcement.withdraw()
    assert (await fresh.read(0)).address("router", 0) is None


@asynccontextmanager
async def serving_router() -> AsyncIterator[Peer]:
    """The entry of a server that answers probes."""
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Peer("router", 0, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


async def test_a_router_whose_announcement_failed_halfway_finishes_it_while_it_serves() -> None:
    root = open_root("memory:///")
    async with serving_router() as own:
        announcement = Announcement(TopologyDirectory(root.objects), own)
        await announcement.announce()
        reader = TopologyDirectory(root.objects)
        # Given an entry that another has overwritten, and a store that fails once it is right
        await TopologyDirectory(root.objects).announce(Peer("router", 0, "127.0.0.1:1"))
        await reader.read()
        put = root.objects.put

        async def fail_change(path: str, data: bytes) -> None:
            if path == CHANGE:
                raise StoreUnavailable("no answer")
            await put(path, data)

        root.objects.put = fail_change  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await announcement.check()
        root.objects.put = put  # type: ignore[method-assign]
        assert (await reader.read(0)).address("router", 0) != own.address

        # When it looks at its entry again, then readers learn of it
        await announcement.check()
        assert (await reader.read(0)).address("router", 0) == own.address


async def test_a_router_leaves_the_address_of_another_that_serves(tmp_path: Path) -> None:
    root = open_root((tmp_path / "data").as_uri())
    directory = TopologyDirectory(root.objects)
    announcement = Announcement(directory, Peer("router", 0, "127.0.0.1:1"))
    async with serving_router() as other:
        await directory.announce(other)

        await announcement.check()
        assert await directory.entry(other) == other

        # Nor does it take that address away when it ends
        await announcement.withdraw()
        assert await directory.entry(other) == other


class Failing:
    """Commits that fail with this error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def prove_ownership(self) -> None:
        raise self._error

    def overdue_ms(self) -> int:
        return 0

    def reading_ms(self) -> int:
        return 0


async def test_what_serves_without_its_store_needs_no_proof_while_that_is_down(
    tmp_path: Path,
) -> None:
    directory = TopologyDirectory(open_root(tmp_path.as_uri()).objects)
    peer = Peer("ingest", 0, "127.0.0.1:1")
    for error, proven in ((StoreUnavailable("away"), True), (Fenced("replaced"), False)):
        owner = Ownership(Failing(error), directory, peer)
        with pytest.raises(type(error)):
            await owner.prove_serving()
        owner.serves_without_store = lambda: True
        if proven:
            await owner.prove_serving()
        else:
            with pytest.raises(Fenced):
                await owner.prove_serving()
        with pytest.raises(type(error)):
            await owner.prove()
