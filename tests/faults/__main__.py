"""`make faults`: the long forms of the acceptance tests' faults, on a real stack.

python -m tests.faults kills --messages 100000 --kills 10
python -m tests.faults ingest-down --seconds 60
python -m tests.faults histories --commands 100000 --restarts 200
python -m tests.faults chains --messages 20000 --kills 30
python -m tests.faults janitor --stages 1 2
python -m tests.faults zombies --seconds 600 --changes 10000
python -m tests.faults frozen --seconds 440 --rounds 1
python -m tests.faults failover --kills 100
python -m tests.faults disk --rounds 20
python -m tests.faults network --seconds 600 --seed 1
python -m tests.faults restarts --rounds 20 --seed 1
python -m tests.faults overload --seconds 60
python -m tests.faults soak --hours 8 --samples build/soak.jsonl
python -m tests.faults upgrade --from v0.1
python -m tests.faults store --seconds 60
python -m tests.faults reads --seconds 60 --messages 6000
python -m tests.faults events --mode async --backend redis --publishes 100000 --down-seconds 600
python -m tests.faults hostile --requests 100000 --seed 1 --secured
python -m tests.faults rot --rounds 1000 --seed 1

Ends with 0 if nothing was lost, stored or routed twice, or redelivered before its lease ended, and
the store that is left verifies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from services.janitor.spark.session import spark_session
from tests.acceptance.chains import Chains
from tests.acceptance.local_stack import LocalStack
from tests.acceptance.mishaps import SERVICES, ingest_down_under_claims, kill_along
from tests.acceptance.stubs import Stubs
from tests.acceptance.workload import Run, make_lines
from tests.faults.cut_links import run_network
from tests.faults.event_runs import BACKENDS, MODES, PUBLISHERS, run_events, victims_of
from tests.faults.failing_reads import run_failing_reads
from tests.faults.failover import run_failovers
from tests.faults.frozen import run_frozen
from tests.faults.full_disk import run_full_disk
from tests.faults.hostile.run import FULL_REQUESTS, Verdict, run_hostile
from tests.faults.mixed_work import LEASE_S, Work, judged
from tests.faults.overload import run_overload
from tests.faults.restarts import run_restarts
from tests.faults.rot import run_rot
from tests.faults.soak import run_soak
from tests.faults.store_troubles import run_store
from tests.faults.upgrade import NoUpgrade, last_version, run_upgrade
from tests.faults.verified import OF_ONE_SHARD, faults_below, faults_of
from tests.faults.zombies import HISTORY, run_zombies
from tests.integration.broker.core.histories_run import run_history
from tests.integration.janitor.conftest import READY, SMALL
from tests.integration.janitor.instances import instance
from tests.integration.janitor.jobs.kills import STAGES, wave

FAULTS_SHOWN = 20


async def kills(stack: LocalStack, stubs: Stubs, given: argparse.Namespace) -> Run:
    """Kill random services, spread over a run of messages through ten queues."""
    run = Run(make_lines(given.messages))
    await run.create_queues(stubs)
    victims = random.Random(given.seed).choices(SERVICES, k=given.kills)
    print(f"{given.messages} messages, {run.entries_count} entries; kills: {', '.join(victims)}")
    publishing = _publish_with_command(stack, run) if given.command else run.publish(stubs)
    await asyncio.gather(publishing, run.consume(stubs, 2), kill_along(stack, run, victims))
    await run.find_nothing_more(stubs)
    return run


async def _publish_with_command(stack: LocalStack, run: Run) -> None:
    """`slatemq publish --jsonl`, gone on with from the count it printed where it gave up."""
    lines = stack.folder / "lines.jsonl"
    lines.write_bytes(b"".join(line.payload + b"\n" for line in run.lines))
    command = [sys.executable, "-m", "slatemq.cli", "--endpoint", stack.endpoint, "--json"]
    while run.published_count < len(run.lines):
        process = await asyncio.create_subprocess_exec(
            *(*command, "publish", "--jsonl", str(lines)),
            *("--headers-from", "/kind,/region,/n,/rare", "--skip", str(run.published_count)),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        durable = int(json.loads(out.splitlines()[-1])["durable_count"])
        print(f"slatemq publish: {durable} durable, exit code {process.returncode}")
        assert durable > run.published_count or process.returncode == 0
        run.published_count = durable


async def ingest_down(stack: LocalStack, stubs: Stubs, given: argparse.Namespace) -> Run:
    """Stop ingest while consumers claim what no cache holds; each message takes one attempt."""
    return await ingest_down_under_claims(stack, stubs, given.seconds)


async def chains(stack: LocalStack, stubs: Stubs, given: argparse.Namespace) -> Chains:
    """Kill random services while workers complete messages and push the next, queue after queue."""
    run = Chains(given.messages)
    await run.begin(stubs)
    victims = random.Random(given.seed).choices(SERVICES, k=given.kills)
    print(f"{given.messages} messages; kills: {', '.join(victims)}")
    await asyncio.gather(run.work(stubs), kill_along(stack, run, victims))
    await run.judge(stubs)
    return run


FORMS = {"kills": kills, "ingest-down": ingest_down, "chains": chains}
"""Those on a stack that is started for them."""

SEEDLESS = ("ingest-down", "janitor", "frozen", "overload", "reads")
"""Those that do not take `--seed`: another run repeats nothing more of them."""

STAGES_COUNT = len(STAGES["retention"])
"""Each job has as many."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", choices=[*FORMS, *RUNS])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument(
        "--kills",
        type=int,
        default=10,
        help="of services; with events of ingest, and as many of the backend",
    )
    parser.add_argument(
        "--command", action="store_true", help="publish with `slatemq publish --jsonl`"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="how long ingest is down, zombies run, owners are frozen, or each trouble of the "
        "store lasts",
    )
    seed = f"of random choices; unused by {', '.join(SEEDLESS)}"
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help=seed)
    parser.add_argument("--commands", type=int, default=100_000, help="of a random history")
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=range(1, STAGES_COUNT + 1),
        default=range(1, STAGES_COUNT + 1),
        help="of the janitor's jobs, at which to kill; minutes each",
    )
    rounds = "of frozen owners, failover's stops, full disks, and damage"
    parser.add_argument("--rounds", type=int, default=2, help=rounds)
    parser.add_argument("--changes", type=int, default=0, help="of queues, beside the zombies")
    parser.add_argument(
        "--history", type=Path, help="keep what clients wrote down in this file, for tests.judge"
    )
    parser.add_argument(
        "--from",
        dest="from_reference",
        default="",
        help="the commit to upgrade from; the last tag, or HEAD~5 while there is none",
    )
    parser.add_argument("--hours", type=float, default=0.05, help="of a soak")
    parser.add_argument(
        "--samples",
        type=Path,
        default=Path("build/soak.jsonl"),
        help="of a soak: the file of its samples, beside which the picture is drawn",
    )
    parser.add_argument("--restarts", type=int, default=200, help="of the broker in a history")
    _add_event_options(parser)
    parser.add_argument(
        "--requests", type=int, default=FULL_REQUESTS, help="of hostile clients; 1 repeats one"
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument(
        "--secured", action="store_true", help="hostile clients of a stack with TLS and a policy"
    )
    parser.add_argument("--json", action="store_true", help="the verdict of hostile as JSON alone")
    return parser.parse_args()


def _add_event_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=MODES, default="async", help="of event queues")
    parser.add_argument("--backend", choices=BACKENDS, default="redis", help="of event queues")
    parser.add_argument("--publishes", type=int, default=100_000, help="with event queues")
    parser.add_argument(
        "--publishers", type=int, default=PUBLISHERS, help="callers at once, with event queues"
    )
    parser.add_argument(
        "--down-seconds", type=float, default=0, help="how long the backend of event queues is down"
    )


