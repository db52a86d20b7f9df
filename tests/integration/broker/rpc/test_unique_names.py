"""A queue's name is unique in the instance, whichever step a broker is killed at."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.objects.queue_names import UNCLAIMED, NameClaim, QueueNames
from libs.storage.objects.small_objects import ObjectInfo, Objects
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import AlreadyExists, NotFound, Unavailable
from slatemq.v1 import queue_name_pb2, queue_name_pb2_grpc, queue_pb2
from tests.forms import shortly
from tests.integration.broker.queue_calls import swept
from tests.integration.broker.rig import Disk, Rig, running

NEVER = 10**9
PASSING = ("QUEUE_CHANGING", "QUEUE_BEING_REMOVED", "BROKER_DOWN")


class SteppedObjects(Objects):
    """The objects of a root; holds up one of the steps around the requests about names."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects._store.store, objects._folder, objects._durability)
        self.held_step = NEVER
        self.step = 0
        self.reached = asyncio.Event()
        self.thawed = asyncio.Event()

    async def _pass(self, path: str) -> None:
        if not path.startswith("queue-names/"):
            return
        self.step += 1
        if self.step == self.held_step:
            self.reached.set()
            await self.thawed.wait()

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        await self._pass(path)
        created = await super().put_if_absent(path, data)
        await self._pass(path)
        return created

    async def get(self, path: str) -> bytes:
        await self._pass(path)
        return await super().get(path)

    async def delete(self, path: str) -> None:
        await self._pass(path)
        await super().delete(path)

    async def describe(
        self, prefix: str, after: str | None = None, matching: re.Pattern[str] | None = None
    ) -> Sequence[ObjectInfo]:
        await self._pass(prefix + "/")
        return await super().describe(prefix, after, matching)


class Broker:
    """A broker whose store requests about names can be held up, and its commits."""

    def __init__(self, rig: Rig, objects: SteppedObjects, disk: Disk) -> None:
        self.rig = rig
        self.objects = objects
        self.disk = disk

    async def create(self, queue_id: str) -> str:
        """`created`, or the reason of the refusal."""
        try:
            await self.rig.create(queue_id)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return "created"

    async def delete(self, queue_id: str) -> None:
        await self.rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id=queue_id))

    async def has(self, queue_id: str) -> bool:
        try:
            await self.rig.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue_id))
        except grpc.aio.AioRpcError as error:
            if not isinstance(from_rpc_error(error), NotFound):
                raise
            return False
        return True


@asynccontextmanager
async def broker(folder: Path, shard: int) -> AsyncIterator[Broker]:
    root = open_root(folder.as_uri())
    objects, disk = SteppedObjects(root.objects), Disk()
    root.objects, root.durability = objects, disk
    async with running(root, disk=disk, shard=shard) as rig:
        try:
            yield Broker(rig, objects, disk)
        finally:
            objects.thawed.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def _settled_create(one: Broker, queue_id: str) -> str:
    """Create, again for as long as another broker is in the middle of something."""
    async with asyncio.timeout(60):
        while (outcome := await one.create(queue_id)) in PASSING:
            await asyncio.sleep(0.05)
    return outcome


async def test_a_name_that_another_shard_has_is_refused_and_the_shard_is_named(
    folder: Path,
) -> None:
    async with broker(folder, 0) as first, broker(folder, 1) as second:
        await first.rig.create("q")

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.rig.create("q")

        error = from_rpc_error(refused.value)
        assert isinstance(error, AlreadyExists)
        assert (error.reason, error.metadata["broker_shard"]) == ("QUEUE_ALREADY_EXISTS", "0")
        assert not await second.has("q")


async def test_a_new_name_needs_no_other_broker_and_a_used_one_only_its_own(folder: Path) -> None:
    async with broker(folder, 0) as first:
        await first.rig.create("q")
    async with broker(folder, 1) as second:
        assert await second.create("new") == "created"

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.rig.create("q")

        error = from_rpc_error(refused.value)
        assert isinstance(error, Unavailable)
        assert (error.reason, error.metadata["broker_shard"]) == ("BROKER_DOWN", "0")


