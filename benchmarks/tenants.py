"""One tenant's messages beside another one at ten times its limits, against the same stack alone.

python -m benchmarks.tenants
python -m benchmarks.tenants --attack raw --turns 5 --seconds 20 --json tenants.json

The stack has TLS, tokens and a policy. Tenant B publishes at a small steady rate and consumes; the
lag of a message is the time from the call that publishes it to its delivery. Tenant A, a process of
its own, asks for ten times its limits of messages, claims and streams at once:

`within`  by gRPC alone, and for no more than its limits: what it may do costs so much
`client`  with the client library, which waits as it is asked to
`raw`     by gRPC alone: messages at ten times the rate; claims and streams again at once
`flood`   as raw, with publishes as fast as they are refused

Turns alternate: B alone, B beside A. A's own work is not what is measured, since a tenant is
elsewhere: its process gets the processor only where all others leave it. `others` is what programs
besides the stack and the tenants took meanwhile: a turn with much of it says little, unless the
stack and B go before them (as root, `chrt -r 1 python -m benchmarks.tenants`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc.aio
import yaml

import slatemq
from benchmarks.queue_changes import QUEUE, Lags
from benchmarks.suite import servers
from slatemq._tokens import new_token
from slatemq.cli.access.dev_certificates import make_certificates
from slatemq.errors import ResourceExhausted, SlateMQError
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc, ingest_pb2, ingest_pb2_grpc

ATTACKS: Final = ("within", "client", "raw", "flood")
A_QUEUE: Final = "flooded"
TIMES: Final = 10
BATCH: Final = 100
LIMITS: Final = {
    "publish_messages_per_s": 200,
    "calls_per_s": None,
    "waiting_claims": 10,
    "open_streams": 10,
}
"""Tenant A's, unless the arguments give others; None is no limit."""
FLOODERS: Final = 32
WARM_UP: Final = 100
PER_SECOND: Final = 50
SHOWN: Final = ("ingest", "router", "broker", "b", "a", "others")
VERBS: Final = ["publish", "consume", "inspect", "edit", "administer", "operate"]
DISTURBED_S: Final = 2.0
"""Left out of each turn: what A does first, all at once, and what it left at its end."""
BEGUN: Final = "begun"
"""What A's process says when its calls begin."""


