"""The settings of the instance, between processes: made, contradicted, changed, refused."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import slatemq
from libs.serving.process.instance import InstanceSettings
from libs.serving.process.settings import settings_of
from slatemq._admin import instance as client_part
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.cli import instance as command
from slatemq.errors import DataLoss, FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from slatemq.v1 import instance_pb2, instance_pb2_grpc
from tests.integration.stack.processes import WAIT_SECONDS, Service

WAIT_S = 60
HOUR_MS = 3_600_000
GRACE = ("--purge-grace-s", "7")


@asynccontextmanager
async def running(*services: Service) -> AsyncIterator[slatemq.Client]:
    try:
        for service in services:
            await service.start()
        async with slatemq.connect(services[0].address, call_timeout=WAIT_SECONDS) as client:
            yield client
    finally:
        for service in services:
            await service.close()


async def ended(*arguments: str, **environ: str) -> tuple[int | None, str]:
    """How a program of ours ends, and what it says on stderr."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(WAIT_S):
        said, _ = await program.communicate()
    return program.returncode, said.decode()


def test_all_parts_have_the_same_settings() -> None:
    names = tuple(field.name for field in settings_of(InstanceSettings))

    assert names == client_part.SETTINGS == command.SETTINGS


async def test_a_process_that_contradicts_the_instance_stops(tmp_path: Path) -> None:
    # Given an instance that an ingest made with a grace of 7 s
    async with running(Service(tmp_path, "ingest", *GRACE)) as client:
        # When a broker starts whose environment says otherwise
        root = (tmp_path / "data").as_uri()
        code, said = await ended(
            "services.broker", "--root", root, SLATEMQ_PURGE_GRACE_S="8", SLATEMQ_RETENTION_S="5"
        )

        # Then it names both values and the command, with the exit code of a wrong setting
        assert code == 2
        assert "SLATEMQ_PURGE_GRACE_S is 8, but the instance has purge_grace_s=7" in said
        assert "slatemq instance set purge_grace_s=8" in said
        assert "SLATEMQ_RETENTION_S is 5, but the instance has retention_s=604800" in said
        assert not (tmp_path / "data/broker").exists()
        found = await client.get_instance()
        assert (found.number, found.settings["purge_grace_s"]) == (1, 7)


async def test_a_change_holds_in_each_process_that_starts_again(tmp_path: Path) -> None:
    ingest, broker = Service(tmp_path, "ingest"), Service(tmp_path, "broker")
    async with running(ingest, broker) as client:
        # Given a queue that may not delay for so long
        with pytest.raises(InvalidArgument):
            await client.create_queue("slow", default_delay=3600)

        # When the instance is changed
        await client.update_instance({"max_message_delay_ms": HOUR_MS})

        # Then what runs goes on as before
        with pytest.raises(InvalidArgument):
            await client.create_queue("slow", default_delay=3600)

        # And a broker that is started again follows
        await broker.kill()
        await broker.start()
        assert (await client.create_queue("slow", default_delay=3600)).default_delay_ms == HOUR_MS
        numbers = {"broker": 0}
        async with asyncio.timeout(WAIT_S):
            while not all(numbers.values()):  # A process that is busy may answer too late.
                status = await client.status()
                numbers = {one.service: one.instance_number for one in status.services}
        assert status.instance_number == 2
        assert numbers == {"ingest": 1, "broker": 2}