async def test_a_deleted_name_is_free_for_every_shard_even_while_its_broker_is_down(
    folder: Path,
) -> None:
    async with broker(folder, 0) as first:
        await first.rig.create("q")
        await first.delete("q")
    async with broker(folder, 1) as second:
        assert await second.create("q") == "created"
        await second.delete("q")
        await swept(second.rig)
        assert await second.create("q") == "created"


async def test_names_that_a_file_system_would_take_for_one_or_for_a_folder_are_apart(
    folder: Path,
) -> None:
    async with broker(folder, 0) as first, broker(folder, 1) as second:
        for queue_id in ("a", "..", "x" * 255):
            assert await first.create(queue_id) == "created"
        assert await second.create("A") == "created"
        assert await second.create("..") == "QUEUE_ALREADY_EXISTS"


async def test_of_creations_on_many_shards_at_once_one_wins(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(broker(folder, n)) for n in range(4)]

        outcomes = await asyncio.gather(*(_settled_create(one, "q") for one in brokers * 2))

        assert sorted(outcomes) == [*["QUEUE_ALREADY_EXISTS"] * 7, "created"]
        assert sum([await one.has("q") for one in brokers]) == 1


async def test_a_creation_on_one_shard_holds_off_those_on_others_until_it_is_over(
    folder: Path,
) -> None:
    async with broker(folder, 0) as other, broker(folder, 1) as slow:
        slow.objects.held_step = 2  # The name is claimed.
        creating = asyncio.create_task(slow.create("q"))
        async with asyncio.timeout(60):
            await slow.objects.reached.wait()

        assert await other.create("q") == "QUEUE_CHANGING"

        slow.objects.thawed.set()
        assert await creating == "created"
        assert await other.create("q") == "QUEUE_ALREADY_EXISTS"


