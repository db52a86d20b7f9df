"""Which attempts at a message count for its event or task: leases that ended do not."""

from __future__ import annotations

from collections.abc import Sequence

import slatemq

FAIL_PREFIX = "fail: "
"""What SlateMQ writes before the reason of a message that its consumer gave up."""

_NACK_PREFIX = "nack"
"""What SlateMQ writes before the reason of a message that its consumer gave back. An attempt whose
lease ended has another outcome: its consumer was killed, and the work did not fail."""

_NOTE_PREFIX = "note: "
"""What SlateMQ puts before the note of a dead letter, which does not count as an attempt."""


async def failures_count(client: slatemq.Client, message: slatemq.Received) -> int:
    """How many attempts before this one have failed."""
    if message.attempts_count == 1:
        return 0
    entry = await client.get_entry(message.handle, view=slatemq.EntryView.ATTEMPTS)
    return count_failures(entry.attempts, message.attempts_count - 1)


def count_failures(history: Sequence[slatemq.Attempt], counted: int) -> int:
    """How many of the last `counted` attempts have failed; those before are of before a redrive.

    Brokers keep the newest attempts only, of long errors some thirty: older ones count as failed.
    """
    attempts = [one.outcome for one in history if not one.outcome.startswith(_NOTE_PREFIX)]
    last = attempts[max(0, len(attempts) - counted) :]
    failed = sum(outcome.startswith((_NACK_PREFIX, FAIL_PREFIX)) for outcome in last)
    return failed + counted - len(last)
