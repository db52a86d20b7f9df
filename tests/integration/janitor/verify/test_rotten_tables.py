"""A table of a running ingest that rots: what it holds is never served, and the rest is."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path

import pytest

import slatemq
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import StorageError
from libs.storage.layout.keys import payload_key
from libs.storage.records.payload_packs import pack_key, pack_of
from services.janitor.verify import walk
from services.janitor.verify.command import verify_stopped
from services.janitor.verify.findings import Finding
from slatemq.errors import Unavailable
from tests.integration.janitor.instances import WAIT_S, Instance, instance
from tests.integration.janitor.runs.janitors import janitor
from tests.integration.janitor.verify.test_running import cli, dead_letters, verified

BATCHES = 3
"""Each is a table: a verification takes a snapshot, for which all is flushed."""

MESSAGES = 10
PAYLOAD_BYTES = 5000


SMALL_MESSAGES = 200
SMALL_BYTES = 100
"""So small that a pack has several of them, and a block several packs."""


def rot(table: Path, place: int) -> bytes:
    """Flips a bit of a table; returns what it was."""
    good = table.read_bytes()
    table.write_bytes(good[:place] + bytes((good[place] ^ 8,)) + good[place + 1 :])
    return good


async def publish(
    made: Instance, luck: random.Random, count: int = MESSAGES, size_bytes: int = PAYLOAD_BYTES
) -> dict[int, bytes]:
    payloads = [luck.randbytes(size_bytes) for _ in range(count)]
    outgoing = [slatemq.OutgoingMessage(one, {"queue": "orders"}) for one in payloads]
    ids = map(int, await made.client.publish_many(outgoing))
    await made.routed()
    return dict(zip(ids, payloads, strict=True))


async def delivered(made: Instance) -> AsyncGenerator[tuple[int, bytes], None]:
    """What is delivered, and acked, for as long as the caller wants more."""
    while True:
        try:
            messages = await made.client.claim("orders", BATCHES * MESSAGES, wait=1)
        except Unavailable:
            continue
        for one in messages:
            yield one.message_id, one.payload
            await one.ack()


async def test_messages_of_other_tables_are_delivered_and_the_damaged_ones_once_restored(
    tmp_path: Path,
) -> None:
    luck = random.Random(1)
    published: dict[int, bytes] = {}
    async with instance(tmp_path) as made, janitor(tmp_path, own_jobs=False) as there:
        await made.client.create_queue("orders", filter="true")
        for _ in range(BATCHES):
            published |= await publish(made, luck)
            assert (await verified(there, "verify"))["counts"]["faults"] == 0
    # Given an instance that has started, so that no payload is in memory, and a rotten table
    async with instance(tmp_path) as made, janitor(tmp_path, own_jobs=False) as there:
        tables = (made.data / "ingest" / "0" / "compacted").glob("*.sst")
        table = max(tables, key=lambda path: path.stat().st_size)
        good = rot(table, table.stat().st_size // 2)

        # Then it is named, with the messages that cannot be read
        run = await verified(there, "verify")
        named = {int(one) for finding in run["findings"] for one in finding["message_ids"]}
        assert any(table.name in finding["wrong"] for finding in run["findings"])
        assert named < published.keys()
        _, out, _ = await cli(there, "verify")
        assert "these messages wait until then" in out

        # And the others are delivered, with their bytes, and no message is a dead letter
        found: dict[int, bytes] = {}
        async with asyncio.timeout(WAIT_S), aclosing(delivered(made)) as messages:
            async for message_id, payload in messages:
                found[message_id] = payload
                if found.keys() | named == published.keys():
                    break
            assert found.keys() < published.keys()
            assert await dead_letters(made) == []

            # When the table is restored, then they come, too
            table.write_bytes(good)
            async for message_id, payload in messages:
                found[message_id] = payload
                if len(found) == len(published):
                    break
        assert found == published


async def unreadable(root: Root, entries: Iterable[list[int]]) -> set[int]:
    """The messages of these log entries whose payload an ingest could not read by its key."""
    reader = await root.open_latest("ingest/0")
    found = set()
    for ids in entries:
        for one in ids:
            try:
                await reader.get(payload_key(one))
                await reader.get(pack_key(pack_of(ids[0], one)))
            except StorageError:
                found.add(one)
    await reader.close()
    return found


def named_count(findings: Iterable[Finding]) -> int:
    """How many messages are said to have a payload that cannot be read."""
    found = (re.search(r"the payloads of (\d+) of", one.wrong) for one in findings)
    return sum(int(one[1]) for one in found if one is not None)


async def test_only_messages_whose_payloads_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given tables of large and of small payloads
    luck = random.Random(1)
    entries: list[list[int]] = []
    async with instance(tmp_path) as made, janitor(tmp_path, own_jobs=False) as there:
        for count, size_bytes in ((MESSAGES, PAYLOAD_BYTES), (SMALL_MESSAGES, SMALL_BYTES)):
            entries.append(sorted(await publish(made, luck, count, size_bytes)))
            assert (await verified(there, "verify"))["counts"]["faults"] == 0
        data = made.data

    for share in (0.5, 0.6, 0.75):
        for number in (1, 2):
            # When a block of one of them rots
            copy = tmp_path / f"{share}-{number}"
            shutil.copytree(data, copy)
            table = sorted((copy / "ingest" / "0" / "compacted").glob("*.sst"))[number]
            rot(table, int(table.stat().st_size * share))
            root = open_root(copy.as_uri(), sync=False)
            lost = await unreadable(root, entries)
            assert lost

            # Then a verification names what it held, and no other message
            findings = (await verify_stopped(root)).all()
            assert named_count(findings) == len(lost)
            assert {one for finding in findings for one in finding.message_ids} <= lost

            # And some beside it at most, where no more rows are read by their keys
            with monkeypatch.context() as bounded:
                bounded.setattr(walk, "READS_ALONE_MAX", 0)
                findings = (await verify_stopped(root)).all()
            assert len(lost) <= named_count(findings) <= len(lost) + SMALL_MESSAGES // 4
