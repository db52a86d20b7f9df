"""What routers do between many shards, in one process: `python -m benchmarks.scale_simulation`.

The routers are real. The ingests and brokers keep to the contract and store nothing, and calls to
them are made without a network, each encoded and decoded as on one. So sizes can be tried that no
machine runs as processes: 1000x100x4 has 1,100 peers and 400,000 routes.

Prints for each size, at idle and at a low rate, the calls a second by method, the processor time of
it all, and a router's memory. What a call costs at the other side, and gRPC itself, is not in it:
`benchmarks.scale` measures that on real processes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import grpc.aio

from benchmarks.scale import PAGE, Size, size_of
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.process.memory import calm_collector
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from services.router.router import Router
from slatemq.v1 import ingest_pb2
from tests.integration.router.peers import LogMemory, MemoryBroker, MemoryIngest, ShardMemory

SETTLE_S = 5.0
LOOK_S = 0.1

HEARTBEAT_S = 10.0
"""As ingests have it."""


class DirectStream:
    """A call with a stream of responses, and heartbeats where none comes."""

    def __init__(
        self, responses: AsyncIterator[Any], decode: Callable[[bytes], Any], beat: Callable[[], Any]
    ) -> None:
        """`beat` makes a heartbeat; None: the call has none."""
        self._responses = responses
        self._decode = decode
        self._beat = beat
        self._next: asyncio.Future[Any] | None = None

    def __aiter__(self) -> DirectStream:
        return self

    async def __anext__(self) -> Any:
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._responses))
        done, _ = await asyncio.wait([self._next], timeout=HEARTBEAT_S)
        if not done:
            return self._beat() or await anext(self)
        response, self._next = self._next.result(), None
        return self._decode(response.SerializeToString())

    async def read(self) -> Any:
        try:
            return await anext(self)
        except StopAsyncIteration:
            return grpc.aio.EOF

    def cancel(self) -> None:
        """Nothing: a router ends its streams at the end of a run alone."""


class DirectChannel:
    """A channel to a servicer in this process."""

    def __init__(self, servicer: Any, calls: Counter[str]) -> None:
        self._servicer = servicer
        self._calls = calls

    def unary_unary(self, path: str, *_: Any, response_deserializer: Any, **__: Any) -> Any:
        name = path.rpartition("/")[2]

        async def call(request: Any, timeout: float | None = None) -> Any:
            self._calls[name] += 1
            received = type(request).FromString(request.SerializeToString())
            response = await getattr(self._servicer, name)(received, None)
            return response_deserializer(response.SerializeToString())

        return call

    def unary_stream(self, path: str, *_: Any, response_deserializer: Any, **__: Any) -> Any:
        name = path.rpartition("/")[2]

        def call(request: Any, timeout: float | None = None) -> DirectStream:
            self._calls[name] += 1
            responses = getattr(self._servicer, name)(request, None)
            return DirectStream(responses, response_deserializer, self._beat_of(name))

        return call

    def _beat_of(self, name: str) -> Callable[[], Any]:
        def beat() -> ingest_pb2.TailLogResponse:
            self._calls["heartbeat"] += 1
            return ingest_pb2.TailLogResponse()

        return beat if name == "TailLog" else lambda: None

    def stream_unary(self, *_: Any, **__: Any) -> None:
        """No router calls one."""

    stream_stream = stream_unary


class DirectChannels:
    """The channels of a router."""

    def __init__(self, peers: dict[tuple[str, int], Any], calls: Counter[str]) -> None:
        self._channels = {place: DirectChannel(peer, calls) for place, peer in peers.items()}

    async def to(self, service: str, shard: int) -> DirectChannel:
        return self._channels[service, shard]

    def doubt(self, service: str, shard: int) -> None:
        """Nothing: they stay where they are."""


class World:
    """All peers of one size, and routers between them."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.calls = Counter[str]()
        self.logs = [LogMemory(shard) for shard in range(size.ingests)]
        self.shards = [ShardMemory(shard) for shard in range(size.brokers)]
        self._objects: Objects = open_root("memory:///").objects
        self._peers: dict[tuple[str, int], Any] = {
            **{("ingest", log.shard): MemoryIngest(log) for log in self.logs},
            **{("broker", shard.shard): MemoryBroker(shard) for shard in self.shards},
        }

    async def announce(self) -> None:
        directory = TopologyDirectory(self._objects)
        routers = [("router", number) for number in range(self.size.routers)]
        for service, shard in (*self._peers, *routers):
            await directory.announce(Peer(service, shard, f"{service}-{shard}:7420"))
        for shard_memory in self.shards:
            await shard_memory.set_queue(
                f"queue-{shard_memory.shard}", f'headers.to == "{shard_memory.shard}"'
            )

    def router(self, number: int) -> Router:
        channels = cast("Channels", DirectChannels(self._peers, self.calls))
        directory = TopologyDirectory(self._objects)
        return Router(directory, channels, Telemetry(), number=number)

    async def publish(self, rate: float, seconds: float, chance: random.Random) -> int:
        """Publish this often into logs drawn at random; returns how many messages."""
        began = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            to = chance.randrange(self.size.brokers)
            await chance.choice(self.logs).publish([{"to": str(to)}])
        return int(rate * seconds)

    @property
    def assigned_count(self) -> int:
        return sum(len(ids) for shard in self.shards for ids in shard.assigned.values())


