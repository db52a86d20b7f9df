"""The workloads that run through every system: ways of running client processes against it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.suite.crew import Consumers, Crew, new_queue, span
from benchmarks.suite.payloads import EVENTS
from benchmarks.suite.servers import Server


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of each workload is run, and the variants of which the best counts."""

    messages: int
    small_messages: int
    singles: int
    paced_seconds: float
    fan_out: int
    queues: int = 10
    depths: tuple[int, ...] = (2, 4, 8)
    processes: tuple[int, ...] = (1, 2)

    def with_ways(self, depths: list[int] | None, processes: list[int] | None) -> Scale:
        """The same with other variants, where given."""
        return replace(
            self,
            depths=tuple(depths or self.depths),
            processes=tuple(processes or self.processes),
        )


@dataclass(slots=True)
class Measured:
    """What one run of a workload gave: numbers by name, per second or in ms as the name says.

    `counted`: messages that came back whole, each once at least, and were acked. `failures`: parts
    of it that are missing, and why.
    """

    numbers: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    counted: int = 0
    failures: list[str] = field(default_factory=list)


def _publish(server: Server, processes: int, queue: str, count: int, **spec: Any) -> float:
    crew = Crew(server)
    crew.add_publishers(processes, queue, count, **spec)
    return span(crew.run())


def _consume(server: Server, processes: int, queue: str, count: int, **spec: Any) -> float:
    crew = Crew(server)
    consumers = Consumers(crew, processes, queue, count, **spec)
    results = crew.run()
    consumers.check(results)
    return span(results)


def in_turn(
    server: Server, size: int, count: int, depth: int, processes: int, kind: str = EVENTS
) -> Measured:
    """(a), (b): publish all, then consume and ack all."""
    (queue,) = new_queue(server)
    publish_s = _publish(server, processes, queue, count, size=size, depth=depth, kind=kind)
    consume_s = _consume(server, processes, queue, count, size=size, depth=depth, kind=kind)
    return Measured(
        {
            "end to end/s": count / (publish_s + consume_s),
            "publish/s": count / publish_s,
            "consume/s": count / consume_s,
        },
        {"depth": depth, "processes": processes},
        count,
    )


def at_once(server: Server, size: int, count: int, depth: int, processes: int) -> Measured:
    """(c): publish and consume at the same time."""
    (queue,) = new_queue(server)
    crew = Crew(server)
    crew.add_publishers(processes, queue, count, size=size, depth=depth)
    consumers = Consumers(crew, processes, queue, count, size=size, depth=depth)
    results = crew.run()
    consumers.check(results)
    return Measured(
        {"both at once/s": count / span(results)}, {"depth": depth, "processes": processes}, count
    )


def singles(server: Server, count: int, clients: int, processes: int) -> Measured:
    """(d): many clients, each publishing one message after the other."""
    (queue,) = new_queue(server)
    each = clients // processes
    publish_s = _publish(server, processes, queue, count, batch=1, clients=each)
    _consume(server, 1, queue, count)
    return Measured({"singles/s": count / publish_s}, {"processes": processes}, count)


def latency(server: Server, rate: int, seconds: float, depth: int) -> Measured:
    """(e): from the publish call to the delivery, at a steady rate; `depth` claims wait."""
    (queue,) = new_queue(server)
    count = int(rate * seconds)
    crew = Crew(server)
    crew.add("paced", queue, count, size=1024, rate=rate)
    consumers = Consumers(crew, 1, queue, count, batch=100, latencies=True, depth=depth)
    results = crew.run()
    consumers.check(results)
    times = results[-1]["latencies"]
    return Measured(
        {
            f"{name} ms at {rate}/s": 1000 * times[min(len(times) - 1, int(len(times) * part))]
            for name, part in (("p99", 0.99), ("p50", 0.5), ("p99.9", 0.999))
        },
        {"depth": depth},
        count,
    )


def fan_out(server: Server, count: int, queues: int, depth: int, processes: int) -> Measured:
    """(f): each message reaches several queues, and is consumed and acked in each."""
    names = new_queue(server, queues)
    took_s = _publish(server, processes, names[0], count, depth=depth)
    took_s += sum(_consume(server, processes, name, count, depth=depth) for name in names)
    return Measured(
        {"deliveries/s": count * queues / took_s},
        {"depth": depth, "processes": processes},
        count * queues,
    )
