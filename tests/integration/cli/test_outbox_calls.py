"""What people do about pushes that do not arrive: with the client, and on the command line."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import slatemq
from services.broker.outbox.targets import IngestPushes
from slatemq.errors import FailedPrecondition, NotFound
from tests.integration.broker.outbox.test_executing import execute, push
from tests.integration.broker.outbox.test_outbox import waiting
from tests.integration.broker.outbox.test_outbox_repair import BELOW_LARGE, LARGE, known, stored
from tests.integration.broker.rig import Rig, running
from tests.integration.cli import ready_command
from tests.integration.cli.stack import RUN_SECONDS
from tests.integration.ingest.server import serving
from tests.integration.waiting import eventually


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A broker of which an ingest has refused two pushes, and is down now."""
    await known(tmp_path)
    async with running(tmp_path, pushes=IngestPushes) as started:
        await started.create()
        for payload in (LARGE, b"1", LARGE + b"!"):
            await execute(started, push(payload=payload, headers={"a": "b"}))
        async with serving(tmp_path.as_uri(), **BELOW_LARGE):
            await eventually(lambda: waiting(started) == 0)
        yield started


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(rig.running.address) as connected:
        yield connected


async def slate(rig: Rig, *arguments: str) -> CompletedProcess[str]:
    environ = {**os.environ, "SLATEMQ_ENDPOINT": rig.running.address}
    words = ("outbox", *arguments)
    ended = await asyncio.to_thread(ready_command.run, words, environ, b"", RUN_SECONDS)
    return CompletedProcess(words, ended.returncode, ended.stdout.decode(), ended.stderr.decode())


async def test_refused_pushes_are_listed_shown_retried_and_discarded(
    rig: Rig, client: slatemq.Client, tmp_path: Path
) -> None:
    first, second = [push async for push in client.refused_pushes()]
    assert (first.queue_id, first.payload_bytes, first.payload) == ("q", len(LARGE), b"")
    assert first.reason

    whole = await client.get_refused_push(second.push_id)
    assert (whole.payload, dict(whole.headers)) == (LARGE + b"!", {"a": "b"})

    await client.discard_refused_push(first)
    with pytest.raises(NotFound):
        await client.discard_refused_push(first.push_id)
    async with serving(tmp_path.as_uri()) as ingest:
        await client.retry_refused_push(second.push_id)
        with pytest.raises(NotFound):
            await client.retry_refused_push(second)
        await eventually(lambda: waiting(rig) == 0)
        assert await stored(ingest) == [b"1", LARGE + b"!"]
    assert [push async for push in client.refused_pushes()] == []


async def test_the_lines_show_what_waits_and_none_that_is_not_halted_is_resumed(
    rig: Rig, client: slatemq.Client
) -> None:
    await execute(rig, push(payload=b"2"))

    (line,) = [line async for line in client.outbox_lines()]

    assert (line.broker_shard, line.ingest_shard, line.waiting_count) == (0, 0, 1)
    assert line.halted_reason == ""
    with pytest.raises(FailedPrecondition, match="halted"):
        await client.resume_outbox(0, 0)


async def test_the_command_line_lists_shows_retries_and_discards(rig: Rig) -> None:
    listed = await slate(rig, "refused", "--json")
    first, second = map(json.loads, listed.stdout.splitlines())
    table = await slate(rig, "refused")
    assert first["push_id"] in table.stdout
    assert first["reason"] in table.stdout

    shown = json.loads((await slate(rig, "show", first["push_id"], "--json")).stdout)
    assert (shown["payload"], shown["headers"]) == (LARGE.decode(), {"a": "b"})
    assert "header   a: b" in (await slate(rig, "show", first["push_id"])).stdout

    assert (await slate(rig, "discard", first["push_id"])).stdout == (
        f"discarded {first['push_id']}\n"
    )
    again = await slate(rig, "retry", second["push_id"], first["push_id"])
    assert again.stdout == f"retried {second['push_id']}\n"
    assert again.returncode == 1
    assert first["push_id"] in again.stderr

    (line,) = map(json.loads, (await slate(rig, "ls", "--json")).stdout.splitlines())
    assert line["waiting_count"] == 1
    assert "waiting" in (await slate(rig, "ls")).stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("resume", "--broker", "0", "--ingest", "0"), "halted"),
        (("resume", "--broker", "7", "--ingest", "0"), "7"),
        (("show", "nonsense"), "nonsense"),
        (("discard",), "PUSH"),
        (("resume", "--broker", "0", "--ingest", "99999"), "--ingest"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_words(
    rig: Rig, arguments: tuple[str, ...], text: str
) -> None:
    ended = await slate(rig, *arguments)

    assert ended.returncode in (1, 2)
    assert text in ended.stderr