def memory_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * PAGE / 1e6


class Measure:
    """Processor time and calls from its making on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._began = time.monotonic()
        self._cpu_s = time.process_time()
        self._calls = Counter(world.calls)

    def show(self, title: str) -> None:
        seconds = time.monotonic() - self._began
        cpu = 100 * (time.process_time() - self._cpu_s) / seconds
        calls = Counter(self._world.calls)
        calls.subtract(self._calls)
        named = {name: count / seconds for name, count in calls.most_common() if count}
        text = ", ".join(f"{name} {rate:.1f}" for name, rate in named.items())
        print(f"  {title}: processor {cpu:.1f} % of a core; calls/s: {text or 'none'}", flush=True)


async def measure(size: Size, given: argparse.Namespace) -> None:
    world = World(size)
    await world.announce()
    before_mb, began = memory_mb(), time.monotonic()
    routers = [world.router(number) for number in range(size.routers)]
    tasks = [asyncio.create_task(router.run()) for router in routers]
    await _routing(routers, size)
    each_mb = (memory_mb() - before_mb) / size.routers
    print(
        f"{size.text}: {size.ingests * size.brokers * size.routers} routes after "
        f"{time.monotonic() - began:.1f} s; a router's memory for them {each_mb:.1f} MB"
    )
    await asyncio.sleep(SETTLE_S)
    idle = Measure(world)
    await asyncio.sleep(given.seconds)
    idle.show("idle")
    busy = Measure(world)
    count = await world.publish(given.rate, given.seconds, random.Random(0))
    busy.show(f"{given.rate:g} messages/s")
    while world.assigned_count < count:  # noqa: ASYNC110 - it ends the run alone
        await asyncio.sleep(LOOK_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _routing(routers: Sequence[Router], size: Size) -> None:
    while not all(_is_whole(router, size) for router in routers):  # noqa: ASYNC110 - as above
        await asyncio.sleep(LOOK_S)


def _is_whole(router: Router, size: Size) -> bool:
    found = (len(router.logs), len(router.links))
    return router.is_routing and found == (size.ingests, size.brokers)


def main() -> None:
    """Simulate the sizes that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sizes", nargs="+", type=size_of, metavar="INGESTSxBROKERSxROUTERS", help="as 1000x100x4"
    )
    parser.add_argument("--rate", type=float, default=30.0, help="messages a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    given = parser.parse_args()
    calm_collector()
    for size in given.sizes:
        asyncio.run(measure(size, given))


if __name__ == "__main__":
    main()
