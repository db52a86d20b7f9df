"""What pages show of a queue while the broker of one of its partitions is down."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import ClientSession

from slatemq import Backoff
from slatemq.v1 import queue_pb2
from slatemq.v1.queue_pb2_grpc import QueueServiceStub
from tests.integration.janitor.instances import instance
from tests.integration.lone_service import running
from tests.integration.waiting import WAIT_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.stack]


async def test_a_page_shows_what_the_others_have_and_names_the_broker_that_is_down(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path, 2, ()) as made:
        client = made.client
        await client.create_queue("waiting", partitions=2)
        await client.create_queue(
            "failed", partitions=2, with_queue="waiting", max_attempts=1, backoff=Backoff.none()
        )
        for queue_id in ("waiting", "failed"):
            await made.publish(queue_id, 20)
        await made.routed()
        nacked_count = 0
        while nacked_count < 20:
            tokens = [one.lease_token for one in await client.claim("failed", 20, wait=60)]
            await client.nack(tokens, "broken")
            nacked_count += len(tokens)
        await client.wait_redrive(await client.start_redrive("failed", rate=1, message_ids=[1]))
        left: dict[str, int] = {}
        down = (await client.get_queue("waiting")).partitions[0].broker_shard
        for queue_id in ("waiting", "failed"):
            for part in (await client.get_queue(queue_id)).partitions.values():
                if part.broker_shard != down:
                    left[queue_id] = part.counts.available_count + part.counts.failed_count
        await made.brokers[down].kill()
        address = made.brokers[1 - down].address
        async with (
            running("console", tmp_path, "--endpoint", address) as addresses,
            ClientSession(f"http://{addresses['address']}") as session,
        ):

            async def shown(path: str, *signs: str) -> str:
                """A page, once it has what the other broker may be too busy to answer in time."""
                async with asyncio.timeout(WAIT_SECONDS):
                    while True:
                        async with session.get(path) as answer:
                            page = await answer.text()
                            if answer.status == 200 and all(sign in page for sign in signs):
                                return page

            done = ">done</span>"
            messages = await shown("/messages?queue=waiting&state=available", '<th scope="row">')
            dead_letters = await shown("/dead-letters?queue=failed", 'name="handles"', done)
            redrives = await shown("/redrives?queue=failed", done)
            none = await shown(
                "/messages?queue=failed&state=delayed", f"The messages of broker {down} are missing"
            )

        assert len(re.findall('<th scope="row">', messages)) == left["waiting"]
        assert f"The messages of broker {down} are missing: " in messages
        assert len(re.findall('name="handles"', dead_letters)) == left["failed"]
        assert f"The dead letters of broker {down} are missing: " in dead_letters
        for page in (dead_letters, redrives):
            assert f"Redrives are missing: the answer is incomplete: broker shard {down}" in page
            assert done in page
        assert f"The messages of broker {down} are missing: " in none
        assert "No message is delayed" not in none


async def test_a_page_has_the_messages_of_the_partitions_behind_one_that_is_empty(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path, 2, ()) as made:
        await made.client.create_queue("q", partitions=2)
        (message_id,) = await made.publish("q", 1)
        await made.routed()
        first = (await made.client.get_queue("q")).partitions[0]
        assert not first.counts.available_count
        async with (
            running("console", tmp_path, "--endpoint", made.brokers[0].address) as addresses,
            ClientSession(f"http://{addresses['address']}") as session,
            session.get("/messages?queue=q&state=available") as answer,
        ):
            assert f">{message_id}</a>" in await answer.text()


async def test_the_page_of_a_queue_being_created_offers_no_end_of_its_quarantine(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path, 1, ()) as made:
        partition = queue_pb2.Partition(index=0, count=1)
        await QueueServiceStub(made.brokers[0].there).CreateQueue(
            queue_pb2.CreateQueueRequest(
                queue=queue_pb2.Queue(queue_id="q", partition=partition), broker_shards=[0]
            )
        )
        async with (
            running("console", tmp_path, "--endpoint", made.brokers[0].address) as addresses,
            ClientSession(f"http://{addresses['address']}") as session,
        ):
            page = ""
            async with asyncio.timeout(WAIT_SECONDS):
                while "In quarantine" not in page:
                    async with session.get("/queue?queue=q") as answer:
                        page = await answer.text()
    assert "judged once all partitions exist" in page
    assert "/queue/do/lift" not in page
