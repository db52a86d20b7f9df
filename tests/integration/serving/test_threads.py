"""That gRPC serves without a hop between threads of its own, in processes of the services."""

import subprocess
import sys
from pathlib import Path

import pytest

CALLS = 300

PROGRAM = f"""
import asyncio, os, sys
if sys.argv[1] == "services":
    import services
import grpc, grpc.aio

async def main():
    async def answer(request, context):
        return request
    method = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {{"U": method}}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        for _ in range({CALLS}):
            await channel.unary_unary("/t/U")(b"x")
        print(sum(switches(task) for task in os.listdir("/proc/self/task")))
    await server.stop(None)

def switches(task):
    status = open(f"/proc/self/task/{{task}}/status").read().splitlines()
    if not status[0].endswith("event_engine"):
        return 0
    return sum(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt"))

asyncio.run(main())
"""


def switches(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[3],
        env={"PATH": "/usr/bin:/bin"},
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_services_read_their_sockets_without_a_thread_between() -> None:
    # As gRPC is by itself, each call wakes that thread up: or there is nothing to leave out.
    assert switches("alone") > CALLS
    assert switches("services") < CALLS
