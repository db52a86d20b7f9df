"""Payloads that are stored together: read, replaced and removed as if each were stored alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import parse_payload_key, payload_range
from libs.storage.records.payload_packs import (
    PACK_MESSAGES,
    PACKED_BYTES_MAX,
    PACKED_MESSAGES_MIN,
    decode_pack,
    pack_key,
    pack_range,
    parse_pack_key,
)
from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge, Purged
from services.ingest.edit.replacing import Replacement
from services.ingest.shard import Shard
from slatemq.errors import ResourceExhausted
from tests.forms import seeds
from tests.manual_clock import ManualClock
from tests.stored_messages import read_messages
from tests.unit.ingest.shards import batch, opened

HOUR_MS = 3_600_000
LARGE = PACKED_BYTES_MAX + 1
OBJECT = 70_000


async def read(shard: Shard, ids: Sequence[int], *, with_etags: bool = False) -> dict[int, bytes]:
    data = await read_messages(shard, *ids, with_etags=with_etags)
    assert not data.damaged_ids
    assert sorted([*data.missing_ids, *(one.message_id for one in data.messages)]) == sorted(ids)
    return {one.message_id: one.payload for one in data.messages}


async def purge(shard: Shard, ids: Sequence[int]) -> Purged:
    return await shard.purger.purge(Purge(0, Reason.EXPIRED, list(ids)))


def unlike(count: int, size: int) -> list[bytes]:
    """Payloads that would not become smaller."""
    made = random.Random(count)
    return [made.randbytes(size) for _ in range(count)]


async def rows_of(shard: Shard) -> tuple[dict[int, bytes], dict[int, dict[int, bytes]]]:
    """Payload records by message, and packs by their first ID, as they are stored."""
    whole = (0, MAX_MESSAGE_ID)
    singles = [row async for rows in shard.database.scan(*payload_range(*whole)) for row in rows]
    packs = [row async for rows in shard.database.scan(*pack_range(*whole)) for row in rows]
    return (
        {parse_payload_key(key): value for key, value in singles},
        {parse_pack_key(key): decode_pack(parse_pack_key(key), value) for key, value in packs},
    )


async def stored_ids(shard: Shard) -> list[int]:
    singles, packs = await rows_of(shard)
    assert all(len(pack) >= PACKED_MESSAGES_MIN for pack in packs.values())
    return sorted([*singles, *(one for pack in packs.values() for one in pack)])


async def damage(root: Root, key: bytes) -> None:
    database = await root.database("ingest/0", Kind.INGEST)
    rows = Batch()
    rows.put(key, b"\x01\xff\xffdamaged")
    await database.commit(rows)
    await database.close()


async def test_a_batch_is_stored_in_few_rows_but_for_large_payloads() -> None:
    payloads = [b"%d" % n for n in range(3 * PACK_MESSAGES)]
    payloads[5], payloads[20] = b"l" * LARGE, b"o" * OBJECT
    root = open_root("memory:///")
    async with opened(root) as shard:
        first = (await shard.publisher.publish(batch(*payloads))).first_message_id
        ids = range(first, first + len(payloads))
        singles, packs = await rows_of(shard)
        assert sorted(singles) == [first + 5, first + 20]
        assert sorted(packs) == [first, first + PACK_MESSAGES, first + 2 * PACK_MESSAGES]
        assert await stored_ids(shard) == list(ids)
        assert await read(shard, ids) == dict(zip(ids, payloads, strict=True))
    async with opened(root) as shard:
        assert await read(shard, ids) == dict(zip(ids, payloads, strict=True))
        last = len(payloads) - 1
        assert await read(shard, [first + 30]) == {first + 30: b"30"}
        assert await read(shard, [first, ids[-1]]) == {first: b"0", ids[-1]: b"%d" % last}


async def test_few_messages_have_rows_of_their_own() -> None:
    async with opened() as shard:
        for count in range(1, PACKED_MESSAGES_MIN):
            await shard.publisher.publish(batch(*[b"x"] * count))
        singles, packs = await rows_of(shard)
        assert len(singles) == sum(range(PACKED_MESSAGES_MIN))
        assert not packs


async def test_what_is_purged_is_in_no_row_any_more_and_the_others_are() -> None:
    clock = ManualClock()
    root = open_root("memory:///")
    payloads = [b"payload %d" % n for n in range(100)]
    async with opened(root, clock) as shard:
        first = (await shard.publisher.publish(batch(*payloads))).first_message_id
        ids = list(range(first, first + 100))
        clock.advance(10 * HOUR_MS)
        assert await purge(shard, ids[:64:2]) == Purged(32, sum(map(len, payloads[:64:2])))
        assert await stored_ids(shard) == ids[1:64:2] + ids[64:]
    async with opened(root, clock) as shard:
        left = ids[1:64:2] + ids[64:]
        assert await read(shard, left) == {one: payloads[one - first] for one in left}
        assert (await purge(shard, left[:40])).count == 40
        _, packs = await rows_of(shard)
        assert sorted(one for pack in packs.values() for one in pack) == left[40:]
        assert all(packs.values()), "an empty pack goes"
        assert (await purge(shard, ids)).count == 28
        assert await rows_of(shard) == ({}, {})


async def test_what_is_rewritten_by_one_purge_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.ingest.edit.purging.PACKS_BYTES", 1000)
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        ids: list[int] = []
        for _ in range(6):
            first = (await shard.publisher.publish(batch(*unlike(20, 100)))).first_message_id
            ids += range(first, first + 20)
        clock.advance(10 * HOUR_MS)
        before = shard.log.rewrites_count
        assert (await purge(shard, ids[::5])).count == 24
        assert shard.log.rewrites_count == before + 6
        assert await stored_ids(shard) == [one for one in ids if one not in ids[::5]]


async def test_a_replaced_payload_leaves_its_pack() -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        first = (await shard.publisher.publish(batch(*[b"old"] * 10))).first_message_id
        ids = range(first, first + 10)
        before = await read_messages(shard, *ids, with_etags=True)
        etag = before.etags[3]
        text = await shard.replacer.replace(Replacement(first + 3, etag, b"new", None))
        assert text != etag
        # Again, as after an answer that was lost
        assert await shard.replacer.replace(Replacement(first + 3, etag, b"new", None)) == text
        # Headers alone
        await shard.replacer.replace(Replacement(first + 4, before.etags[4], None, {"a": "b"}))
        singles, packs = await rows_of(shard)
        assert list(singles) == [first + 3]
        assert sorted(packs[first]) == [one for one in ids if one != first + 3]
    async with opened(root) as shard:
        expected = dict.fromkeys(ids, b"old") | {first + 3: b"new"}
        assert await read(shard, ids) == await read(shard, ids, with_etags=True) == expected
        after = await read_messages(shard, *ids, with_etags=True)
        assert after.etags[3] == text
        assert after.etags[5] == before.etags[5]


async def test_payloads_that_are_too_few_for_a_pack_get_records() -> None:
    clock = ManualClock()
    root = open_root("memory:///")
    async with opened(root, clock) as shard:
        first = (await shard.publisher.publish(batch(*[b"x"] * 6))).first_message_id
        ids = list(range(first, first + 6))
        await shard.replacer.replace(Replacement(ids[0], "", b"new", None))
        clock.advance(10 * HOUR_MS)
        assert (await purge(shard, ids[1:3])).count == 2
        singles, packs = await rows_of(shard)
        assert (sorted(singles), packs) == ([ids[0], *ids[3:]], {})
    async with opened(root, clock) as shard:
        expected = {ids[0]: b"new", **dict.fromkeys(ids[3:], b"x")}
        assert await read(shard, [ids[0], *ids[3:]], with_etags=True) == expected
        assert (await purge(shard, ids)).count == 4
        assert await rows_of(shard) == ({}, {})


async def published_before_damage(root: Root, clock: ManualClock) -> list[int]:
    """70 messages of one entry, hours old, whose first pack is damaged."""
    async with opened(root, clock) as shard:
        first = (await shard.publisher.publish(batch(*[b"x"] * 70))).first_message_id
    await damage(root, pack_key(first))
    clock.advance(10 * HOUR_MS)
    return list(range(first, first + 70))


async def test_the_messages_of_a_damaged_pack_are_named_and_go_with_their_entry() -> None:
    clock = ManualClock()
    root = open_root("memory:///")
    ids = await published_before_damage(root, clock)
    async with opened(root, clock) as shard:
        data = await read_messages(shard, *ids)
        assert data.damaged_ids == data.missing_ids == ids[:PACK_MESSAGES]
        assert [one.message_id for one in data.messages] == ids[PACK_MESSAGES:]
        assert (await purge(shard, ids[:2])).count == 2
        assert (await purge(shard, ids)).count == 68
        assert await rows_of(shard) == ({}, {})


async def test_what_has_a_record_of_its_own_is_read_beside_a_damaged_pack() -> None:
    payloads = [b"x"] * 5 + [b"l" * LARGE, b"o" * OBJECT] + [b"x"] * 9
    root = open_root("memory:///")
    async with opened(root) as shard:
        first = (await shard.publisher.publish(batch(*payloads))).first_message_id
        await shard.replacer.replace(Replacement(first + 3, "", b"new", None))
    await damage(root, pack_key(first))
    async with opened(root) as shard:
        whole = [first + 3, first + 5, first + 6]
        assert list(await read(shard, whole)) == whole
        # What is damaged can be replaced, and is whole then
        await shard.replacer.replace(Replacement(first, "", b"repaired", None))
        assert await read(shard, [first]) == {first: b"repaired"}
        data = await read_messages(shard, first + 1)
        assert data.damaged_ids == [first + 1]


async def test_a_damaged_pack_goes_with_the_last_of_its_messages() -> None:
    clock = ManualClock()
    root = open_root("memory:///")
    ids = await published_before_damage(root, clock)
    async with opened(root, clock) as shard:
        assert (await purge(shard, ids[:10])).count == 10
        assert await shard.database.get(pack_key(ids[0])) is not None
        assert (await purge(shard, ids[10:16])).count == 6
        assert await shard.database.get(pack_key(ids[0])) is None
        assert list(await read(shard, ids[16:])) == ids[16:]


async def test_a_large_entry_goes_in_part_by_commits_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.ingest.edit.purging.PACKS_BYTES", 100_000)
    sizes: list[int] = []
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as shard:
        payloads = unlike(500, 3000)
        first = (await shard.publisher.publish(batch(*payloads))).first_message_id
        ids = list(range(first, first + 500))
        admit = shard.publisher.admit

        def noted(size_bytes: int) -> None:
            sizes.append(size_bytes)
            admit(size_bytes)

        monkeypatch.setattr(shard.publisher, "admit", noted)
        clock.advance(10 * HOUR_MS)
        gone = set(ids[::16]) | set(ids[100:140])
        assert (await purge(shard, sorted(gone))).count == len(gone)
        assert len(sizes) > 5
        assert max(sizes) < 250_000
        left = [one for one in ids if one not in gone]
        assert await stored_ids(shard) == left
    async with opened(root, clock) as shard:
        assert await read(shard, left) == {one: payloads[one - first] for one in left}


async def test_objects_of_what_was_purged_go_even_where_the_next_commit_of_the_purge_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.ingest.edit.purging.PACKS_BYTES", 10)
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as shard:
        ids: list[int] = []
        for _ in range(2):
            payloads = [b"x"] * 8 + [b"o" * OBJECT]
            first = (await shard.publisher.publish(batch(*payloads))).first_message_id
            ids += [first, first + 8]
        assert len(await root.objects.list("blobs")) == 2
        admit, asked = shard.publisher.admit, iter([True, False])

        def once(size_bytes: int) -> None:
            if not next(asked):
                raise ResourceExhausted("full", reason="UNCOMMITTED_BYTES")
            admit(size_bytes)

        monkeypatch.setattr(shard.publisher, "admit", once)
        clock.advance(10 * HOUR_MS)
        with pytest.raises(ResourceExhausted):
            await purge(shard, ids)
        assert len(await root.objects.list("blobs")) == 1


@pytest.mark.parametrize("seed", seeds(12, 2))
async def test_random_histories(seed: int) -> None:
    """Publishes, replacements, purges and restarts, beside a plain dictionary."""
    chance = random.Random(seed)
    clock = ManualClock()
    root = open_root("memory:///")
    model: dict[int, bytes] = {}
    serial = 0
    for _ in range(4):
        async with opened(root, clock, payload_cache_bytes=chance.choice([0, 1 << 20])) as shard:
            for _ in range(12):
                step = chance.random()
                ids = sorted(model)
                if step < 0.4 or not ids:
                    count = chance.choice([1, 2, 3, 4, 5, 15, 16, 17, 40, 200])
                    sizes = chance.choices([0, 5, 50, LARGE, OBJECT], [2, 9, 9, 1, 0.1], k=count)
                    payloads = [b"%d " % (serial + n) + b"p" * s for n, s in enumerate(sizes)]
                    serial += count
                    first = (await shard.publisher.publish(batch(*payloads))).first_message_id
                    model |= dict(enumerate(payloads, first))
                elif step < 0.6:
                    one = chance.choice(ids)
                    model[one] = b"r" * chance.choice([1, 100, LARGE, OBJECT])
                    await shard.replacer.replace(Replacement(one, "", model[one], None))
                else:
                    clock.advance(10 * HOUR_MS)
                    start = chance.randrange(len(ids))
                    step_by = chance.choice([1, 1, 2, 7, 16])
                    gone = ids[start : start + chance.choice([1, 10, 20, 300]) : step_by]
                    assert (await purge(shard, gone)).count == len(gone)
                    for one in gone:
                        del model[one]
                assert await stored_ids(shard) == sorted(model)
                some = chance.sample(sorted(model), min(len(model), chance.choice([1, 20, 300])))
                assert await read(shard, some) == {one: model[one] for one in some}
    async with opened(root, clock) as shard:
        assert await read(shard, sorted(model), with_etags=True) == model
