"""PurgeMessages of a real ingest."""

import asyncio
import dataclasses
import secrets
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc.aio
import pytest

from libs.serving.peers.channels import open_channel
from libs.storage.database.settings import Kind, ReplayBound, Tuning, tuning_of
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SlateMQError,
)
from slatemq.v1 import ingest_pb2, purge_pb2, purge_pb2_grpc, snapshot_pb2, snapshot_pb2_grpc
from tests.integration.ingest.server import Ingest, message, process, serving
from tests.integration.waiting import WAIT_SECONDS

EXPIRED = purge_pb2.PURGE_REASON_EXPIRED
UNREFERENCED = purge_pb2.PURGE_REASON_UNREFERENCED

SHARD = 3
FIRST = SHARD << 48 | 1


def at_once(root: str) -> AbstractAsyncContextManager[Ingest]:
    """An ingest whose messages may go as soon as their retention is over."""
    return serving(root, shard=SHARD, purge_grace_s=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def root(folder: Path) -> str:
    return folder.as_uri()


async def purge(
    ingest: Ingest,
    ids: Iterable[int],
    reason: purge_pb2.PurgeReason.ValueType = EXPIRED,
    epoch: int = 0,
) -> purge_pb2.PurgeMessagesResponse:
    request = purge_pb2.PurgeMessagesRequest(
        purge_epoch=epoch, reason=reason, message_ids=list(ids)
    )
    return await ask(ingest, request)


async def ask(
    ingest: Ingest, request: purge_pb2.PurgeMessagesRequest
) -> purge_pb2.PurgeMessagesResponse:
    stub = purge_pb2_grpc.PurgeServiceStub(ingest.channel)
    with raising_slatemq_errors():
        answer: purge_pb2.PurgeMessagesResponse = await stub.PurgeMessages(request, timeout=30)
    return answer


async def purged(ingest: Ingest, ids: Iterable[int], epoch: int = 0) -> int:
    """Purges until none is refused: until the retention of all is over. Returns how many went."""
    left, count = list(ids), 0
    async with asyncio.timeout(60):
        while left:
            result = await purge(ingest, left, epoch=epoch)
            count += result.purged_count
            left = list(result.refused_ids)
            if left:
                await asyncio.sleep(0.05)
    return count


def short(payload: bytes, **headers: str) -> ingest_pb2.PublishRun:
    result = message(payload, **headers)
    result.retention_s = 1
    return result


async def missing(ingest: Ingest, *ids: int) -> list[int]:
    return list((await ingest.read(*ids)).missing_ids)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("purge_epoch", {"purge_epoch": -1}),
        ("reason", {"reason": 0}),
        ("reason", {"reason": 3}),
        ("message_ids", {"message_ids": []}),
        ("message_ids", {"message_ids": range(FIRST, FIRST + 10_001)}),
        ("message_ids[0]", {"message_ids": [0]}),
        ("message_ids[0]", {"message_ids": [(SHARD + 1) << 48 | 1]}),
        ("message_ids[2]", {"message_ids": [FIRST, FIRST + 1, 1]}),
        ("message_ids[1]", {"message_ids": [FIRST, (1 << 64) - 1]}),
    ],
)
async def test_bad_input_names_its_field_and_changes_nothing(
    field: str, wrong: dict[str, object]
) -> None:
    async with serving(shard=SHARD, purge_grace_s=0) as ingest:
        ids = await ingest.publish(short(b"a"))
        await purged(ingest, ids)  # so its time is over, also for the next one
        kept = await ingest.send(b"b")
        asked: dict[str, object] = {"reason": EXPIRED, "message_ids": [*ids, *kept], **wrong}
        request = purge_pb2.PurgeMessagesRequest(**asked)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument) as refused:
            await ask(ingest, request)
        assert refused.value.field == field
        assert not await missing(ingest, *kept)


