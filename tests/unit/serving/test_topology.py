import asyncio
import json
import re

import pytest

from libs.serving.peers.topology import (
    CACHE_MS,
    CHANGE,
    LIST_MS,
    OUTDATED_MS,
    SOON_MS,
    Peer,
    TopologyDirectory,
    TopologyServicer,
)
from libs.storage.database.roots import open_root
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.small_objects import Objects
from slatemq.v1.topology_pb2 import GetTopologyRequest
from tests.manual_clock import ManualSeconds


@pytest.fixture
async def objects() -> Objects:
    return open_root("memory:///").objects


async def test_what_processes_announce_everybody_reads(objects: Objects) -> None:
    # Given three processes that announced themselves
    directory = TopologyDirectory(objects)
    for peer in (Peer("broker", 10, "b:10"), Peer("broker", 2, "b:2"), Peer("ingest", 0, "i:0")):
        await directory.announce(peer)

    # When another process reads
    topology = await TopologyDirectory(objects).read()

    # Then they are there, in the order of their shards
    assert list(topology.brokers.items()) == [(2, "b:2"), (10, "b:10")]
    assert topology.address("ingest", 0) == "i:0"
    assert topology.address("ingest", 1) is None
    assert dict(topology.shards("router")) == {}


async def test_services_and_clients_each_get_the_address_that_they_can_reach(
    objects: Objects,
) -> None:
    # Given a process in a container, whose port is published on another address
    directory = TopologyDirectory(objects)
    await directory.announce(Peer("broker", 0, "127.0.0.1:7422", "broker:7420"))

    topology = await TopologyDirectory(objects).read()

    assert topology.address("broker", 0) == "broker:7420"
    assert dict(topology.brokers) == {0: "broker:7420"}
    assert dict(topology.advertised("broker")) == {0: "127.0.0.1:7422"}


async def test_an_ingest_shows_its_largest_payload_and_an_old_entry_does_not(
    objects: Objects,
) -> None:
    directory = TopologyDirectory(objects)
    await directory.announce(Peer("ingest", 0, "i:0"))
    await directory.announce(Peer("ingest", 1, "i:1", payload_bytes_max=1000))

    topology = await TopologyDirectory(objects).read()

    items = [topology.payload_bytes_max(shard) for shard in (0, 1, 2)]
    assert items == [None, 1000, None]


async def test_a_process_that_moved_replaces_its_entry(objects: Objects) -> None:
    directory = TopologyDirectory(objects)
    await directory.announce(Peer("broker", 0, "old:1"))
    await directory.read()

    await directory.announce(Peer("broker", 0, "new:1"))

    assert (await directory.read()).address("broker", 0) == "new:1"


async def test_a_reading_serves_until_it_is_old(objects: Objects) -> None:
    clock = ManualSeconds()
    reader = TopologyDirectory(objects, clock)
    await reader.read()
    await TopologyDirectory(objects).announce(Peer("router", 1, "r:1"))

    clock.now_s = CACHE_MS / 1000
    assert dict((await reader.read()).shards("router")) == {}
    assert dict((await reader.read(max_age_ms=250)).shards("router")) == {1: "r:1"}


async def test_an_old_reading_is_renewed_behind_the_caller(objects: Objects) -> None:
    clock = ManualSeconds()
    reader = TopologyDirectory(objects, clock)
    assert reader.last() is None
    await reader.read()
    await TopologyDirectory(objects).announce(Peer("router", 1, "r:1"))
    clock.now_s = CACHE_MS / 1000 + 1

    last = reader.last()

    assert last is not None
    assert dict(last.shards("router")) == {}
    async with asyncio.timeout(60):
        while not (last := reader.last()) or not last.shards("router"):
            await asyncio.sleep(0)
    await reader.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"service": "broker"}',
        b"[" * 100_000,
        b'{"service": "broker", "shard": Infinity, "address": "a"}',
        b'{"service": "broker", "shard": 99999999999, "address": "a"}',
        b'{"service": "broker", "shard": 1, "address": "\\ud800"}',
    ],
)
async def test_a_damaged_entry_hides_no_other(objects: Objects, damage: bytes) -> None:
    directory = TopologyDirectory(objects)
    await directory.announce(Peer("broker", 0, "b:0"))
    await objects.put("topology/broker-1.json", damage)

    assert dict((await directory.read()).brokers) == {0: "b:0"}
    answer = await TopologyServicer(directory).GetTopology(GetTopologyRequest(), None)
    assert [one.address for one in answer.brokers] == ["b:0"]


