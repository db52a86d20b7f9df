"""A store of each release is opened, drained and verified by this version."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

import slatemq
from tests.acceptance.local_stack import REPOSITORY, LocalStack
from tests.faults.verified import faults_of
from tests.kept_stores import Contents, names, text_of, texts_in, unpack

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.parametrize("name", names())
def test_a_kept_store_is_read_drained_and_verified(name: str, tmp_path: Path) -> None:
    # Given the root that a version has left
    root = tmp_path / "data"
    contents = unpack(name, root)

    # When it is verified, opened, and consumed
    assert faults_of(root.as_uri()) == []
    with LocalStack(tmp_path, ready=True) as stack:
        asyncio.run(consumed(stack.endpoint, contents))

    # Then what is left is whole
    assert faults_of(root.as_uri()) == []


async def consumed(endpoint: str, contents: Contents) -> None:
    """All that was in it is there, and no more."""
    async with slatemq.connect(endpoint) as client:
        for queue, texts in contents.claimable.items():
            assert await drained(client, queue, len(texts)) == sorted(texts)
        for queue, texts in contents.dead.items():
            found = [text async for text in texts_in(client, queue, "failed")]
            assert sorted(found) == sorted(texts)
        for queue, texts in contents.done.items():
            found = [text async for text in texts_in(client, queue, "done")]
            assert sorted(found) == sorted(texts)
        listed = {queue.queue_id async for queue in client.list_queues()}
    assert listed == contents.claimable.keys() | contents.dead.keys() | contents.done.keys()


async def drained(client: slatemq.Client, queue: str, count: int) -> list[str]:
    """The payloads of all messages that can be claimed."""
    found: list[str] = []
    while len(found) < count:
        for message in await client.claim(queue, 100, wait=60):
            found.append(text_of(message.payload))
            await message.ack()
    counts = (await client.get_queue(queue)).counts
    assert counts.available_count + counts.delayed_count + counts.in_flight_count == 0
    return sorted(found)


def test_a_store_of_each_release_is_kept() -> None:
    listed = subprocess.run(
        ["git", "tag", "--list", "v*"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert names()
    assert set(listed.stdout.split()) <= set(names())