@pytest.mark.parametrize("step", shortly(range(1, 12), 1, 3, 5, 7, 9))
@pytest.mark.parametrize("used_before", [False, True])
async def test_a_creation_that_is_killed_at_any_step_leaves_the_name_to_one_shard(
    folder: Path, step: int, used_before: bool
) -> None:
    async with broker(folder, 0) as other, broker(folder, 1) as frozen:
        if used_before:
            for _ in range(2):
                assert await _settled_create(other, "q") == "created"
                await other.delete("q")
        frozen.objects.step = 0
        frozen.objects.held_step = step
        creating = asyncio.create_task(frozen.create("q"))
        async with asyncio.timeout(60):
            await asyncio.wait(
                [creating, asyncio.create_task(frozen.objects.reached.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
        async with broker(folder, 1) as successor:
            outcome = await _settled_create(other, "q")
            frozen.objects.thawed.set()  # The old process goes on where it stood.
            await creating
            has = [await other.has("q"), await successor.has("q")]
            assert has.count(True) == 1
            assert has[0] is (outcome == "created")


async def test_a_creation_that_is_killed_before_its_answer_keeps_the_name(folder: Path) -> None:
    async with broker(folder, 0) as other, broker(folder, 1) as frozen:
        frozen.disk.free.clear()
        creating = asyncio.create_task(frozen.create("q"))
        async with asyncio.timeout(60):
            while "q" not in frozen.rig.owner.shard.queues:
                await asyncio.sleep(0.01)
        # It may or may not have been stored by now: what counts is that both agree.
        async with broker(folder, 1) as successor:
            outcome = await _settled_create(other, "q")
            frozen.disk.free.set()
            await creating
            has = [await other.has("q"), await successor.has("q")]
            assert has.count(True) == 1
            assert has[0] is (outcome == "created")


@pytest.mark.parametrize("step", range(1, 5))
async def test_a_deletion_that_is_killed_at_any_step_leaves_the_name_to_one_shard(
    folder: Path, step: int
) -> None:
    async with broker(folder, 0) as other, broker(folder, 1) as frozen:
        await frozen.rig.create("q")
        frozen.objects.step = 0
        frozen.objects.held_step = step
        deleting = asyncio.create_task(frozen.delete("q"))
        async with asyncio.timeout(60):
            await frozen.objects.reached.wait()
        async with broker(folder, 1) as successor:
            outcomes = await asyncio.gather(
                _settled_create(other, "q"), _settled_create(successor, "q")
            )
            frozen.objects.thawed.set()
            await asyncio.wait([deleting])
            await asyncio.sleep(0)
            assert sorted(outcomes) == ["QUEUE_ALREADY_EXISTS", "created"]
            # The old process has freed nothing that was claimed after it.
            assert (
                sorted([await _settled_create(one, "q") for one in (other, successor)])
                == ["QUEUE_ALREADY_EXISTS"] * 2
            )


async def test_a_cancelled_creation_leaves_the_name_to_one_shard(folder: Path) -> None:
    async with broker(folder, 0) as first, broker(folder, 1) as second:
        for step in range(1, 6):
            queue_id = f"q{step}"
            first.objects.step, first.objects.held_step = 0, step
            first.objects.reached.clear()
            creating = asyncio.create_task(first.create(queue_id))
            await asyncio.wait(
                [creating, asyncio.create_task(first.objects.reached.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            creating.cancel()
            await asyncio.wait([creating])

            outcome = await _settled_create(second, queue_id)

            assert [await first.has(queue_id), await second.has(queue_id)].count(True) == 1, step
            assert await second.has(queue_id) is (outcome == "created")
            first.objects.thawed.set()
            first.objects.thawed = asyncio.Event()


async def test_a_broker_says_that_it_needs_no_name_only_while_it_owns_its_shard(
    folder: Path,
) -> None:
    async with broker(folder, 0) as old:
        names = queue_name_pb2_grpc.QueueNameServiceStub(old.rig.channel)
        request = queue_name_pb2.GetNameUseRequest(queue_id="q")
        answer = await names.GetNameUse(request)
        assert answer.use == queue_name_pb2.NAME_USE_NONE
        async with broker(folder, 0) as new:
            await new.rig.create("q")
            with pytest.raises(grpc.aio.AioRpcError):
                await names.GetNameUse(request)


async def test_a_claimant_that_read_long_ago_gets_no_name_by_a_number_that_was_removed(
    folder: Path,
) -> None:
    names = QueueNames(open_root(folder.as_uri()).objects)
    long_ago = await names.get("q")
    assert await names.claim("q", (1,), long_ago)
    less_long_ago = await names.get("q")
    for shard in (2, 3, 4):
        assert await names.claim("q", (shard,), await names.get("q"))

    for known in (long_ago, less_long_ago):
        assert not await names.claim("q", (9,), known)
        assert await names.get("q") == NameClaim(4, (4,), (4,))
        await names.free("q", known)
        assert await names.get("q") == NameClaim(4, (4,), (4,))


async def test_no_history_of_creations_deletions_and_replaced_brokers_doubles_a_name(
    folder: Path,
) -> None:
    luck = random.Random(7)
    ids = ["a", "b", "c"]
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(broker(folder, n)) for n in range(3)]

        async def act(one: Broker) -> None:
            queue_id = luck.choice(ids)
            if luck.random() < 0.6:
                await one.create(queue_id)
            else:
                await _delete_if_there(one, queue_id)

        for round_number in range(25):
            shard = luck.randrange(3)
            acting = [asyncio.create_task(act(luck.choice(brokers))) for _ in range(5)]
            if round_number % 3 == 0:
                brokers[shard] = await stack.enter_async_context(broker(folder, shard))
            await asyncio.gather(*acting)
            for queue_id in ids:
                has = [await one.has(queue_id) for one in brokers]
                assert has.count(True) <= 1, (round_number, queue_id)
        for queue_id in ids:
            outcomes = [await _settled_create(one, queue_id) for one in brokers]
            assert outcomes.count("created") <= 1
            assert [await one.has(queue_id) for one in brokers].count(True) == 1


async def _delete_if_there(one: Broker, queue_id: str) -> None:
    try:
        await one.delete(queue_id)
    except grpc.aio.AioRpcError as error:
        if not isinstance(from_rpc_error(error), NotFound | Unavailable):
            raise


def test_claims_are_below_the_root_and_nowhere_else(folder: Path) -> None:
    root: Root = open_root(folder.as_uri())
    asyncio.run(QueueNames(root.objects).claim("q", (0,), UNCLAIMED))
    assert [path.name for path in folder.iterdir()] == ["queue-names"]
