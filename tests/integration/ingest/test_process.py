"""One ingest as a process of its own: killed, fenced, stopped."""

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import grpc.aio
import pytest

from libs.serving.peers.channels import open_channel
from libs.serving.process.exits import EXIT_CLEAN, EXIT_FENCED, EXIT_USAGE
from slatemq.errors import SlateMQError
from tests.integration.ingest.server import Ingest, process
from tests.integration.waiting import eventually

pytestmark = pytest.mark.slow
"""Each starts Python processes, some 0.7 s each."""


async def publish_until_it_ends(address: str, answered: dict[int, bytes], prefix: str = "") -> None:
    """Has payloads by ID of everything that was answered in `answered`."""

    async def publish(ingest: Ingest, name: int) -> None:
        for n in range(1_000_000):
            payloads = [b"%d %d %d" % (name, n, part) for part in range(3)]
            if name == 0:
                payloads[0] = payloads[0] * 20_000  # a blob
            try:
                ids = await ingest.send(*payloads, request_id=f"{prefix}{name}-{n}")
            except (SlateMQError, grpc.aio.AioRpcError):
                return
            answered.update(zip(ids, payloads, strict=True))

    async with open_channel(address) as channel:
        await asyncio.gather(*(publish(Ingest(channel), name) for name in range(8)))


async def test_a_kill_during_publishes_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    root, ready = (tmp_path / "data").as_uri(), tmp_path / "ready"
    answered: dict[int, bytes] = {}
    for count in (100, 300):
        async with process(root, ready) as (started, address):
            more: dict[int, bytes] = {}
            publishing = asyncio.create_task(publish_until_it_ends(address, more, f"{count} "))
            await eventually(lambda more=more, count=count: len(more) >= count)  # type: ignore[misc]
            started.kill()
            await publishing
            assert not set(answered) & set(more)
            answered |= more

    async with (
        process(root, ready) as (_, address),
        open_channel(address) as channel,
    ):
        ingest = Ingest(channel)
        log = await ingest.log()
        ids = [message.message_id for message in log]
        assert ids == sorted(set(ids))
        assert set(answered) <= set(ids)
        wanted = sorted(answered)
        for start in range(0, len(wanted), 100):
            some = wanted[start : start + 100]
            assert await ingest.payloads(*some) == [answered[i] for i in some]
        # And what was not answered is there as a whole: payload for every line of the log
        for start in range(0, len(ids), 100):
            assert len(await ingest.payloads(*ids[start : start + 100])) == len(
                ids[start : start + 100]
            )


async def test_a_second_process_of_the_shard_fences_the_first(tmp_path: Path) -> None:
    root = (tmp_path / "data").as_uri()
    async with process(root, tmp_path / "one") as (first, first_address):
        async with open_channel(first_address) as channel:
            before = await Ingest(channel).send(b"before", request_id="r")
        answered: dict[int, bytes] = {}
        publishing = asyncio.create_task(publish_until_it_ends(first_address, answered))
        async with process(root, tmp_path / "two") as (_, address):
            # The first stops by itself, with the code on which no one restarts it
            async with asyncio.timeout(60):
                code = await first.wait()
            said = (tmp_path / "one.log").read_text()
            assert code == EXIT_FENCED, said
            await publishing
            assert "another process" in said

            # And nothing that it answered is missing
            async with open_channel(address) as channel:
                ingest = Ingest(channel)
                assert await ingest.send(b"before", request_id="r") == before
                in_log = {message.message_id for message in await ingest.log()}
                assert set(answered) <= in_log


async def test_asked_to_stop_it_commits_what_it_accepted_and_ends_cleanly(tmp_path: Path) -> None:
    root, ready = (tmp_path / "data").as_uri(), tmp_path / "ready"
    async with process(root, ready) as (started, address):
        answered: dict[int, bytes] = {}
        publishing = asyncio.create_task(publish_until_it_ends(address, answered))
        await eventually(lambda: answered)
        started.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await started.wait() == EXIT_CLEAN
        await publishing
    async with process(root, ready) as (_, address), open_channel(address) as channel:
        in_log = {message.message_id for message in await Ingest(channel).log()}
        assert set(answered) <= in_log


async def test_a_lost_database_ends_the_process_so_that_no_supervisor_restarts_it(
    tmp_path: Path,
) -> None:
    root = (tmp_path / "data").as_uri()
    async with process(root, tmp_path / "ready"):
        pass
    shutil.rmtree(tmp_path / "data" / "ingest" / "0")
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.ingest", "--root", root, "--port", "0",
        cwd=Path(__file__).parents[3], stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, result = await started.communicate()
    assert started.returncode == EXIT_USAGE
    assert b"ingest/0 is gone" in result


async def test_a_root_that_means_nothing_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended before it served"):
        async with process("ftp://x", tmp_path / "ready") as (_, _):
            pass
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.ingest", "--root", "ftp://x",
        cwd=Path(__file__).parents[3], stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, result = await started.communicate()
    assert started.returncode == EXIT_USAGE
    assert b"ftp" in result