class Secured:
    """The files of a stack with two tenants."""

    def __init__(self, folder: Path, limits: Mapping[str, int]) -> None:
        make_certificates(folder / "certs")
        made = {name: new_token(name) for name in ("a", "b")}
        self.tokens = {name: one.token for name, one in made.items()}
        self.ca = folder / "certs/ca.crt"
        policy = {
            "roles": {"all": [{"verbs": VERBS}]},
            "bindings": [{"principals": ["a", "b"], "roles": ["all"]}],
            "limits": [{"principals": ["a"], **limits}],
        }
        (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
        tokens = {"tokens": [one.entry for one in made.values()]}
        (folder / "tokens.yaml").write_text(yaml.safe_dump(tokens))
        self.environ = {
            "SLATEMQ_TLS_CA": str(self.ca),
            "SLATEMQ_TLS_CERT": str(folder / "certs/service.crt"),
            "SLATEMQ_TLS_KEY": str(folder / "certs/service.key"),
            "SLATEMQ_ACCESS_POLICY": str(folder / "policy.yaml"),
            "SLATEMQ_ACCESS_TOKENS": str(folder / "tokens.yaml"),
        }

    def credentials(self, name: str) -> slatemq.Credentials:
        return slatemq.Credentials(ca=self.ca, token=self.tokens[name])


# --- Tenant A -----------------------------------------------------------------


class Calls:
    """Repeats calls until it is over, and counts their outcomes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.is_over = False

    async def loop(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        """One call after the other, until it is over."""
        while not self.is_over:  # gRPC may take a cancel of the task for one of the call.
            try:
                await call()
                self.counts[f"{name} OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.counts[f"{name} {error.code().name}"] += 1
            except SlateMQError as error:
                self.counts[f"{name} {error.reason}"] += 1

    async def steadily(
        self, name: str, per_s: float, call: Callable[[], Awaitable[object]]
    ) -> None:
        """So many calls a second, whatever becomes of the others, until cancelled."""
        begun, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as tasks:
            while not self.is_over:
                tasks.create_task(self._once(name, call))
                number += 1
                await asyncio.sleep(begun + number / per_s - time.perf_counter())

    async def _once(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
            self.counts[f"{name} OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.counts[f"{name} {error.code().name}"] += 1
        except ResourceExhausted as error:
            self.counts[f"{name} {error.reason}"] += 1


def attack_by_client(
    calls: Calls, client: slatemq.Client, limits: Mapping[str, int]
) -> list[Awaitable[None]]:
    """The loops of a client that waits as it is asked to."""
    batch = [slatemq.OutgoingMessage(b"x" * 100, {"queue": A_QUEUE})] * BATCH

    async def claim() -> None:
        messages = await client.claim(A_QUEUE, BATCH, wait=5)
        if messages:
            await client.ack([one.lease_token for one in messages])

    async def consume() -> None:
        async with client.consume(A_QUEUE) as messages:
            async for message in messages:
                await message.ack()

    per_s = TIMES * limits["publish_messages_per_s"] / BATCH
    return [
        calls.steadily("publish", per_s, lambda: client.publish_batch(batch)),
        *(calls.loop("claim", claim) for _ in range(TIMES * limits["waiting_claims"])),
        *(calls.loop("stream", consume) for _ in range(TIMES * limits["open_streams"])),
    ]


def attack_by_calls(
    calls: Calls,
    ingest: grpc.aio.Channel,
    broker: grpc.aio.Channel,
    token: str,
    kind: str,
    limits: Mapping[str, int],
) -> list[Awaitable[None]]:
    """The loops of one that calls again at once, whatever the answer says."""
    proof = {"metadata": (("authorization", f"Bearer {token}"),)}
    publisher: Any = ingest_pb2_grpc.IngestServiceStub(ingest)
    consumer: Any = consumer_pb2_grpc.ConsumerServiceStub(broker)
    run = ingest_pb2.PublishRun(payloads=[b"x" * 100] * BATCH, headers={"queue": A_QUEUE})
    batch = ingest_pb2.PublishRequest(runs=[run])
    wanted = consumer_pb2.ClaimRequest(queue_id=A_QUEUE, max_messages=BATCH, wait_ms=5000)
    start = consumer_pb2.ConsumeRequest(start=consumer_pb2.ConsumeStart(queue_id=A_QUEUE))

    async def publish() -> None:
        await publisher.Publish(batch, timeout=30, **proof)

    async def claim() -> None:
        answer = await consumer.Claim(wanted, timeout=30, **proof)
        leases = [
            consumer_pb2.LeaseRun(lease_token=run.lease_token, count=len(run.message_ids))
            for run in answer.runs
        ]
        if leases:
            await consumer.Ack(consumer_pb2.AckRequest(runs=leases), timeout=30, **proof)

    async def stream() -> None:
        call = consumer.Consume(**proof)
        await call.write(start)
        while await call.read() is not grpc.aio.EOF:
            pass

    times = 1 if kind == "within" else TIMES
    per_s = times * limits["publish_messages_per_s"] / BATCH
    if kind == "flood":
        publishes = [calls.loop("publish", publish) for _ in range(FLOODERS)]
    else:
        publishes = [calls.steadily("publish", per_s, publish)]
    return [
        *publishes,
        *(calls.loop("claim", claim) for _ in range(times * limits["waiting_claims"])),
        *(calls.loop("stream", stream) for _ in range(times * limits["open_streams"])),
    ]


async def attack(kind: str, given: dict[str, Any], ca: bytes) -> None:
    """Tenant A, until its input ends; prints what became of its calls."""
    calls = Calls()
    secret = grpc.ssl_channel_credentials(ca)
    credentials = slatemq.Credentials(ca=given["ca"], token=given["token"])
    async with (
        grpc.aio.secure_channel(given["ingest"], secret) as ingest,
        grpc.aio.secure_channel(given["broker"], secret) as broker,
        slatemq.connect(given["endpoint"], credentials=credentials) as client,
    ):
        if kind == "client":
            loops = attack_by_client(calls, client, given["limits"])
        else:
            loops = attack_by_calls(calls, ingest, broker, given["token"], kind, given["limits"])
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        print(BEGUN, flush=True)
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
        calls.is_over = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    print(json.dumps(calls.counts))


def leave_processor() -> None:
    """Take the processor only where the stack and tenant B leave it."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        # They go before everything else, so that A may go before what else runs here.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    else:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


# --- Tenant B -----------------------------------------------------------------


def processor_s(pids: Mapping[str, int]) -> dict[str, float]:
    """The processor time that each process has used, and all of the machine together."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[name] = (int(fields[11]) + int(fields[12])) / ticks
    # user, nice, system, idle, waiting for disks, interrupts of both kinds
    parts = [int(part) for part in Path("/proc/stat").read_text().split()[1:8]]
    used["machine"] = (sum(parts) - parts[3] - parts[4]) / ticks
    return used


class Measurement:
    """B's lags, turn by turn."""

    def __init__(self, kind: str, server: servers.Server, seconds: float) -> None:
        self._kind = kind
        self._folder = server.folder
        pids = server.named()
        self._pids = {**pids, "b": os.getpid()}
        self._seconds = seconds
        self.turns: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
        self.calls: Counter[str] = Counter()

    async def turn(self, name: str, lags: Lags) -> None:
        """Measure one turn."""
        attacker = None
        if name == "beside":
            command = [sys.executable, "-m", "benchmarks.tenants", "--attack", self._kind]
            attacker = await asyncio.create_subprocess_exec(
                *command,
                "--as-tenant-a",
                str(self._folder / "tenant-a.json"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=servers.REPOSITORY,
            )
            assert attacker.stdout is not None
            if (await attacker.stdout.readline()).decode().strip() != BEGUN:
                raise RuntimeError("tenant A ended before it began")
        await asyncio.sleep(DISTURBED_S)
        pids = self._pids if attacker is None else {**self._pids, "a": attacker.pid}
        lags.seconds, before = [], processor_s(pids)
        await asyncio.sleep(self._seconds)
        seconds, lags.seconds = lags.seconds, []
        used = {name: now - before[name] for name, now in processor_s(pids).items()}
        if attacker is not None:
            output, _ = await attacker.communicate(b"")
            if attacker.returncode:
                raise RuntimeError(f"tenant A ended with {attacker.returncode}")
            self.calls.update(json.loads(output))
        parts = statistics.quantiles(seconds, n=100)
        turn = {"p50_ms": 1000 * parts[49], "p99_ms": 1000 * parts[98]}
        used["others"] = 2 * used["machine"] - sum(used.values())
        for service in SHOWN:
            turn[f"{service}_percent"] = 100 * used.get(service, 0) / self._seconds
        self.turns[name].append(turn)
        print(f"  {name:6} {len(seconds):6} messages  ", end="")
        print(f"p50 {turn['p50_ms']:7.1f} ms  p99 {turn['p99_ms']:7.1f} ms  processor ", end="")
        print(*(f"{one} {turn[f'{one}_percent']:.0f} %" for one in SHOWN), flush=True)

    def results(self) -> dict[str, Any]:
        """The median of the turns, and the ratio of p99."""
        medians = {
            name: {key: statistics.median(one[key] for one in turns) for key in turns[0]}
            for name, turns in self.turns.items()
        }
        ratio = medians["beside"]["p99_ms"] / medians["alone"]["p99_ms"]
        turns = self.turns
        return {**medians, "p99_ratio": ratio, "turns": turns, "calls_of_a": dict(self.calls)}


async def measure(
    server: servers.Server, made: Secured, given: argparse.Namespace
) -> dict[str, Any]:
    """All attacks, one after the other."""
    results: dict[str, Any] = {}
    async with slatemq.connect(server.url, credentials=made.credentials("b")) as client:
        await client.create_queue(QUEUE)
        await client.create_queue(A_QUEUE)
        lags = Lags(client, PER_SECOND)
        receiving = asyncio.create_task(lags.receive())
        publishing = asyncio.create_task(lags.publish())
        await lags.received(WARM_UP)
        for kind in given.attack:
            print(f"{kind}:")
            measurement = Measurement(kind, server, given.seconds)
            for _ in range(given.turns):
                await measurement.turn("alone", lags)
                await measurement.turn("beside", lags)
            result = results[kind] = measurement.results()
            print(f"  p99 beside / alone: {result['p99_ratio']:.2f}; A: {result['calls_of_a']}")
        lags.stop()
        await publishing
        receiving.cancel()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants")
    parser.add_argument("--attack", choices=ATTACKS, nargs="+", default=ATTACKS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of a turn")
    for name, limit in LIMITS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=limit, metavar="N")
    parser.add_argument("--ratio-max", type=float, default=1.5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--as-tenant-a", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_tenant_a is not None:
        leave_processor()
        logging.disable()  # Where its calls are refused, it says so.
        files = json.loads(given.as_tenant_a.read_text())
        asyncio.run(attack(given.attack[0], files, Path(files["ca"]).read_bytes()))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        limits = {name: limit for name in LIMITS if (limit := getattr(given, name)) is not None}
        made = Secured(Path(folder), limits)
        with servers.slatemq(Path(folder), made.environ) as server:
            endpoints = json.loads((server.folder / "ready.json").read_text())["endpoints"]
            tenant_a = {
                "endpoint": server.url,
                "ingest": endpoints["ingest"],
                "broker": endpoints["broker"],
                "ca": str(made.ca),
                "token": made.tokens["a"],
                "limits": limits,
            }
            (server.folder / "tenant-a.json").write_text(json.dumps(tenant_a))
            results = asyncio.run(measure(server, made, given))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(one["p99_ratio"] > given.ratio_max for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
