"""Owners that end while a standby waits for their shard."""

import signal
from pathlib import Path

import pytest

import slatemq.sync
from libs.serving.process.healthprobe import probe, probe_answers
from tests import patient_standby
from tests.acceptance.local_stack import LocalStack, wait_until
from tests.faults.failover import KILLED, run_failovers
from tests.faults.mixed_work import judged
from tests.faults.zombies import HISTORY

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,  # A frozen owner is replaced after seconds of silence.
]


async def test_a_standby_takes_over_and_nothing_is_lost_or_stored_twice(tmp_path: Path) -> None:
    # When owners are killed, stopped and frozen, and are started again as standbys
    through = [patient_standby.MODULE]
    found = await run_failovers(tmp_path, kills=2, others=1, seed=1, through=through)

    # Then a client's message got through each time, and every answered message came
    assert sum(map(len, found.gaps_s.values())) == 4
    assert len(found.gaps_s["ingest", KILLED]) + len(found.gaps_s["broker", KILLED]) == 2
    assert found.replaced() == []
    assert found.work.answered_count
    assert judged(tmp_path / HISTORY) == []


def test_a_local_stack_with_standbys_goes_on_without_its_first_owners(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with LocalStack(tmp_path, "--data", str(data), "--standbys", ready=True) as stack:
        # When the first owners are killed
        for service in ("ingest", "broker"):
            stack.signal(service, signal.SIGKILL)

        # Then one of each two processes serves, and the other waits
        for service in ("ingest", "broker"):
            pair = [stack.endpoints[name] for name in (service, f"{service}-standby")]
            wait_until(lambda at=pair: [*map(probe, at)].count("") == 1, 60)
            wait_until(lambda at=pair: not any(map(probe_answers, at)), 60)
            wait_until(lambda one=service: f"{one} waits as a standby" in stack.said, 60)

        # And a client that knows either of a pair alone works
        for number, name in enumerate(("broker", "broker-standby")):
            with slatemq.sync.connect(stack.endpoints[name]) as client:
                client.create_queue(f"orders-{number}", filter=f'headers.to == "{number}"')
                client.publish(b"one", {"to": str(number)})
                claimed = client.claim(f"orders-{number}", wait=60)
                assert [one.payload for one in claimed] == [b"one"]