def _history(given: argparse.Namespace) -> int:
    """One random history for a real broker and plain queues, compared every 100 commands."""
    began = time.monotonic()

    reported = 0

    def report(done: int) -> None:
        nonlocal reported
        if done - reported >= 5000:
            reported = done
            print(f"{done} commands, {time.monotonic() - began:.0f} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="slatemq-history-") as folder:
        done = asyncio.run(
            run_history(Path(folder), given.seed, given.commands, given.restarts, report)
        )
        faults = faults_of(Path(folder).as_uri(), OF_ONE_SHARD)
    print(f"{done} commands, {given.restarts} restarts, every list as it should be")
    return _show(faults)


def _janitor(given: argparse.Namespace) -> int:
    """Every job of the janitor, killed at each of its stages, then done by two together."""
    wanted = given.stages
    of_all = list(zip(*STAGES.values(), strict=True))

    async def waves(spark: SparkSession, folder: Path) -> None:
        async with instance(folder) as made:
            for number, stage in enumerate(wanted):
                chosen = dict(zip(STAGES, of_all[stage - 1], strict=True))
                print(", ".join(f"{job}: {stage}" for job, stage in chosen.items()), flush=True)
                await wave(spark, made, str(number), chosen, folder)

    with (
        spark_session("local[2]", "512m", {**SMALL, **READY}) as spark,
        tempfile.TemporaryDirectory(prefix="slatemq-janitor-") as folder,
    ):
        asyncio.run(waves(spark, Path(folder)))
        faults = faults_below(Path(folder))
    print("each job came to its end, and nothing was removed that was needed")
    return _show(faults)


def _zombies(given: argparse.Namespace) -> int:
    """Kill, freeze, replace and thaw every member for a while; every message is accounted for."""
    return _judge_history(
        given, lambda folder: run_zombies(folder, given.seconds, given.seed, given.changes)
    )


def _frozen(given: argparse.Namespace) -> int:
    """Freeze owners for longer than their WAL is kept."""
    return _judge_history(given, lambda folder: run_frozen(folder, given.rounds, given.seconds))


def _failover(given: argparse.Namespace) -> int:
    """Kill, stop and freeze owners whose shards have a standby."""
    faults: list[str] = []

    async def run(folder: Path) -> Work:
        found = await run_failovers(folder, given.kills, given.rounds, given.seed)
        print(found.table())
        faults.extend([*found.slow(), *found.replaced()])
        return found.work

    return _judge_history(given, run) or _show(faults)


def _disk(given: argparse.Namespace) -> int:
    """Fill the disk of owners, again and again."""
    return _judge_history(
        given, lambda folder: run_full_disk(folder, given.rounds, given.seed, 2 * LEASE_S)
    )


def _network(given: argparse.Namespace) -> int:
    """Cut, delay, swallow and half-close the links between processes."""
    met: Counter[str] = Counter()

    async def run(folder: Path) -> Work:
        work, troubles = await run_network(folder, given.seconds, given.seed)
        met.update(troubles)
        return work

    code = _judge_history(given, run)
    print(", ".join(f"{name}: {count}" for name, count in sorted(met.items())))
    return code


def _restarts(given: argparse.Namespace) -> int:
    """Kill everything at once, step clocks, and take memory away."""
    done: Counter[str] = Counter()

    async def run(folder: Path) -> Work:
        work, mishaps = await run_restarts(folder, given.rounds, given.seed)
        done.update(mishaps)
        return work

    code = _judge_history(given, run)
    print(", ".join(f"{name}: {count}" for name, count in sorted(done.items())))
    return code


def _overload(given: argparse.Namespace) -> int:
    """Offer a stack five times what it can take."""
    with tempfile.TemporaryDirectory(prefix="slatemq-overload-") as folder:
        faults = run_overload(Path(folder), given.seconds)
    print(f"{len(faults)} faults")
    return _show(faults)


def _soak(given: argparse.Namespace) -> int:
    """Mixed work for hours, with the janitor's jobs."""
    seconds = given.hours * 3600
    with tempfile.TemporaryDirectory(prefix="slatemq-soak-") as folder:
        faults = run_soak(Path(folder), seconds, given.seed, given.samples)
    print(f"{len(faults)} faults")
    return _show(faults)


def _upgrade(given: argparse.Namespace) -> int:
    """Replace processes of an older version by ours, under load."""
    reference = given.from_reference or last_version()
    try:
        return _judge_history(given, lambda folder: run_upgrade(folder, reference, given.seed))
    except NoUpgrade as reason:
        print(f"no upgrade was tried: {reason}")
        return 0


def _judge_history(
    given: argparse.Namespace, run: Callable[[Path], Coroutine[Any, Any, Work]]
) -> int:
    """Have clients write a history, judge it and the store; returns the exit code.

    The history is kept where `--history` says.
    """
    with tempfile.TemporaryDirectory(prefix=f"slatemq-{given.form}-") as name:
        folder = Path(name)
        try:
            work = asyncio.run(run(folder))
        finally:
            _keep_history(given, folder)
        faults = [*judged(folder / HISTORY), *faults_below(folder)]
    return _show_work(work, faults)


def _keep_history(given: argparse.Namespace, folder: Path) -> None:
    """Copy the history of a run to where `--history` says, if it says so."""
    if given.history and (folder / HISTORY).exists():
        shutil.copy(folder / HISTORY, given.history)


def _show_work(work: Work | None, faults: list[str]) -> int:
    """Say what came of a history; returns the exit code."""
    if work is not None:
        print(f"{work.answered_count} publishes answered, {work.finished_count} finished")
    print(f"{len(faults)} faults")
    return _show(faults)


async def _run(stack: LocalStack, given: argparse.Namespace) -> Run | Chains:
    form: Any = FORMS[given.form]
    async with Stubs() as stubs:
        await stubs.connect(stack.endpoint)
        work: Coroutine[Any, Any, Run | Chains] = form(stack, stubs, given)
        return await work


def main() -> int:
    """Run one form, say what came of it."""
    given = _parse()
    if given.form in SEEDLESS:
        print(given.form)
    elif not given.json:
        print(f"{given.form}, seed {given.seed}")
    if given.form in RUNS:
        try:
            return RUNS[given.form](given)
        except (pytest.skip.Exception, pytest.fail.Exception) as lacking:
            print(f"{given.form} did not run: {lacking}", file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory(prefix="slatemq-faults-") as folder:
        with LocalStack(Path(folder)) as stack:
            began = time.monotonic()
            try:
                run = asyncio.run(_run(stack, given))
            finally:
                print(stack.said)
            took = time.monotonic() - began
        return _judge(run, took, faults_below(Path(folder)))


def _store(given: argparse.Namespace) -> int:
    """A stack on S3 through every trouble that a store can make."""
    with tempfile.TemporaryDirectory(prefix="slatemq-store-") as name:
        folder = Path(name)
        try:
            work, faults = run_store(folder, given.seconds, given.seed)
        finally:
            _keep_history(given, folder)
    return _show_work(work, faults)


def _reads(given: argparse.Namespace) -> int:
    """A stack on S3 that cannot read its tables for a while."""
    with tempfile.TemporaryDirectory(prefix="slatemq-reads-") as folder:
        began = time.monotonic()
        run, found = run_failing_reads(Path(folder), given.messages, given.seconds)
        return _judge(run, time.monotonic() - began, found)


def _events(given: argparse.Namespace) -> int:
    """Publishes in a mode of event queues, with kills of ingest and of the backend."""
    began = time.monotonic()
    victims = victims_of(given.kills, given.seed)
    with tempfile.TemporaryDirectory(prefix="slatemq-events-") as folder:
        run = run_events(
            Path(folder),
            given.mode,
            given.backend,
            given.publishes,
            victims,
            given.down_seconds,
            given.publishers,
        )
        faults = [*run.faults(), *faults_below(Path(folder))]
    print(
        f"{given.mode} on {given.backend}: {len(run.answered)} publishes answered, "
        f"{run.failed_calls} calls repeated, {len(run.stored)} messages stored, "
        f"{run.events_count} events for {len(run.event_ids)} messages, {len(faults)} faults, "
        f"{time.monotonic() - began:.0f} s"
    )
    return _show(faults)


def _hostile(given: argparse.Namespace) -> int:
    """Clients that mean harm, beside one that does not."""
    with tempfile.TemporaryDirectory(prefix="slatemq-hostile-") as folder:
        try:
            verdict = asyncio.run(
                run_hostile(
                    Path(folder),
                    seed=given.seed,
                    requests=given.requests,
                    secured=given.secured,
                    first=given.first,
                    quiet=given.json,
                )
            )
        except KeyboardInterrupt:
            print("interrupted; the stack is stopped", file=sys.stderr)
            return 130
        with redirect_stdout(sys.stderr):
            verdict.faults.extend(faults_below(Path(folder)))
    if given.json:
        print(json.dumps(asdict(verdict)))
        return 1 if verdict.faults else 0
    return _show_verdict(verdict, given)


def _rot(given: argparse.Namespace) -> int:
    """Damage of the files of a store: each is named, and nothing damaged is served."""
    with tempfile.TemporaryDirectory(prefix="slatemq-rot-") as folder:
        faults = run_rot(Path(folder), given.rounds, given.seed)
    print(f"{given.rounds} damages, {len(faults)} faults")
    return _show(faults)


def _show_verdict(verdict: Verdict, given: argparse.Namespace) -> int:
    for name, value in (*verdict.counts.items(), ("codes", verdict.codes)):
        print(f"{name}: {value}")
    print(f"memory in MiB (before, at the most, afterwards): {verdict.memory}")
    print(f"a message took, in ms: {verdict.latency_ms}")
    print(f"{verdict.form}: {len(verdict.faults)} faults, {verdict.seconds} s")
    secured = " --secured" if given.secured else ""
    for repeat in verdict.repeat[:FAULTS_SHOWN]:
        print(f"  python -m tests.faults hostile {repeat}{secured}")
    return _show(verdict.faults)


def _judge(run: Run | Chains, took: float, found: list[str]) -> int:
    """Say what came of a run, and of its store; returns the exit code."""
    faults = [*run.faults(), *found]
    print(
        f"{run.published_count} published, {run.acked_count} acked, "
        f"{run.redelivered_count} redelivered, {len(faults)} faults, {took:.1f} s"
    )
    return _show(faults)


def _show(faults: list[str]) -> int:
    """Print the first faults; returns the exit code."""
    for fault in faults[:FAULTS_SHOWN]:
        print(f"  {fault}")
    return 1 if faults else 0


RUNS = {
    "histories": _history,
    "janitor": _janitor,
    "zombies": _zombies,
    "frozen": _frozen,
    "failover": _failover,
    "disk": _disk,
    "network": _network,
    "restarts": _restarts,
    "overload": _overload,
    "soak": _soak,
    "upgrade": _upgrade,
    "store": _store,
    "reads": _reads,
    "events": _events,
    "hostile": _hostile,
    "rot": _rot,
}
"""Those that start what they need by themselves."""

if __name__ == "__main__":
    sys.exit(main())