async def test_what_is_over_goes_and_what_is_not_is_refused(root: str) -> None:
    async with at_once(root) as ingest:
        ids = await ingest.publish(short(b"one"), message(b"two"), short(b"three", a="b"))
        others = await ingest.send(bytes(70_000))
        assert await purged(ingest, [ids[0], ids[2]]) == 2
        result = await purge(ingest, [*ids, *ids, *others])
        assert (result.purged_count, result.gone_count, result.purged_bytes) == (0, 2, 0)
        assert result.refused_ids == [ids[1], *others]
        result = await purge(ingest, ids, UNREFERENCED)
        assert result.gone_count == 2
        assert result.refused_ids == [ids[1]]

        async def looks(ingest: Ingest) -> None:
            assert await missing(ingest, *ids, *others) == [ids[0], ids[2]]
            assert await ingest.payloads(ids[1], *others) == [b"two", bytes(70_000)]
            assert [one.message_id for one in await ingest.log()] == [ids[1], *others]
            assert (await ingest.status()).durable_sequence == others[-1]

        await looks(ingest)
    async with at_once(root) as ingest:
        await looks(ingest)


async def test_the_grace_period_is_waited_for() -> None:
    async with serving(purge_grace_s=3600) as ingest:
        ids = await ingest.publish(short(b"one"))
        for _ in range(30):  # more than its second
            assert (await purge(ingest, ids)).refused_ids == ids
            await asyncio.sleep(0.05)


async def test_an_epoch_of_another_time_is_refused_and_says_which_it_is_now(root: str) -> None:
    async with at_once(root) as ingest:
        ids = await ingest.publish(short(b"one"))
        await purged(ingest, ids)
        ids = await ingest.publish(short(b"two"))
        stub = snapshot_pb2_grpc.SnapshotServiceStub(ingest.channel)
        taken = await stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest(), timeout=30)
        await ingest.stub.RaisePurgeEpoch(ingest_pb2.RaisePurgeEpochRequest(), timeout=30)
        for epoch in (taken.snapshot.purge_epoch, 7):
            with pytest.raises(FailedPrecondition) as refused:
                await purge(ingest, ids, epoch=epoch)
            assert refused.value.reason == "STALE_PURGE_EPOCH"
            assert refused.value.metadata["purge_epoch"] == "1"
    async with at_once(root) as ingest:
        with pytest.raises(FailedPrecondition):
            await purge(ingest, ids)
        assert not await missing(ingest, *ids)
        assert await purged(ingest, ids, epoch=1) == 1


async def test_publishes_edits_and_reads_go_on_while_thousands_go(root: str) -> None:
    async with at_once(root) as ingest:
        doomed: list[int] = []
        for n in range(40):
            batch = [short(b"%d" % n, n=str(n)) for _ in range(50)]
            doomed += (await ingest.publish(*batch, message(b"kept %d" % n)))[:-1]
        kept = [one.message_id for one in await ingest.log() if one.message_id not in set(doomed)]
        going = True
        published: list[int] = []

        async def publish() -> None:
            while going:
                published.extend(await ingest.send(b"new"))

        async def edit() -> None:
            for n in range(10_000):
                if not going:
                    return
                one = kept[n % len(kept)] if n % 2 else doomed[n * 7 % len(doomed)]
                request = ingest_pb2.ReplaceMessageRequest(
                    message_id=one, payload=b"edited", keep_headers=True
                )
                try:
                    with raising_slatemq_errors():
                        await ingest.stub.ReplaceMessage(request, timeout=30)
                except NotFound:
                    assert one in set(doomed)

        async def read() -> None:
            while going:
                answer = await ingest.read(*doomed[::9], *kept)
                assert len(answer.messages) + len(answer.missing_ids) == len(doomed[::9]) + 40
                assert set(answer.missing_ids) <= set(doomed)
                for one in answer.messages:
                    if one.message_id in set(doomed) and one.payload != b"edited":
                        assert one.payload == one.headers["n"].encode()

        working = [asyncio.create_task(work()) for work in (publish, publish, edit, read)]
        halves = [doomed[0::2], doomed[1::2], doomed[::3]]
        counts = await asyncio.gather(*(purged(ingest, half) for half in halves))
        going = False
        await asyncio.gather(*working)
        assert sum(counts) == len(doomed)
        assert len(published) > 5
        assert [one.message_id for one in await ingest.log()] == sorted(kept + published)
        assert await missing(ingest, *doomed) == doomed
        sizes = {one.message_id: one.payload_bytes for one in await ingest.log()}
        answer = await ingest.read(*kept)
        assert {one.message_id: len(one.payload) for one in answer.messages} == {
            one: sizes[one] for one in kept
        }


