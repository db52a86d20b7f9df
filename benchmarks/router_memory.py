"""The memory of a router between many logs and many broker shards, of which all but one hang.

python -m benchmarks.router_memory --logs 16 --brokers 8
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.integration.router.many_logs import QUEUE, Sizes, many_logs

MEBIBYTE = 1 << 20


async def measure(sizes: Sizes, seconds: float, settings: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with many_logs(Path(folder), sizes, *settings) as there:
            at_rest = there.memory("VmRSS")
            there.fill()
            began = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await there.routed(there.answering)
            print(
                f"{sizes.logs_count} logs, {sizes.brokers_count} broker shards; the one that "
                f"answers has {len(there.answering.assigned.get(QUEUE, ())):,} messages after "
                f"{time.monotonic() - began:.1f} s; router at rest {at_rest / MEBIBYTE:.0f} MiB, "
                f"at its peak {there.memory('VmHWM') / MEBIBYTE:.0f} MiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=int, default=16)
    parser.add_argument("--brokers", type=int, default=8)
    parser.add_argument("--messages", type=int, default=40_000, help="in each log")
    parser.add_argument("--entry", type=int, default=1_000, help="messages in each entry")
    parser.add_argument("--seconds", type=float, default=60, help="end after so long at most")
    parser.add_argument("settings", nargs="*", help="of the router, behind --")
    given = parser.parse_args()
    sizes = Sizes(given.logs, given.brokers, given.messages, given.entry)
    asyncio.run(measure(sizes, given.seconds, given.settings))


if __name__ == "__main__":
    main()