async def test_a_change_that_would_lose_something_is_refused(tmp_path: Path) -> None:
    ingest, broker = Service(tmp_path, "ingest"), Service(tmp_path, "broker")
    async with running(ingest, broker) as client:
        await client.create_queue("slow", default_delay=600)

        async def refusal(accept_loss: bool = False, **settings: int) -> str:
            with pytest.raises(FailedPrecondition) as refused:
                await client.update_instance(settings, accept_loss=accept_loss)
            return refused.value.reason

        assert await refusal(replay_window_s=1) == "CHANGE_LOSES"
        assert await refusal(purge_grace_s=1) == "CHANGE_LOSES"
        assert await refusal(True, payload_bytes_max=1) == "PAYLOADS_STORED"
        assert await refusal(True, max_message_delay_ms=599_999) == "QUEUES_DELAY_LONGER"
        # Nothing of a change is made where a part of it is refused
        assert await refusal(purge_grace_s=1, retention_s=1) == "CHANGE_LOSES"
        assert (await client.get_instance()).number == 1

        # What no queue needs is taken, and what loses something once it is accepted
        assert (await client.update_instance({"max_message_delay_ms": 600_000})).number == 2
        changed = await client.update_instance({"purge_grace_s": 1}, accept_loss=True)
        assert (changed.number, changed.settings["purge_grace_s"]) == (3, 1)

        # A broker that cannot be asked may have such a queue
        await broker.kill()
        stub = instance_pb2_grpc.InstanceServiceStub(ingest.there)
        settings = instance_pb2.InstanceSettings(max_message_delay_ms=1)
        request = instance_pb2.UpdateInstanceRequest(settings=settings)

        async def refused() -> bool:
            with pytest.raises(Unavailable) as refusal, raising_slatemq_errors():
                await stub.UpdateInstance(request, timeout=WAIT_S)
            # On a busy machine the channel may break by its keepalive, which says nothing of this.
            return "broker 0 has to be asked for its queues" in refusal.value.message

        async with asyncio.timeout(WAIT_S):
            while not await refused():
                await asyncio.sleep(0.1)


async def test_a_router_which_has_no_events_changes_nothing_and_says_who_does(
    tmp_path: Path,
) -> None:
    ingest, router = Service(tmp_path, "ingest"), Service(tmp_path, "router")
    async with running(ingest, router) as client:
        stub = instance_pb2_grpc.InstanceServiceStub(router.there)
        request = instance_pb2.UpdateInstanceRequest(
            settings=instance_pb2.InstanceSettings(retention_s=1)
        )

        with pytest.raises(Unimplemented) as refusal, raising_slatemq_errors():
            await stub.UpdateInstance(request, timeout=WAIT_S)

        assert refusal.value.reason == "WRONG_SERVICE"
        assert refusal.value.metadata == {
            "service": "slatemq.v1.InstanceService.UpdateInstance",
            "served_by": "ingest,broker,janitor",
            "addresses": ingest.address,
        }
        assert (await client.get_instance()).number == 1

        # The client calls none: each of these would fail one time in two
        for number in range(2, 12):
            assert (await client.update_instance({"retention_s": number})).number == number


async def test_changes_at_the_same_time_are_all_kept_and_repeating_one_changes_nothing(
    tmp_path: Path,
) -> None:
    changes = [
        {"retention_s": 100},
        {"dedupe_window_s": 700},
        {"request_id_window_s": 1200},
        {"replay_window_s": 0},
        {"purge_grace_s": 90},
    ]
    async with running(Service(tmp_path, "ingest")) as client:
        await asyncio.gather(*(client.update_instance(change) for change in changes))

        found = await client.get_instance()
        assert found.number == 1 + len(changes)
        for change in changes:
            assert change.items() <= found.settings.items()
        # An answer that got lost is repeated by the client
        assert await client.update_instance(changes[0]) == found


async def test_a_change_without_sense_is_refused(tmp_path: Path) -> None:
    async with running(Service(tmp_path, "ingest")) as client:
        for settings, words in (
            ({"speed": 1}, "'speed' is not a setting of the instance"),
            ({"retention_s": "long"}, "must be a whole number"),
            ({"retention_s": -1}, "must be at least 0, not -1"),
            ({}, "name at least one setting"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                await client.update_instance(settings)  # type: ignore[arg-type]


async def test_a_record_that_a_process_cannot_follow_is_named_and_not_changed(
    tmp_path: Path,
) -> None:
    records = tmp_path / "data/instance"
    async with running(Service(tmp_path, "ingest")) as client:
        # Given a record of a newer version, written while an older process runs
        first = (records / f"{1:020}.json").read_text()
        newer = first.replace('"number": 1', '"number": 2').replace("retention_s", "speed")
        (records / f"{2:020}.json").write_text(newer)

        for call in (client.get_instance(), client.update_instance({"retention_s": 1})):
            with pytest.raises(FailedPrecondition, match=r"does not know \(speed\)") as refused:
                await call
            assert refused.value.reason == "OTHER_FORMAT"

        # And records that are damaged, or gone
        (records / f"{2:020}.json").write_text("{}")
        with pytest.raises(DataLoss, match="instance record"):
            await client.get_instance()
        for path in records.iterdir():
            path.unlink()
        with pytest.raises(DataLoss, match="removed from the store"):
            await client.update_instance({"retention_s": 1})
        assert list(records.iterdir()) == []
