"""When a standby takes a shard, and when it goes on waiting."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc

from libs.serving.peers.channels import open_channel
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.process import health
from libs.serving.process import standby as module
from libs.serving.process.config import OwnerConfig
from libs.serving.process.exits import EXIT_FAILED, FatalError
from libs.serving.process.health import STANDING_BY, STARTING, STOPPING, Health, owner_health
from libs.serving.process.standby import (
    SILENT_LOOKS,
    OwnerWatch,
    Sign,
    Standby,
    owner_name_of,
)
from libs.storage.database.roots import open_root
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords
from libs.storage.objects.shard_owners import FOLDER, Owner, ShardOwners
from libs.storage.objects.small_objects import Objects
from slatemq.models import now_ms

SHARD = ("broker", 0)
DATABASE = "broker/0"


@pytest.fixture
def objects() -> Objects:
    return open_root("memory:///").objects


@pytest.fixture
def owners(objects: Objects) -> ShardOwners:
    return ShardOwners(objects, DATABASE)


def make_standby(objects: Objects, name: str, address: str = "127.0.0.1:1") -> Standby:
    directory = TopologyDirectory(objects)
    return Standby(SHARD, Owner(name, address), objects, directory, open_channel, 1)


class CountedHealth(Health):
    """Counts how often it was asked; answers wait for `answers`."""

    def __init__(self, owner_name: str) -> None:
        super().__init__([owner_health(DATABASE, owner_name)])
        self.asked = asyncio.Semaphore(0)
        self.answers = asyncio.Event()
        self.answers.set()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        self.asked.release()
        await self.answers.wait()
        return await super().Check(request, context)


class Process:
    """A process of a shard, as far as a standby sees it."""

    def __init__(self, owner_name: str) -> None:
        self.health = CountedHealth(owner_name)
        self.server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def looked_at(self, times: int = 3) -> None:
        """Return after so many more questions: what was answered before has been seen then."""
        for _ in range(times):
            await self.health.asked.acquire()


@asynccontextmanager
async def running(owner_name: str) -> AsyncIterator[Process]:
    process = Process(owner_name)
    await process.health.serving()
    await process.server.start()
    try:
        yield process
    finally:
        await process.server.stop(0)


@contextmanager
def silent() -> Iterator[str]:
    """The address of a machine that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def waiting(standby: Standby) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(standby.wait())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_shard_without_an_owner_is_taken_at_once(
    objects: Objects, owners: ShardOwners
) -> None:
    standby = make_standby(objects, "a")

    await standby.wait()

    assert (await owners.latest()).owner.name == "a"
    assert (standby.is_waiting, standby.has_taken, standby.has_replaced) == (False, True, False)


async def test_an_owner_that_lives_keeps_its_shard_until_its_process_is_gone(
    objects: Objects, owners: ShardOwners
) -> None:
    async with running("a") as owner:
        await owners.claim(Owner("a", owner.address))
        standby = make_standby(objects, "b")
        async with waiting(standby) as taking:
            # Given an owner that answers, serving or not
            await owner.looked_at()
            await owner.health.not_serving(STARTING)
            await owner.looked_at()
            assert not taking.done()
            assert standby.is_waiting

            # When its process ends
            await owner.server.stop(0)

            # Then the standby takes the shard, and the owner never gets it back
            await taking
    assert standby.has_replaced
    latest = await owners.latest()
    assert (latest.owner.name, latest.replaced) == ("b", ("a",))


async def test_an_owner_that_answers_nothing_is_replaced(
    objects: Objects, owners: ShardOwners
) -> None:
    with silent() as address:
        await owners.claim(Owner("a", address))
        await make_standby(objects, "b").wait()

    assert (await owners.latest()).owner.name == "b"


class SignedWatch(OwnerWatch):
    """Sees what the test says."""

    def __init__(self, *signs: Sign) -> None:
        super().__init__(grpc.aio.insecure_channel("127.0.0.1:1"), "127.0.0.1:1", "")
        self._signs = iter(signs)

    async def _sign(self) -> Sign:
        return next(self._signs)


@pytest.mark.parametrize("answer", [Sign.LIVES, Sign.STOPS])
async def test_looks_without_an_answer_count_only_in_a_row(answer: Sign) -> None:
    silent = [Sign.SILENT] * (SILENT_LOOKS - 1)
    watch = SignedWatch(*silent, answer, *silent, Sign.LIVES, *silent, Sign.SILENT)
    for _ in range(3 * SILENT_LOOKS - 1):
        await watch.look()
        assert not watch.is_silent
    await watch.look()
    assert watch.is_silent