class _Counted(Objects):
    """A real store that notes what is read of it."""

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.reads: list[str] = []

    async def get(self, path: str) -> bytes:
        self.reads.append(path)
        return await super().get(path)

    async def list(self, prefix: str, matching: re.Pattern[str] | None = None) -> list[str]:
        self.reads.append(prefix)
        return await super().list(prefix, matching)


async def test_a_reading_without_a_change_is_one_request(objects: Objects) -> None:
    store = _Counted(objects)
    clock = ManualSeconds()
    reader, writer = TopologyDirectory(store, clock), TopologyDirectory(objects)
    for shard in range(10):
        await writer.announce(Peer("broker", shard, f"b:{shard}"))
    await reader.read()

    # When nothing has changed
    store.reads.clear()
    clock.now_s += CACHE_MS / 1000 + 1
    assert len((await reader.read()).brokers) == 10
    assert store.reads == ["topology/change"]

    # When a process moved
    await writer.announce(Peer("broker", 3, "elsewhere:3"))
    clock.now_s += CACHE_MS / 1000 + 1
    assert (await reader.read()).address("broker", 3) == "elsewhere:3"


async def test_an_entry_whose_writer_ended_before_the_change_is_found(objects: Objects) -> None:
    clock = ManualSeconds()
    reader, writer = TopologyDirectory(objects, clock), TopologyDirectory(objects)
    await writer.announce(Peer("broker", 0, "b:0"))
    await reader.read()
    entry = {"service": "broker", "shard": 1, "address": "b:1"}
    await objects.put("topology/broker-1.json", json.dumps(entry).encode())

    clock.now_s += LIST_MS / 1000 + 1

    assert dict((await reader.read()).brokers) == {0: "b:0", 1: "b:1"}


async def test_a_change_beside_a_reading_is_read_next(objects: Objects) -> None:
    """Its entry is written while the reader lists the others."""
    writer = TopologyDirectory(objects)
    await writer.announce(Peer("broker", 0, "b:0"))

    class Racing(Objects):
        def __init__(self) -> None:
            vars(self).update(vars(objects))

        async def list(self, prefix: str, matching: re.Pattern[str] | None = None) -> list[str]:
            found = await super().list(prefix, matching)
            if len(found) == 2:
                await writer.announce(Peer("broker", 1, "b:1"))
            return found

    reader = TopologyDirectory(Racing())
    assert dict((await reader.read()).brokers) == {0: "b:0"}

    assert dict((await reader.read(max_age_ms=-1)).brokers) == {0: "b:0", 1: "b:1"}


async def test_a_withdrawn_router_is_gone(objects: Objects) -> None:
    directory = TopologyDirectory(objects)
    router = Peer("router", 0, "r:0")
    await directory.announce(router)

    await directory.withdraw(router)

    assert dict((await directory.read()).shards("router")) == {}


async def test_who_took_a_number_over_stays_when_its_predecessor_leaves(objects: Objects) -> None:
    directory = TopologyDirectory(objects)
    old, new = Peer("router", 0, "old:1"), Peer("router", 0, "new:1")
    await directory.announce(old)
    await directory.read()
    await TopologyDirectory(objects).announce(new)

    await directory.withdraw(old)

    assert dict((await directory.read()).shards("router")) == {0: "new:1"}


class _DownAtTimes(Objects):
    """A real store whose listings can be switched off."""

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.down = False

    async def list(self, prefix: str, matching: re.Pattern[str] | None = None) -> list[str]:
        if self.down:
            raise StoreUnavailable("off")
        return await super().list(prefix, matching)


