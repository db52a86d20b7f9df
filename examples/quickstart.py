"""Your own messages through your own code: `python examples/quickstart.py [HOST:PORT]`.

Needs a running stack, such as `make up` or `docker-compose up` start: at the address given, at that
of SLATEMQ_ENDPOINT, or at 127.0.0.1:7420.
"""

from __future__ import annotations

import asyncio
import os
import sys

import slatemq
from slatemq.errors import AlreadyExists, SlateMQError, Unavailable

ORDERS = [("anvil", "eu"), ("rocket", "us"), ("tunnel paint", "eu")]


async def main(endpoint: str) -> None:
    """Create a queue, publish, and consume what its filter lets in."""
    credentials = slatemq.Credentials.load()  # from the environment, where the stack needs some
    async with slatemq.connect(endpoint, credentials=credentials) as client:
        try:
            await client.create_queue("eu-orders", filter='headers["region"] == "eu"')
        except AlreadyExists:
            print("the queue is there from an earlier run")

        for order, region in ORDERS:
            message_id = await client.publish(order, {"region": region})
            print(f"published {order!r} as {message_id}")

        expected = sum(region == "eu" for _, region in ORDERS)
        async with client.consume("eu-orders") as messages:
            async for message in messages:
                async with message:  # leaving acks; an exception gives the message back
                    print(f"processed {message.payload.decode()!r}")
                expected -= 1
                if expected == 0:
                    break


if __name__ == "__main__":
    address = os.environ.get("SLATEMQ_ENDPOINT") or "127.0.0.1:7420"
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else address))
    except Unavailable as error:
        sys.exit(f"quickstart: {error}\n  `make up` starts a stack on this machine")
    except SlateMQError as error:
        sys.exit(f"quickstart: {error}")
