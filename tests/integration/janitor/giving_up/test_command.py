"""The command that gives a shard up leaves its number, and nothing else of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.process.logs import AUDIT_LOGGER
from libs.storage.database.roots import open_root
from libs.storage.objects.removed_shards import RemovedShards
from services.janitor.giving_up.command import give_up, main
from slatemq.errors import FailedPrecondition
from tests.integration.broker.rig import introduce, running


async def put(root_url: str) -> None:
    objects = open_root(root_url).objects
    directory = TopologyDirectory(objects)
    for shard in (1, 11):
        await directory.announce(Peer("broker", shard, f"127.0.0.1:{shard}"))
        await objects.put(f"shard-owners/broker/{shard}/1.json", b"{}")
    await objects.put("broker/11/manifest/1", b"x")
    await directory.close()


async def left(root_url: str) -> list[str]:
    objects = open_root(root_url).objects
    folders = ("broker", "shard-owners", "topology", "removed-shards")
    return [path for folder in folders for path in await objects.list(folder)]


async def check(root_url: str) -> None:
    assert [path for path in await left(root_url) if path.endswith("1.json") or "11" in path] == [
        "broker/11/manifest/1",
        "shard-owners/broker/11/1.json",
        "topology/broker-11.json",
        "removed-shards/broker-1.json",
    ]
    removed = RemovedShards(open_root(root_url).objects)
    assert await removed.has("broker/1")
    assert await removed.is_given_up("broker/1")
    assert not await removed.is_given_up("broker/11")


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_left_of_the_shard_is_deleted_but_its_number(
    tmp_path: Path, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    url = tmp_path.as_uri()
    asyncio.run(put(url))
    for _ in range(times):
        assert main(["give-up", "--yes", "broker/1"], {"SLATEMQ_ROOT": url}) == 0
    asyncio.run(check(url))
    acts = [vars(one) for one in caplog.records if one.name == AUDIT_LOGGER]
    assert [(one["act"], one["outcome"], one["details"]) for one in acts] == [
        ("give-up", "OK", f"root={url}, shard=broker/1")
    ] * times


def test_a_shard_that_is_not_there_is_not_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = tmp_path.as_uri()
    assert main(["give-up", "--root", url, "--yes", "broker/7"], {}) == 1
    assert "has no broker/7" in capsys.readouterr().err
    for shard in ("broker/07", "router/1", "broker"):
        with pytest.raises(SystemExit):
            main(["give-up", "--root", url, "--yes", shard], {})
    with pytest.raises(SystemExit):
        main(["give-up", "--root", url, "broker/7"], {})


@contextmanager
def frozen() -> Iterator[str]:
    """The address of a process that stands still."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("claim", ["whole", "damaged", "lost"])
async def test_a_shard_whose_process_runs_is_not_given_up(tmp_path: Path, claim: str) -> None:
    async with running(tmp_path, shard=1, settings={"owner_name": "pod-1"}) as rig:
        await introduce(rig)
        root = open_root(tmp_path.as_uri())
        path = f"shard-owners/broker/1/{1:020}.json"
        assert await root.objects.exists(path)
        if claim == "damaged":
            await root.objects.put(path, b"{")
        elif claim == "lost":
            await root.objects.delete(path)
        before = await left(tmp_path.as_uri())
        with pytest.raises(FailedPrecondition, match="stop it and its standbys") as refused:
            await give_up(root, "broker/1")
        assert refused.value.reason == "SHARD_RUNNING"
        assert await left(tmp_path.as_uri()) == before
        assert not await RemovedShards(root.objects).has("broker/1")
    await give_up(root, "broker/1")
    assert await RemovedShards(root.objects).is_given_up("broker/1")


async def test_a_shard_where_something_listens_that_says_nothing_is_not_given_up(
    tmp_path: Path,
) -> None:
    root = open_root(tmp_path.as_uri())
    directory = TopologyDirectory(root.objects)
    with frozen() as address:
        await directory.announce(Peer("broker", 1, address))
        with pytest.raises(FailedPrecondition, match=f"what listens at {address}"):
            await give_up(root, "broker/1")
    await give_up(root, "broker/1")
    await directory.close()


async def test_another_process_at_the_address_of_a_shard_does_not_keep_it(tmp_path: Path) -> None:
    async with running(tmp_path, shard=2):
        root = open_root(tmp_path.as_uri())
        directory = TopologyDirectory(root.objects)
        topology = await directory.read(max_age_ms=0)
        await directory.announce(Peer("broker", 1, topology.brokers[2]))
        await give_up(root, "broker/1")
        await directory.close()
