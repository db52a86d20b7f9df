"""`python -m tests.acceptance.contained_load QUEUE…`: a steady load, by a client in a container.

It does what each line of its input says, and answers `… done`: `progress` waits until more is
published and acked; `finish` ends the load, and fails where something was lost. At the end of its
input it stops at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import slatemq
from tests.acceptance.steady_load import SteadyLoad


async def main(queues: Sequence[str]) -> None:
    """Raises what has ended the load, and AssertionError where something was lost."""
    endpoint, credentials = os.environ["SLATEMQ_ENDPOINT"], slatemq.Credentials.load()
    async with slatemq.connect(endpoint, credentials=credentials, call_timeout=120) as client:
        for name in queues:
            await client.create_queue(name, filter=f'headers.queue == "{name}"')
        load = SteadyLoad(client, queues)
        load.start()
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                if line.strip() == "finish":
                    await load.finish()
                    load.check_nothing_lost()
                else:
                    await load.progress()
                sys.stdout.write(f"{line.strip()} done\n")
                sys.stdout.flush()
        finally:
            await load.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
