"""Payloads that cannot be read now cost no attempt."""

import pytest

from slatemq.v1 import queue_pb2
from tests.acceptance.local_stack import LocalStack
from tests.acceptance.mishaps import ingest_down_under_claims
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import FILTERS

DOWN_SECONDS = 4.0
"""Several times what a broker waits for payloads; `tests/faults` has the minute."""

pytestmark = [pytest.mark.stack, pytest.mark.slow]


async def test_an_ingest_that_is_down_under_claims_costs_no_attempt(
    stack: LocalStack, stubs: Stubs
) -> None:
    run = await ingest_down_under_claims(stack, stubs, DOWN_SECONDS)

    assert run.faults() == []
    assert {note.attempt for notes in run.notes.values() for note in notes} == {1}
    for queue_id in FILTERS:
        got = await stubs.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue_id))
        assert got.queue.counts.failed_count == 0
