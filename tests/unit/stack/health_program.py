"""A program for the supervisor to keep running: serves gRPC health, and ends as it is told to.

`python health_program.py PORT LIVES FOLDER`: each life takes the next word of LIVES (the last one
for ever): `serve` until SIGTERM, `stubborn` ignores SIGTERM, a number exits with it at once.
"""

import asyncio
import signal
import sys
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc


async def serve(port: int, stubborn: bool) -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, (lambda: None) if stubborn else asked.set
    )
    await asked.wait()
    await server.stop(0)


def main() -> None:
    port, lives, folder = int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3])
    life = len(list(folder.glob("life-*")))
    (folder / f"life-{life}").touch()
    word = lives[min(life, len(lives) - 1)]
    if word.isdecimal():
        sys.exit(f"told to end with {word}") if word == "1" else sys.exit(int(word))
    asyncio.run(serve(port, stubborn=word == "stubborn"))


if __name__ == "__main__":
    main()
