"""Links between processes that are cut, delayed, swallow what is sent, and become half-open.

Every member is reached through proxies (tests.faults.network), also by the clients, which write a
history. Two links at a time are in trouble.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.faults.mixed_work import Work
from tests.faults.network import CLIENTS, Kind, Network, Trouble
from tests.faults.shard_processes import Member
from tests.faults.zombies import run_history

SECONDS: Final = (0.5, 2.0, 6.0, 12.0)
DELAY_S: Final = 0.3
DELAY: Final = "delay"


class ProxiedMember(Member):
    """A member that others reach through a network."""

    async def join(self, network: Network) -> None:
        """From now on it advertises proxies of this network."""
        port = await network.proxy(self.name, lambda: self.ports[0])
        peer_port = await network.proxy(self.name, lambda: self.ports[1])
        self._arguments = (
            *("--advertised-address", f"127.0.0.1:{port}"),
            *("--peer-address", f"127.0.0.1:{peer_port}"),
        )


def _links(members: Sequence[Member]) -> list[tuple[str, str]]:
    """Who asks whom."""
    asked = {
        CLIENTS: ("ingest", "broker"),
        "router": ("ingest", "broker"),
        "broker": ("ingest", "broker"),
    }
    names = {CLIENTS: [CLIENTS]} | {
        service: [one.name for one in members if one.service == service]
        for service in ("ingest", "broker", "router")
    }
    return [
        (source, target)
        for service, targets in asked.items()
        for source in names[service]
        for kind in targets
        for target in names[kind]
        if target != source
    ]


async def _disturb(
    network: Network, links: Sequence[tuple[str, str]], seed: int, end: float
) -> Counter[str]:
    """One trouble after another on one of the links; returns how many met a connection."""
    random_ = random.Random(seed)
    met: Counter[str] = Counter()
    kinds = [DELAY, *(kind for kind in Kind if kind is not Kind.PASS)]
    turn = random_.randrange(len(kinds))
    while time.monotonic() < end:
        kind = kinds[turn % len(kinds)]
        turn += 1
        source, target = random_.choice(links)
        seconds = random_.choice(SECONDS)
        trouble = Trouble(delay_s=DELAY_S) if isinstance(kind, str) else Trouble(kind)
        await network.undergo(source, target, trouble, seconds)
        name = kind if isinstance(kind, str) else kind.value
        met[name] += bool(trouble.met)
        print(f"{source} to {target}: {name} for {seconds:g} s, {trouble.met} connections")
        await asyncio.sleep(random_.uniform(0.2, 2.0))
    return met


async def run_network(folder: Path, seconds: float, seed: int) -> tuple[Work, Mapping[str, int]]:
    """A history; also how many troubles of each kind met a connection."""
    members = [
        *(ProxiedMember(folder, "ingest", shard) for shard in range(2)),
        *(ProxiedMember(folder, "broker", shard) for shard in range(2)),
        *(ProxiedMember(folder, "router", shard) for shard in range(2)),
    ]
    network = Network(lambda: {one.pid: one.name for one in members if one.runs})
    met: Counter[str] = Counter()

    async def mishaps(_: Work) -> None:
        links = _links(members)
        half = len(links) // 2
        end = time.monotonic() + seconds
        shuffled = random.Random(seed).sample(links, len(links))
        for each in await asyncio.gather(
            _disturb(network, shuffled[:half], seed, end),
            _disturb(network, shuffled[half:], seed + 1, end),
        ):
            met.update(each)

    try:
        for member in members:
            await member.join(network)
        work = await run_history(folder, members, members[2], mishaps, seed=seed)
    finally:
        await network.close()
    return work, met