async def test_a_look_begins_when_the_one_before_has_had_its_time(
    objects: Objects, owners: ShardOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an owner that answers nothing, and is not replaced for it
    monkeypatch.setattr(module, "SILENT_LOOKS", 1_000)
    async with running("a") as owner:
        owner.health.answers.clear()
        await owners.claim(Owner("a", owner.address))
        async with waiting(make_standby(objects, "b")), asyncio.timeout(60):
            # Then looks follow one another, though this process may see some of them late
            pause_s, looked_at = math.inf, -math.inf
            while pause_s > 1.5 * module.LOOK_S:
                await owner.looked_at(1)
                pause_s, looked_at = time.monotonic() - looked_at, time.monotonic()


async def test_another_process_at_the_owners_address_is_not_the_owner(
    objects: Objects, owners: ShardOwners
) -> None:
    async with running("a-after-its-restart") as other:
        await owners.claim(Owner("a", other.address))
        await make_standby(objects, "b").wait()

    assert (await owners.latest()).owner.name == "b"


async def test_of_two_standbys_one_takes_the_shard_and_the_other_waits_for_that_one(
    objects: Objects, owners: ShardOwners
) -> None:
    async with running("a") as owner, running("b") as first, running("c") as second:
        await owners.claim(Owner("a", owner.address))
        standbys = [
            make_standby(objects, "b", first.address),
            make_standby(objects, "c", second.address),
        ]
        async with waiting(standbys[0]) as one, waiting(standbys[1]) as other:
            await owner.looked_at()
            await owner.server.stop(0)
            await asyncio.wait([one, other], return_when=asyncio.FIRST_COMPLETED)

            winner = first if one.done() else second
            await winner.looked_at()
            assert [one.done(), other.done()].count(True) == 1

            # And when the winner is gone, too, the other gets its turn
            await winner.server.stop(0)
            await asyncio.gather(one, other)
    assert len((await owners.latest()).replaced) == 2


async def test_an_owner_that_stops_has_time_to_close_its_database_and_hands_over_at_once(
    objects: Objects, owners: ShardOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an owner whose database takes longer to close than any test lasts
    monkeypatch.setattr(module, "STOPPING_FACTOR", 1_000)
    async with running("a") as owner:
        await owners.claim(Owner("a", owner.address))
        async with waiting(make_standby(objects, "b")) as taking:
            await owner.health.not_serving(STOPPING)
            await owner.looked_at()
            await owner.server.stop(0)
            await asyncio.sleep(10 * module.GONE_LOOK_S)
            assert not taking.done()

            # When it gives its shard free, then the standby has it
            await owners.give_free("a")
            await taking
    assert (await owners.latest()).owner.name == "b"


async def test_an_owner_without_a_name_is_watched_where_the_topology_has_it(
    objects: Objects, owners: ShardOwners
) -> None:
    directory = TopologyDirectory(objects)
    async with running("") as owner:
        await directory.announce(Peer("broker", 0, "elsewhere:1", owner.address))
        async with waiting(make_standby(objects, "b")) as taking:
            await owner.looked_at()
            assert not taking.done()

            # When it is started again at another address, then that one is watched
            async with running("") as restarted:
                await directory.announce(Peer("broker", 0, "elsewhere:1", restarted.address))
                await owner.server.stop(0)
                await restarted.looked_at()
                assert not taking.done()
            await taking
    assert (await owners.latest()).owner.name == "b"


@pytest.mark.parametrize("content", [b"{garb", None], ids=["damaged", "lost"])
async def test_an_owner_without_a_whole_claim_keeps_its_shard_while_it_lives(
    objects: Objects, owners: ShardOwners, content: bytes | None
) -> None:
    # Given an owner whose claim was damaged, or lost, and that answers without its name
    await owners.claim(Owner("a"))
    path = f"{FOLDER}/{DATABASE}/{1:020}.json"
    await (objects.delete(path) if content is None else objects.put(path, content))
    async with running("") as owner:
        await TopologyDirectory(objects).announce(Peer("broker", 0, "x:1", owner.address))
        async with waiting(make_standby(objects, "b")) as taking:
            await owner.looked_at()
            assert not taking.done()

            # When its process ends, then the standby takes the shard
            await owner.server.stop(0)
            await taking
    latest = await owners.latest()
    assert (latest.owner.name, latest.damage) == ("b", "")


async def test_a_standby_with_old_settings_takes_no_shard(objects: Objects) -> None:
    records = InstanceRecords(objects)
    await records.create(InstanceRecord(1, 0, {}))
    await records.create(InstanceRecord(2, 0, {}))

    with pytest.raises(FatalError, match="settings of the instance have changed") as ended:
        await make_standby(objects, "a").wait()
    assert ended.value.cause.code == EXIT_FAILED


async def test_a_store_that_fails_is_asked_again(
    objects: Objects, owners: ShardOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STORE_AGAIN_S", 0.01)
    listed, failures = objects.list, [StoreUnavailable("down"), StoreUnavailable("down")]

    async def failing(folder: str, matching: re.Pattern[str] | None = None) -> list[str]:
        if failures:
            raise failures.pop()
        return list(await listed(folder, matching))

    monkeypatch.setattr(objects, "list", failing)

    await make_standby(objects, "a").wait()

    assert (await owners.latest()).owner.name == "a"


@pytest.mark.parametrize("lost", ["put_if_absent", "list", "delete"])
async def test_a_claim_whose_answer_was_lost_is_the_standbys(
    objects: Objects, owners: ShardOwners, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(module, "STORE_AGAIN_S", 0.01)
    # Given a store that loses the answer to one call once the claim is made
    call, losses = getattr(objects, lost), [StoreUnavailable("no answer")]

    async def losing(*args: Any) -> Any:
        answer = await call(*args)
        if losses and await objects.exists(f"{FOLDER}/{DATABASE}/{2:020}.json"):
            raise losses.pop()
        return answer

    async with running("b") as process:
        # And a process that answers at once, as standbys do
        await process.health.not_serving(STANDING_BY)
        await owners.claim(Owner("a", "127.0.0.1:1"))
        monkeypatch.setattr(objects, lost, losing)
        standby = make_standby(objects, "b", process.address)

        async with asyncio.timeout(60):
            await standby.wait()

    assert not losses
    assert standby.has_replaced
    latest = await owners.latest()
    assert (latest.number, latest.owner.name, latest.replaced) == (2, "b", ("a",))


async def test_a_standby_that_has_taken_a_shard_gives_it_free(
    objects: Objects, owners: ShardOwners
) -> None:
    # Given one that has waited in vain, and one that has taken the shard
    with silent() as address:
        await owners.claim(Owner("a", address))
        await make_standby(objects, "never").give_free()
        assert (await owners.latest()).owner.name == "a"
        standby = make_standby(objects, "b")
        await standby.wait()

    await standby.give_free()

    assert (await owners.latest()).is_free


def test_each_life_of_a_standby_has_a_name_of_its_own() -> None:
    plain = OwnerConfig(root="memory:///", owner_name="pod")
    standing_by = OwnerConfig(root="memory:///", owner_name="pod", standby=True)

    assert owner_name_of(plain) == "pod"
    first, second = owner_name_of(standing_by), owner_name_of(standing_by)
    assert first != second
    assert first.startswith("pod.")
    assert not owner_name_of(OwnerConfig(root="memory:///", standby=True)).startswith(".")


async def test_a_standby_says_where_its_clock_differs_from_the_owners(
    objects: Objects,
    owners: ShardOwners,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    off_ms = 0
    monkeypatch.setattr(health, "now_ms", lambda: now_ms() + off_ms)
    async with running("a") as owner:
        await owners.claim(Owner("a", owner.address))
        async with waiting(make_standby(objects, "b")) as taking:
            # Given clocks that agree
            await owner.looked_at()
            assert "clock" not in caplog.text

            # When the owner's is behind for a while, and then ahead
            off_ms = -90_000
            await owner.looked_at()
            assert re.search(r"is (90|89)\.\d s ahead of that of the owner", caplog.text)
            assert caplog.text.count("the clock of this standby is") == 1
            off_ms = 0
            await owner.looked_at()
            assert "agree again" in caplog.text
            off_ms = 5_000
            await owner.looked_at()
            assert re.search(r"is [45]\.\d s behind that of the owner", caplog.text)
            assert not taking.done()


async def test_a_standby_of_an_owner_without_a_name_says_that_it_is_taken_back(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    async with running("") as owner:
        await TopologyDirectory(objects).announce(Peer("broker", 0, owner.address))
        async with waiting(make_standby(objects, "b")):
            await owner.looked_at()
    assert "the owner of the shard has no name: give it --standby too" in caplog.text
