"""What a message costs, in processor time of each process: `python -m benchmarks.processor_time`.

Starts a stack, then publishes and consumes in the ways named; prints microseconds of processor time
for each message, by service and by what its threads do. This is what a rate rests on where all of
it shares two cores: wall time differs with the machine's mood, this much less.

With `--beside`, a second stack runs beside the first, and rounds alternate between them: the ratio
of two neighbours says what the difference between the stacks costs, however the mood changes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from benchmarks.suite import payloads, servers
from benchmarks.suite.crew import Consumers, Crew, new_queue, span
from benchmarks.suite.servers import Server

TICKS = os.sysconf("SC_CLK_TCK")
LOOP, STORE, REST = "loop", "SlateDB", "other threads"
OF_STORE = ("slatedb", "async-compat", "tokio")
SHARE_MIN = 0.05
ROUNDS_MIN = 4


SYSTEMS = {"slatemq": servers.slatemq, "metered": servers.metered, **servers.SECURED}

Took = tuple[float, float]
"""Seconds, and those of processor time that clients spent."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of publishing or consuming; Each message reaches `queues` queues."""

    name: str
    size: int
    batch: int
    clients: int
    messages: int
    queues: int = 1
    kind: str = payloads.EVENTS


WAYS = {
    way.name: way
    for way in (
        Way("1 KiB", 1024, 1000, 1, 50_000),
        Way("1 KiB random", 1024, 1000, 1, 50_000, kind=payloads.RANDOM),
        Way("100 B", 100, 1000, 1, 100_000),
        Way("singles", 1024, 1, 64, 10_000),
        Way("fan-out", 1024, 1000, 1, 10_000, queues=10),
    )
}


def threads_s(pid: int) -> dict[str, float]:
    """Seconds of processor time that a process has had so far, by what its threads do."""
    spent: dict[str, float] = defaultdict(float)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            head, _, tail = (thread / "stat").read_text(encoding="utf-8").rpartition(")")
        except FileNotFoundError:
            continue  # it has ended meanwhile
        name, fields = head.partition("(")[2], tail.split()
        kind = STORE if name.startswith(OF_STORE) else REST
        kind = LOOP if int(thread.name) == pid else kind
        spent[kind] += (int(fields[11]) + int(fields[12])) / TICKS
    return spent


def services_s(server: Server) -> dict[str, dict[str, float]]:
    """The same of each service of a stack."""
    return {name: threads_s(pid) for name, pid in server.named().items() if name != "launcher"}


def phase(server: Server, name: str, count: int, work: Callable[[], Took]) -> float:
    """Prints what the services spent on each of `count` messages while this worked; all in µs."""
    before = services_s(server)
    took_s, clients_s = work()
    after = services_s(server)
    clients_us = 1e6 * clients_s / count
    services_us = {
        service: {kind: 1e6 * (spent[kind] - before[service][kind]) / count for kind in spent}
        for service, spent in after.items()
    }
    all_us = clients_us + sum(sum(parts.values()) for parts in services_us.values())
    print(
        f"  {name}: {count / took_s:,.0f}/s; {all_us:.1f} us, clients {clients_us:.1f}", flush=True
    )
    for service, parts in services_us.items():
        if sum(parts.values()) >= SHARE_MIN:
            print(f"    {service:10} {sum(parts.values()):5.1f} us: {_line(parts)}", flush=True)
    return all_us


def _line(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {us:.1f}" for kind, us in parts.items() if us >= SHARE_MIN)


def publish(server: Server, queue: str, way: Way, depth: int, processes: int) -> Took:
    """Publishes all."""
    crew = Crew(server)
    shape = {"batch": way.batch, "size": way.size, "clients": way.clients // processes or 1}
    crew.add_publishers(processes, queue, way.messages, depth=depth, kind=way.kind, **shape)
    results = crew.run()
    return span(results), sum(one["processor_s"] for one in results)


def consume(server: Server, queue: str, way: Way, depth: int, processes: int) -> Took:
    """Claims and acks all of one queue."""
    crew = Crew(server)
    shape = {"size": way.size, "depth": depth, "kind": way.kind}
    consumers = Consumers(crew, processes, queue, way.messages, **shape)
    results = crew.run()
    consumers.check(results)
    return span(results), sum(one["processor_s"] for one in results)


def measure(server: Server, way: Way, depth: int, processes: int) -> float:
    """One way, publishing first; µs for each message in all."""
    depth = depth if way.batch > 1 else 1
    queues = new_queue(server, way.queues)
    published_us = phase(
        server, "publish", way.messages, lambda: publish(server, queues[0], way, depth, processes)
    )

    def drain() -> Took:
        took = [consume(server, queue, way, depth, processes) for queue in queues]
        return sum(one for one, _ in took), sum(one for _, one in took)

    return published_us + way.queues * phase(server, "consume", way.messages * way.queues, drain)


def compare(pairs: Sequence[tuple[float, float]], name: str) -> None:
    """Prints by how much the second of each pair, but for the first pair, is above the other."""
    low, middle, high = quantiles([second / first for first, second in pairs[1:]], n=4)
    print(f"{name}: the second stack at {middle:.3f} of the first, quartiles {low:.3f} {high:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processor_time", description=__doc__
    )
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], help=", ".join(WAYS))
    parser.add_argument(
        "--system",
        choices=SYSTEMS,
        default="slatemq",
        help="metered, with metrics; with TLS; secured: tokens too",
    )
    parser.add_argument("--beside", choices=SYSTEMS, help="a second stack to compare with")
    parser.add_argument("--depth", type=int, default=8, help="batches in flight: 8")
    parser.add_argument("--processes", type=int, default=2, help="client processes: 2")
    parser.add_argument("--rounds", type=int, default=2, help="the first one warms up: 2")
    chosen = parser.parse_args()
    if chosen.beside == chosen.system:
        parser.error("--beside takes another stack")
    if chosen.beside and chosen.rounds < ROUNDS_MIN:
        parser.error(f"--beside takes {ROUNDS_MIN} --rounds or more")
    systems = [one for one in (chosen.system, chosen.beside) if one]
    with ExitStack() as stack:
        stacks = list[tuple[str, Server]]()
        for system in systems:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            stacks.append((system, stack.enter_context(SYSTEMS[system](Path(folder)))))
        for name in chosen.ways or WAYS:
            rounds = list[dict[str, float]]()
            for number in range(1, chosen.rounds + 1):
                took = {}
                # Each goes first as often as the other one.
                for system, server in stacks if number % 2 else stacks[::-1]:
                    print(f"{name}, round {number}, {system}", flush=True)
                    took[system] = measure(server, WAYS[name], chosen.depth, chosen.processes)
                rounds.append(took)
            if chosen.beside:
                compare([(one[chosen.system], one[chosen.beside]) for one in rounds], name)


if __name__ == "__main__":
    main()
