"""`python -m tests.simulation.idle`: what an instance asks of its store while nothing happens.

Prints JSON: requests in five minutes of simulated time, for small objects by process and kind, and
all of them. What SlateDB itself asks for is not simulated.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from tests.simulation import chance

SETTLED_S: Final = 60.0
IDLE_S: Final = 300.0


def main() -> None:
    chance.install("idle")
    from tests.simulation.cluster import Cluster  # What it loads takes its clocks from `chance`.

    cluster = Cluster("idle")
    asyncio.set_event_loop(cluster.loop)
    found = cluster.loop.run_until_complete(cluster.loop.world.run(_look(cluster), "world"))
    sys.stdout.write(f"{json.dumps(found)}\n")


async def _look(cluster: Any) -> dict[str, dict[str, int]]:
    for kind in ("ingest", "broker", "router"):
        cluster.add(kind, 0)
    await asyncio.sleep(SETTLED_S)
    before, all_before = _counts(cluster), cluster.store.requests
    await asyncio.sleep(IDLE_S)
    found = {
        name: {kind: count - before[name].get(kind, 0) for kind, count in counts.items()}
        for name, counts in _counts(cluster).items()
    }
    return {**found, "store": {"all": cluster.store.requests - all_before}}


def _counts(cluster: Any) -> dict[str, dict[str, int]]:
    """Requests so far for small objects, by process and kind."""
    return {
        process.name: dict(process.service._root.objects.counts.requests)
        for process in cluster.processes
    }


if __name__ == "__main__":
    main()
