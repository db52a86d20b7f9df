"""How far the clocks of a simulated world's brokers are ahead of those of its clients.

An owner's clock never goes back: once it has followed a step ahead, it stays there, in its next
life too. So each is read after every step, for the judge to allow for what it was, no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from libs.storage.database.clocks import HybridClock
from services.broker.service import BrokerService
from tests.simulation.chance import BEGIN_S
from tests.simulation.cluster import Process
from tests.simulation.judge import Apart
from tests.simulation.loop import Machine
from tests.simulation.places import Stay


@dataclass
class Life:
    """One life of a broker.

    Attributes:
        seen_ms: When it was seen last.
        ahead_ms: How far its clock was ahead, from which time on.
    """

    shard: int
    clock: HybridClock
    seen_ms: int = 0
    base_ms: int = 0
    ahead_ms: list[tuple[int, int]] = field(default_factory=list)

    def look(self, now_ms: int) -> None:
        self.seen_ms = now_ms
        if self.clock._base_ms == self.base_ms:
            return
        self.base_ms = self.clock._base_ms
        ahead_ms = self.base_ms - (BEGIN_S + self.clock._base_at) * 1000
        self.ahead_ms.append((now_ms, math.ceil(ahead_ms)))

    def between(self, since_ms: int, until_ms: int) -> list[int]:
        """How far it was ahead at the first of these times, and until the second."""
        if self.seen_ms < since_ms:
            return []
        known = [one for one in self.ahead_ms if one[0] <= until_ms]
        before = [one for one in known if one[0] <= since_ms][-1:]
        return [ahead for _, ahead in before + [one for one in known if one[0] > since_ms]]


class BrokerClocks:
    """Attributes:
    lives: All lives of the brokers of a world.
    """

    def __init__(self, least_ms: int, most_ms: int) -> None:
        """What is beyond these bounds is no consequence of the steps of wall clocks."""
        self._bounds = Apart(least_ms, most_ms)
        self.lives: list[Life] = []
        self._by_machine: dict[Machine, Life] = {}

    def look(self, machine: Machine, processes: list[Process]) -> None:
        """After a step of a broker."""
        life = self._by_machine.get(machine) or self._begin(machine, processes)
        if life is not None:
            life.look(int((BEGIN_S + machine.monotonic_s()) * 1000))

    def _begin(self, machine: Machine, processes: list[Process]) -> Life | None:
        for process in processes:
            service = process.service
            if process.machine is machine and isinstance(service, BrokerService) and service.broker:
                clock = service.broker.owner.clock
                assert isinstance(clock, HybridClock), "an owner's clock"
                life = self._by_machine[machine] = Life(process.shard, clock)
                self.lives.append(life)
                return life
        return None

    def apart(self, stays: Iterable[Stay], since_ms: int) -> Apart:
        """Of the brokers that may have had a queue since then, while they may have had it."""
        ahead: list[int] = []
        for stay in stays:
            for life in self.lives:
                if stay.shard in (None, life.shard) and stay.until_ms >= since_ms:
                    ahead += life.between(max(since_ms, stay.since_ms), stay.until_ms)
        least_ms, most_ms = self._bounds
        return Apart(max(min(ahead, default=0), least_ms), min(max(ahead, default=0), most_ms))