async def test_the_last_reading_serves_while_the_store_is_down(objects: Objects) -> None:
    store = _DownAtTimes(objects)
    directory = TopologyDirectory(store)
    await directory.announce(Peer("broker", 0, "b:0"))
    await directory.read()

    store.down = True

    assert dict((await directory.read(max_age_ms=-1)).brokers) == {0: "b:0"}
    with pytest.raises(StoreUnavailable):
        await TopologyDirectory(store).read()


async def test_clients_that_doubt_what_they_have_get_no_reading_that_is_outdated(
    objects: Objects,
) -> None:
    # Given a standby that has read at its start alone, before all others served
    store, clock = _DownAtTimes(objects), ManualSeconds()
    directory = TopologyDirectory(store, clock)
    await directory.read()
    servicer = TopologyServicer(directory)
    await TopologyDirectory(objects).announce(Peer("broker", 0, "b:0"))

    # When the store is down: then the reading serves for some seconds
    store.down = True
    clock.now_s = OUTDATED_MS / 1000
    assert not (await servicer.GetTopology(GetTopologyRequest(is_doubted=True), None)).brokers

    # And longer only those that have no other
    clock.now_s += 1
    with pytest.raises(StoreUnavailable, match="not known which processes"):
        await servicer.GetTopology(GetTopologyRequest(is_doubted=True), None)
    assert not (await servicer.GetTopology(GetTopologyRequest(), None)).brokers
    assert dict((await directory.read()).brokers) == {}

    # When it is back
    store.down = False
    clock.now_s += 0.001
    answer = await servicer.GetTopology(GetTopologyRequest(is_doubted=True), None)
    assert [one.address for one in answer.brokers] == ["b:0"]


class _Hanging(_Counted):
    """A real store that answers nothing while it is to hang, then fails."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.answers = asyncio.Event()
        self.answers.set()
        self.fails = False

    async def get(self, path: str) -> bytes:
        found = await super().get(path)
        await self.answers.wait()
        if self.fails:
            raise StoreUnavailable("it took too long")
        return found


async def test_the_last_reading_serves_at_once_while_the_store_hangs(objects: Objects) -> None:
    # Given a reading that is old, and a store that answers no more
    store, clock = _Hanging(objects), ManualSeconds()
    directory = TopologyDirectory(store, clock)
    await directory.announce(Peer("ingest", 0, "i:0"))
    first = await directory.read()
    clock.now_s += CACHE_MS / 1000 + 1
    store.reads.clear()
    store.answers.clear()

    # Then all callers have it while one reading is under way
    assert await asyncio.gather(*(directory.read_soon() for _ in range(100))) == [first] * 100
    clock.now_s += SOON_MS / 1000
    for _ in range(100):
        assert await directory.read_soon() is first
    assert store.reads == [CHANGE]

    # And those who would wait for that one have it once it has failed, without another one each
    waiting = [asyncio.create_task(directory.read()) for _ in range(100)]
    await asyncio.sleep(0)
    clock.now_s += 10
    store.fails = True
    store.answers.set()
    assert await asyncio.gather(*waiting) == [first] * 100
    assert await directory.read_soon() is first
    assert store.reads == [CHANGE]

    # When the store is back, then a later reading has what is new
    store.fails = False
    await TopologyDirectory(objects).announce(Peer("ingest", 1, "i:1"))
    clock.now_s += CACHE_MS / 1000 + 1
    assert dict((await directory.read_soon()).ingests) == {0: "i:0", 1: "i:1"}


async def test_who_leaves_while_the_store_is_down_says_that_its_entry_stays(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    store = _DownAtTimes(objects)
    directory = TopologyDirectory(store)
    janitor = Peer("janitor", 0, "j:0")
    await directory.announce(janitor)
    store.down = True

    await directory.withdraw(janitor)

    assert "could not remove this process from the topology" in caplog.text
    assert dict((await TopologyDirectory(objects).read()).shards("janitor")) == {0: "j:0"}


async def test_an_entry_is_plain_json(objects: Objects) -> None:
    await TopologyDirectory(objects).announce(Peer("broker", 3, "h:1"))

    fields = json.loads(await objects.get("topology/broker-3.json"))

    assert fields == {"service": "broker", "shard": 3, "address": "h:1"}
