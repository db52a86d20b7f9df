"""Answers of ingest with long entries: others have turns while one is read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from libs.serving.peers.calls import PeerFailed
from libs.serving.peers.channels import Channels, Connection
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.records.log_parts import PART_MESSAGES_MAX
from services.router.tails import Buffer, Log
from slatemq._byte_budget import ByteBudget
from slatemq.v1.ingest_pb2 import TailLogResponse
from tests.log_entries import DecodedEntry, logged
from tests.turns import Turns

MESSAGES = 20 * PART_MESSAGES_MAX


def started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


def log_of(budget: ByteBudget) -> Log:
    channels = Channels(TopologyDirectory(open_root("memory:///").objects))
    return Log(0, Connection(channels, "ingest", 0), started, Buffer(), budget)


def long_answer() -> TailLogResponse:
    ids = range(1, MESSAGES + 1)
    entry = DecodedEntry(1, [logged(n, {"key": str(n)}) for n in ids]).encoded()
    short = [DecodedEntry(n, [logged(n)]).encoded() for n in range(MESSAGES + 1, 2 * MESSAGES)]
    return TailLogResponse(entries=[entry, *short])


async def test_others_have_turns_while_a_long_answer_is_read() -> None:
    budget = ByteBudget(1 << 40)
    log, answer = log_of(budget), long_answer()

    with Turns() as turns:
        async with log.reading(answer) as entries:
            # A turn before each part and one behind it, and one after as many short entries
            assert turns.count >= 3 * 20 - 2
            assert [entries[0].first, entries[-1].last] == [1, 2 * MESSAGES - 1]
            assert max(entry.messages_count for entry in entries) == PART_MESSAGES_MAX
            assert budget.used_bytes == sum(entry.memory_bytes for entry in entries)
    assert budget.used_bytes == 0


async def test_a_long_entry_is_held_only_as_far_as_there_is_memory() -> None:
    budget = ByteBudget(1 << 20)
    async with log_of(budget).reading(long_answer()) as entries:
        whole = [entry for entry in entries if entry.memory_bytes > 2 * entry.size_bytes + 1024]
        assert 0 < len(whole) < len(entries)
        assert [entry.runs[0][0][0] for entry in entries] == [entry.first for entry in entries]


async def test_what_cannot_be_read_leaves_nothing_in_the_budget() -> None:
    budget, answer = ByteBudget(1 << 40), long_answer()
    answer.entries[-1].value += b"?"
    with pytest.raises(PeerFailed):
        async with log_of(budget).reading(answer):
            pass
    assert budget.used_bytes == 0
