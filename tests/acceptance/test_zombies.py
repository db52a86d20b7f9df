"""Owners that are killed, frozen, replaced and thawed while messages flow and queues change."""

from pathlib import Path

import pytest

from tests.faults.mixed_work import judged
from tests.faults.zombies import HISTORY, run_zombies
from tests.judge.histories import FUNCTIONS, OK, read

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,  # Zombies are frozen for seconds, and leases end by the clock.
]


async def test_zombies_lose_nothing_store_nothing_twice_and_make_no_dead_letter(
    tmp_path: Path,
) -> None:
    # When members are killed, frozen and replaced for a while, beside queues that change
    work = await run_zombies(tmp_path, seconds=15, seed=4, changes=200)

    # Then every answered message came to every queue that it matches, stored once
    assert work.answered_count
    assert work.changes_count == 200
    assert judged(tmp_path / HISTORY) == []
    # And the judge saw all that clients do, but for what no run has beside it
    operations = [one for one in read([tmp_path / HISTORY]) if one.outcome == OK]
    assert {one.f for one in operations} == FUNCTIONS - {"delete-queue", "trouble"}
    sent = [one for each in operations if each.f == "publish" for one in each.value["messages"]]
    assert any(one["delay_ms"] for one in sent)
    assert any(one["retention_ms"] for one in sent)
    assert any(one["payload_bytes"] for one in sent)
    assert any(one.f == "create-queue" and one.value["backoff_ms"] for one in operations)
