"""What counts as left over, and what a repair removes of it, while an instance goes on."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import Root, open_root
from libs.storage.layout.ids import message_id
from libs.storage.layout.keys import config_key, payload_key, queue_state_key
from libs.storage.layout.own_keys import outbox_counter_key, outbox_key, refused_push_key
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from libs.storage.objects.small_objects import Objects
from libs.storage.records.configs import QueueConfigRecord, encode_config
from libs.storage.records.execution_records import (
    OutboxCounter,
    OutboxRecord,
    RefusedPushRecord,
    encode_outbox,
    encode_outbox_counter,
    encode_refused_push,
)
from libs.storage.records.payloads import PayloadUri, encode_uri
from libs.storage.records.states import QueueStateRecord, encode_queue_state
from services.janitor.orphans import ORPHAN_AGE_MS
from services.janitor.verify.findings import ALIKE_MAX, Findings, Kind
from services.janitor.verify.repairs import Repairs
from services.janitor.verify.verification import StoppedDatabases, Verification
from tests.integration.janitor.verify.stored_rows import Row, write

CONFIG = QueueConfigRecord("true", 5, 0)
STATE = QueueStateRecord(1, False, 0, (), 0, 0, 0, 0, 0, 0, 0, ())
PATH = f"blobs/00/{'0' * 62}"


def refused(outbox: bytes) -> bytes:
    return encode_refused_push(RefusedPushRecord(1, "no room", outbox))


@pytest.fixture
async def root(tmp_path: Path) -> Root:
    """An instance with an object that no record names."""
    root = open_root(tmp_path.as_uri(), sync=False)
    for name in ("ingest/0", "broker/0"):
        await write(root, name)
    await root.objects.put(PATH, b"payload")
    return root


def leftovers(findings: Findings) -> list[str]:
    return [one.key for one in findings.all() if not one.is_fault]


def repairs_of(root: Root) -> Repairs:
    directory = TopologyDirectory(root.objects)
    return Repairs(root, directory, Channels(directory), dry_run=False)


async def test_how_old_an_object_is_counts_from_before_the_databases_were_read(root: Root) -> None:
    stored_ms = await root.objects.modified_ms(PATH)
    databases = await StoppedDatabases.find(root)
    # A run whose snapshots were begun within the day may last until long after it.
    for began_ms, found in (
        (stored_ms + ORPHAN_AGE_MS, []),
        (stored_ms + ORPHAN_AGE_MS + 1, [PATH]),
    ):
        findings = await Verification(root, databases, began_ms).run()
        assert leftovers(findings) == found


async def test_only_an_instance_that_serves_has_an_entry_for_each_shard(root: Root) -> None:
    for is_stopped, expected in ((True, set()), (False, {"ingest/0", "broker/0"})):
        databases = StoppedDatabases(root, ["ingest/0", "broker/0"], is_stopped)
        findings = await Verification(root, databases, 1).run()
        found = {one.shard for one in findings.all() if one.record == "topology entry"}
        assert found == expected


class GoesOn(StoppedDatabases):
    """An instance in which a push moves to its ingest after that was read."""

    @asynccontextmanager
    async def later(self, services: Sequence[str]) -> AsyncIterator[StoppedDatabases]:
        await write(self.root, "ingest/0", (payload_key(message_id(0, 9)), encode_uri(PATH)))
        yield StoppedDatabases(self.root, ["ingest/0"])


async def test_an_object_that_a_push_has_brought_to_an_ingest_meanwhile_is_not_left_over(
    root: Root,
) -> None:
    began_ms = await root.objects.modified_ms(PATH) + ORPHAN_AGE_MS + 1
    databases = GoesOn(root, ["ingest/0", "broker/0"])
    assert leftovers(await Verification(root, databases, began_ms).run()) == []


@pytest.mark.parametrize("lost", ["broker/0", "ingest/1"])
async def test_nothing_is_removed_while_the_database_of_a_shard_is_lost(
    root: Root, tmp_path: Path, lost: str
) -> None:
    # Given an object that only ingest/1 names, and a name that broker 0 has claimed.
    await write(root, "ingest/1", (payload_key(message_id(1, 9)), encode_uri(PATH)))
    assert await QueueNames(root.objects).claim("orders", (0,), UNCLAIMED)
    for name in ("ingest/0", "ingest/1", "broker/0"):
        service, _, shard = name.partition("/")
        await TopologyDirectory(root.objects).announce(Peer(service, int(shard), "127.0.0.1:1"))
    before = await stored_beside(root)
    began_ms = await root.objects.modified_ms(PATH) + 2 * ORPHAN_AGE_MS

    shutil.rmtree(tmp_path / lost)
    databases = await StoppedDatabases.find(root)
    findings = await Verification(root, databases, began_ms).run()
    repairs = repairs_of(root)
    await repairs.repair(findings)

    (fault,) = [one for one in findings.all() if one.record == "database"]
    assert (fault.kind, fault.shard) == (Kind.FILE, lost)
    assert "restore its database" in fault.what_to_do
    assert findings.unreadable == {lost}
    assert findings.leftovers == []
    assert repairs.counts == {}
    assert await stored_beside(root) == before


PUSH = encode_outbox(OutboxRecord(1, "orders", PayloadUri(PATH), 7, {}))
COUNTER = encode_outbox_counter(OutboxCounter(7, 7, len(PUSH)))


class Sends(StoppedDatabases):
    """An instance whose pushes are delivered, acked and purged after its broker was read."""

    rows: Sequence[Row] = ()

    @asynccontextmanager
    async def later(self, services: Sequence[str]) -> AsyncIterator[StoppedDatabases]:
        assert services == ["broker"]
        await write(self.root, "broker/0", *self.rows)
        yield StoppedDatabases(self.root, ["broker/0"])


WAITING = [(outbox_key(0, 7), PUSH), (outbox_counter_key(0), COUNTER)]


@pytest.mark.parametrize(
    ("rows", "later", "expected"),
    [
        (WAITING, [(outbox_key(0, 7), None)], []),
        (WAITING, [], ["outbox row"]),
        ([(refused_push_key(0, 3), refused(PUSH))], [(refused_push_key(0, 3), None)], []),
        ([(refused_push_key(0, 3), refused(PUSH))], [], ["refused push"]),
    ],
    ids=["sent", "waiting", "settled", "refused"],
)
async def test_an_object_that_went_since_with_its_push_is_not_missing(
    root: Root, rows: Sequence[Row], later: Sequence[Row], expected: list[str]
) -> None:
    await write(root, "broker/0", *rows)
    await root.objects.delete(PATH)
    databases = Sends(root, ["ingest/0", "broker/0"])
    databases.rows = later
    findings = await Verification(root, databases, 1).run()
    gone = [one.record for one in findings.all() if one.wrong.endswith("is gone")]
    assert gone == expected


FOREIGN = PUSH.replace(b"blobs/00/", b"elsewhere")


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ((outbox_key(0, 7), PUSH), "outbox row"),
        ((refused_push_key(0, 3), refused(b"?" + PUSH[:-3])), "refused push"),
        ((refused_push_key(0, 3), refused(FOREIGN)), "refused push"),
    ],
    ids=["not counted", "its row does not decode", "its path is damaged"],
)
async def test_the_object_of_a_push_that_is_a_fault_is_not_left_over(
    root: Root, row: Row, record: str
) -> None:
    await write(root, "broker/0", row)
    began_ms = await root.objects.modified_ms(PATH) + 2 * ORPHAN_AGE_MS

    findings = await Verification(root, await StoppedDatabases.find(root), began_ms).run()
    await repairs_of(root).repair(findings)

    assert record in {one.record for one in findings.all() if one.is_fault}
    assert not any(one.wrong.startswith("its payload") for one in findings.all())
    assert findings.leftovers == []
    assert await root.objects.exists(PATH)


@pytest.mark.parametrize(
    ("row", "has"),
    [
        ((queue_state_key("orders"), encode_queue_state(STATE)), "a state and no config"),
        ((config_key("orders"), encode_config(CONFIG)), "a config and no state"),
    ],
)
async def test_nothing_is_removed_while_a_queue_has_half_of_its_records(
    root: Root, row: Row, has: str
) -> None:
    # Given a queue whose commit is lost in part, its name, and an object that may be a push's
    await write(root, "broker/0", row)
    assert await QueueNames(root.objects).claim("orders", (0,), UNCLAIMED)
    before = await stored_beside(root)
    began_ms = await root.objects.modified_ms(PATH) + 2 * ORPHAN_AGE_MS

    databases = await StoppedDatabases.find(root)
    findings = await Verification(root, databases, began_ms).run()
    repairs = repairs_of(root)
    await repairs.repair(findings)

    (fault,) = [one for one in findings.all() if one.queue_id == "orders"]
    assert (fault.kind, fault.shard, fault.wrong) == (Kind.REFERENCE, "broker/0", f"it has {has}")
    assert "the broker does not start" in fault.what_to_do
    assert (findings.unreadable, findings.leftovers) == ({"broker/0"}, [])
    assert repairs.counts == {}
    assert await stored_beside(root) == before


async def stored_beside(root: Root) -> list[str]:
    """The objects beside the databases that a repair may remove."""
    folders = ("blobs", "queue-names", "topology")
    return [path for folder in folders for path in await root.objects.list(folder)]


async def test_a_shard_that_has_come_since_the_snapshots_is_not_lost_and_nothing_is_removed(
    root: Root,
) -> None:
    began_ms = await root.objects.modified_ms(PATH) + 2 * ORPHAN_AGE_MS
    databases = StoppedDatabases(root, ["ingest/0"])
    for service in ("ingest", "broker"):
        await TopologyDirectory(root.objects).announce(Peer(service, 0, "127.0.0.1:1"))

    findings = await Verification(root, databases, began_ms).run()

    assert "database" not in {one.record for one in findings.all()}
    assert (findings.unreadable, findings.leftovers) == ({"broker/0"}, [])


async def test_a_repair_removes_all_objects_that_are_left_over_not_only_those_that_are_named(
    root: Root,
) -> None:
    count = 2 * ALIKE_MAX
    for number in range(1, count):
        await root.objects.put(f"blobs/00/{number:062x}", b"payload")
    began_ms = await root.objects.modified_ms(f"blobs/00/{count - 1:062x}") + ORPHAN_AGE_MS + 1

    databases = await StoppedDatabases.find(root)
    findings = await Verification(root, databases, began_ms).run()
    assert findings.leftovers_count == count
    assert len(leftovers(findings)) == ALIKE_MAX + 1

    repairs = repairs_of(root)
    await repairs.repair(findings)
    assert repairs.counts == {"objects_removed": count}
    assert await root.objects.list("blobs") == []


class _Killed(BaseException):
    """Stands in for SIGKILL: nothing of ours catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int, *, landed: bool) -> None:
    """Raise at the change of the store with that number, once it has landed or before."""
    changes = itertools.count()

    def dying(method: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def call(*args: object) -> object:
            is_last = next(changes) == step
            if is_last and not landed:
                raise _Killed
            result = await method(*args)
            if is_last:
                raise _Killed
            return result

        return call

    for name in ("put_if_absent", "delete"):
        monkeypatch.setattr(Objects, name, dying(getattr(Objects, name)))


@pytest.mark.parametrize("landed", [False, True])
async def test_a_repair_that_was_killed_at_any_change_is_finished_by_the_next(
    root: Root, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    # Two objects that nothing names, and the names of two queues whose broker was given up.
    other = f"blobs/00/{1:062x}"
    names = QueueNames(root.objects)
    for step in range(4):
        for path in (PATH, other):
            await root.objects.put(path, b"payload")
        for queue_id in ("bills", "orders"):
            assert await names.claim(queue_id, (7,), await names.get(queue_id))
        began_ms = await root.objects.modified_ms(other) + ORPHAN_AGE_MS + 1

        with monkeypatch.context() as patch:
            kill_at(patch, step, landed=landed)
            with pytest.raises(_Killed):
                await repaired(root, began_ms)
        left = 4 - step - landed
        assert len((await repaired(root, began_ms)).repaired) == left

        assert await root.objects.list("blobs") == []
        for queue_id in ("bills", "orders"):
            assert (await names.get(queue_id)).broker_shards == ()
        findings = await Verification(root, await StoppedDatabases.find(root), began_ms).run()
        assert findings.leftovers == []


async def repaired(root: Root, began_ms: int) -> Repairs:
    """What a repair did that looked at the instance again."""
    findings = await Verification(root, await StoppedDatabases.find(root), began_ms).run()
    repairs = repairs_of(root)
    await repairs.repair(findings)
    return repairs
