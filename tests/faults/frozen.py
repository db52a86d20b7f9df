"""Owners and a router that stand still until what they last read from the store is collected.

WAL objects are kept for minutes, and then go. An owner that stood still for longer, was replaced,
and goes on, finds other objects than those that it left, and calls that came meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio

from libs.serving.process.ownership import STANDSTILL_S
from libs.storage.database.roots import open_root
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc, ingest_pb2, ingest_pb2_grpc
from tests.faults.mixed_work import FILTERS, Work
from tests.faults.recorded import payload_of
from tests.faults.shard_processes import Member
from tests.faults.zombies import run_history

PUBLISHES_BEFORE = 20
CALLS = 16
COLLECTED_S = 120.0

PLAIN = {"kind": "plain", "class": "0", "parity": "even"}
"""Headers of what queues take: what a zombie stores would come, and was sent by no client."""

NOT_ANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Cancelled: the server ends before it has looked at the call."""


class CollectingMember(Member):
    """A member whose WAL objects go without delay, by tests.faults.collecting."""

    @property
    def program(self) -> Sequence[str]:
        return "-m", "tests.faults.collecting", self.service

    @property
    def database(self) -> str:
        """Its name below the root."""
        return f"{self.service}/{self.shard}"

    def wal_commits(self) -> set[str]:
        """The names of the objects of its WAL that have commits.

        The others are empty: one of each start, which fences older owners, and stays for ever.
        """
        folder = self.folder / "data" / self.database / "wal"
        found = set()
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_size:
                    found.add(path.name)
        return found

    def call(self, channel: grpc.aio.Channel) -> Any:
        """A call that only the owner of the shard may answer."""
        if self.service == "ingest":
            message = ingest_pb2.PublishRun(payloads=[payload_of("of a zombie")], headers=PLAIN)
            publish = ingest_pb2.PublishRequest(runs=[message])
            return ingest_pb2_grpc.IngestServiceStub(channel).Publish(publish)
        claim = consumer_pb2.ClaimRequest(queue_id=next(iter(FILTERS)), max_messages=1)
        return consumer_pb2_grpc.ConsumerServiceStub(channel).Claim(claim)


async def replace_until_collected(owner: CollectingMember, left: set[str], seconds: float) -> None:
    """Freeze an owner, and thaw it when these objects of its WAL are gone, and the time is over.

    The calls that came meanwhile are the first that it reads then; it may answer none of them.
    """
    calls: list[Any] = []
    root = open_root(owner.root)

    async def meanwhile() -> None:
        calls.extend(owner.call(channel) for _ in range(CALLS))
        # Calls that need no commit are answered without a proof for as long.
        await asyncio.sleep(max(seconds, STANDSTILL_S))
        async with asyncio.timeout(COLLECTED_S):
            while left & owner.wal_commits():
                # A compaction keeps what it read, and the WAL of that time, for 15 minutes.
                await root.forget_snapshots(owner.database)
                await asyncio.sleep(0.05)

    # Without keepalive: the calls wait for as long as it is frozen.
    async with grpc.aio.insecure_channel(owner.peer_address) as channel:
        await channel.channel_ready()
        await owner.replace(meanwhile())
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, grpc.aio.AioRpcError), f"{owner.name} answered {outcome}"
            assert outcome.code() in NOT_ANSWERED, outcome


async def run_frozen(folder: Path, rounds: int, seconds: float) -> Work:
    """In each round each owner is frozen and replaced, and the router is frozen all that time."""
    ingest, broker = (CollectingMember(folder, service, 0) for service in ("ingest", "broker"))
    router = Member(folder, "router", 0)

    async def mishaps(work: Work) -> None:
        for number in range(rounds):
            for owner in (ingest, broker):
                answered = work.answered_count
                while work.answered_count < answered + PUBLISHES_BEFORE:
                    await asyncio.sleep(0.05)
                async with asyncio.timeout(COLLECTED_S):
                    while not (left := owner.wal_commits()):
                        await asyncio.sleep(0.01)
                await router.freeze(replace_until_collected(owner, left, seconds))
                print(f"round {number}: {owner.name} replaced, collected and thawed", flush=True)

    members = [ingest, broker, router]
    return await run_history(folder, members, broker, mishaps, settled_s=seconds)