async def test_repeats_and_dedupe_keys_outlive_their_messages(root: str) -> None:
    asked = ingest_pb2.PublishRequest(runs=[short(b"a"), short(b"b")], request_id="r")
    keyed = ingest_pb2.PublishRequest(runs=[short(b"c")])
    keyed.runs[0].dedupe_keys.append("key")
    async with at_once(root) as ingest:
        first = await ingest.stub.Publish(asked, timeout=30)
        once = await ingest.stub.Publish(keyed, timeout=30)
        assert await purged(ingest, [*first.message_ids, *once.message_ids]) == 3
        assert (await ingest.stub.Publish(asked, timeout=30)).message_ids == first.message_ids
    async with at_once(root) as ingest:
        again = await ingest.stub.Publish(asked, timeout=30)
        assert again.message_ids == first.message_ids
        assert again.received_at_ms == 0  # nothing is left that would know
        again = await ingest.stub.Publish(keyed, timeout=30)
        assert again.message_ids == once.message_ids
        assert list(again.duplicates) == [0]
        assert await ingest.log() == []


@pytest.mark.slow
async def test_a_kill_between_the_commit_and_the_deletion_of_the_object_leaves_an_orphan(
    folder: Path, root: str, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    flags = ("--shard", str(SHARD), "--purge-grace-s", "0")
    async with process(root, ready, *flags, module="tests.integration.ingest.killed_purging") as (
        started,
        address,
    ):
        async with open_channel(address) as channel:
            ingest = Ingest(channel)
            ids = await ingest.publish(short(bytes(70_000)), short(b"small"), message(b"stays"))
            with pytest.raises((SlateMQError, grpc.aio.AioRpcError)):
                await purged(ingest, ids[:2])
        assert await started.wait() == -9
    blobs = [path for path in (folder / "blobs").rglob("*") if path.is_file()]
    assert len(blobs) == 1
    async with process(root, ready, *flags) as (_, address), open_channel(address) as channel:
        ingest = Ingest(channel)
        result = await purge(ingest, ids[:2])
        assert (result.gone_count, result.purged_count) == (2, 0)
        assert await missing(ingest, *ids) == ids[:2]
        assert [one.message_id for one in await ingest.log()] == ids[2:]
        await ingest.send(b"goes on")
    assert blobs[0].is_file()


SHORT: dict[str, str] = {
    "manifest_poll_interval": "100ms",
    "compactor_options.poll_interval": "100ms",
    "compactor_options.commit_compacted_interval": "100ms",
    "compactor_options.checkpoint_lifetime": "1s",
    "compactor_options.worker.compactions_poll_interval": "100ms",
} | {
    f"garbage_collector_options.{kind}_options.{name}": value
    for kind in ("wal", "compacted", "manifest", "compactions")
    for name, value in (("interval", "200ms"), ("min_age", "1s"))
}
"""What takes minutes in SlateDB as we set it, in a second."""


def _impatient(kind: Kind, scheme: str, wal_scheme: str) -> Tuning:
    tuning = tuning_of(kind, scheme, wal_scheme)
    return dataclasses.replace(
        tuning, replay=ReplayBound(2, 60), settings={**tuning.settings, **SHORT}
    )


async def test_a_purged_payload_is_gone_from_the_bytes_of_the_store(
    folder: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.storage.database.roots.tuning_of", _impatient)
    small, large, kept = (secrets.token_bytes(size) for size in (2_000, 70_000, 2_000))
    header = secrets.token_hex(500)

    def where(marker: bytes) -> list[str]:
        return [
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and marker in _content(path)
        ]

    async with at_once(root) as ingest:
        # Given messages that are in the store, in sorted tables too
        ids = await ingest.publish(short(small, h=header), short(large), message(kept))
        for n in range(6):
            await ingest.send(b"%d" % n)
        for marker in (small, large, kept, header.encode()):
            assert where(marker)
        # When they are purged, and the store goes on
        assert await purged(ingest, ids[:2]) == 2
        async with asyncio.timeout(WAIT_SECONDS):
            while any(where(one) for one in (small, large, header.encode())):
                for _ in range(10):
                    await ingest.send(b"more")
                await asyncio.sleep(0.2)
        # Then nothing of them is left, and the other one is
        assert where(kept)
        assert await ingest.payloads(ids[2]) == [kept]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # collected since it was listed
        return b""
