"""Whether each queue has both of its records: a config and a state, written in one commit.

A queue that was deleted keeps its state alone. One that has lost its config must not be taken for
that: its name would be freed for another one, and its messages removed as if no queue needed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from libs.storage.errors import DamagedStore
from libs.storage.records.states import QueueStateRecord


def unpaired_queues(
    configs: Iterable[str], states: Mapping[str, QueueStateRecord]
) -> Mapping[str, str]:
    """The queues that have lost one of their records, and what each has."""
    alive = {queue for queue, state in states.items() if not state.deleted}
    named = set(configs)
    lost = dict.fromkeys(alive - named, "a state and no config")
    return lost | dict.fromkeys(named - alive, "a config and no state")


def refuse_unpaired(configs: Iterable[str], states: Mapping[str, QueueStateRecord]) -> None:
    """Raises DamagedStore."""
    lost = unpaired_queues(configs, states)
    if lost:
        queue, has = min(lost.items())
        more = f", as {len(lost) - 1:,} more are" if len(lost) > 1 else ""
        raise DamagedStore(
            f"queue {queue} has {has}: a part of its broker's database is lost{more}. Restore what "
            "is missing from the store's versions or a copy: see `Repair it` of "
            "docs/how-to/repair.md"
        )
