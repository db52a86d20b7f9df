"""A program for the supervisor to keep running: serves gRPC health, and ends as it is asked to.

`python health_program.py PORT LIVES FOLDER`: each life takes the next word of LIVES (the last one
for ever): `serve` until SIGTERM, `stubborn` ignores SIGTERM, `late` serves once there is a file
FOLDER/now, `brief` serves until then and exits with 2, a number exits with it at once.
"""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


async def serve(port: int, word: str, now: Callable[[], bool]) -> None:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    if word == "late":
        if not now():
            sys.stdout.write("not yet\n")
            sys.stdout.flush()
        await until(now)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, (lambda: None) if word == "stubborn" else asked.set
    )
    await (until(now) if word == "brief" else asked.wait())
    await server.stop(0)


async def until(now: Callable[[], bool]) -> None:
    while not now():
        await asyncio.sleep(0.01)


def main() -> None:
    port, lives, folder = int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3])
    life = len(list(folder.glob("life-*")))
    (folder / f"life-{life}").touch()
    word = lives[min(life, len(lives) - 1)]
    if word.isdecimal():
        sys.exit(f"asked to end with {word}") if word == "1" else sys.exit(int(word))
    asyncio.run(serve(port, word, (folder / "now").exists))
    if word == "brief":
        sys.exit(2)


if __name__ == "__main__":
    main()
