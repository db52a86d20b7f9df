"""The memory of a real router whose broker shards do not answer, against its budget."""

from __future__ import annotations

from pathlib import Path

from tests.integration.router.many_logs import QUEUE, Sizes, many_logs

MEBIBYTE = 1 << 20

SIZES = Sizes(
    logs_count=6,
    brokers_count=4,
    messages_count=8_000,
    entry_messages=500,
    answer_bytes=64 << 10,
)
"""Some 60 MiB as a router holds them, were there no budget."""

BUDGET_BYTES = 4 * MEBIBYTE

BOUND_BYTES = BUDGET_BYTES + 24 * MEBIBYTE
"""With what is read beyond it, calls on their way, and what the allocator keeps."""


async def test_a_router_keeps_to_its_budget_over_all_logs_while_brokers_hang_and_loses_nothing(
    tmp_path: Path,
) -> None:
    budget = ("--buffers-bytes-max", str(BUDGET_BYTES))
    async with many_logs(tmp_path, SIZES, *budget) as there:
        at_rest = there.memory("VmRSS")

        # When the logs are long, and of four brokers only one answers
        there.fill()
        await there.routed(there.answering)

        # Then that one gets everything, and the router holds no more than it may
        assert there.memory("VmHWM") - at_rest < BOUND_BYTES

        # And the others do when they answer
        for broker in there.brokers:
            broker.answering.set()
        everything = [one for log in there.logs for one in range(log.first, log.last + 1)]
        for shard in (there.answering, *there.silent):
            await there.routed(shard)
            assert sorted(shard.assigned[QUEUE]) == everything
