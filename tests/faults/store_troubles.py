"""A stack on S3 whose store loses and breaks off answers, refuses, resets, swallows, and is slow.

Each trouble lasts for a while, in the middle of the work of clients that write a history. Then
every shard must open again by itself, and the history must have no fault.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.stack.process import until_serving
from tests.acceptance.local_stack import LocalStack, is_running
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.faults.mixed_work import Work, judged, run_work
from tests.faults.verified import faults_of
from tests.faults.zombies import HISTORY
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

OWNERS = ("ingest", "broker")
DOWN_S = (15.0, 20.0)
"""A store that is down for most of the time: a shard has 5 s to open."""

BETWEEN = 20
"""Publishes that are answered, and messages that are finished, before the next trouble."""

RESTART_SECONDS = 300.0
"""How long an owner may take to serve while the store is in trouble."""

BACK_SECONDS = 180.0
"""How long the owners may take to serve once the store is well again."""


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong for a while.

    Attributes:
        name: For people.
        faults: What happens to requests.
        kills: Whether the owners are killed in it, and so open their shards in it.
    """

    name: str
    faults: Callable[[], tuple[Fault, ...]]
    kills: bool = False


# Not STALE: the launcher gives up where a store has listings that lag, as no process can start.
TROUBLES = (
    Trouble(
        "a fifth of the answers to writes lost", lambda: (Fault(Outcome.LOSE, "PUT", "", 0, 0.2),)
    ),
    Trouble(
        "owners killed, a fifth of the answers lost at their start",
        lambda: (Fault(Outcome.LOSE, "", "", 0, 0.2),),
        kills=True,
    ),
    Trouble("a storm of 503", lambda: (Fault(Outcome.REFUSE, "", "", 0, 0.7),)),
    Trouble(
        "owners killed, a third of the answers to reads broken off",
        lambda: (Fault(Outcome.BREAK, "GET", "", 0, 0.3),),
        kills=True,
    ),
    Trouble(
        "owners killed, a tenth of the answers with their databases short, and said to be whole",
        # A payload that comes short twice counts as damaged, which is no loss of the store's.
        lambda: tuple(Fault(Outcome.SHORTEN, "GET", f"{one}/", 0, 0.1) for one in OWNERS),
        kills=True,
    ),
    Trouble("every connection reset", lambda: (Fault(Outcome.RESET),)),
    Trouble("every request swallowed", lambda: (Fault(Outcome.HANG),)),
    Trouble("blackholed", lambda: (Fault(Outcome.HOLD),)),
    Trouble("2 s for each request", lambda: (Fault(delay_s=2.0),)),
    Trouble("owners killed, 100 ms for each request", lambda: (Fault(delay_s=0.1),), kills=True),
    Trouble(
        "owners killed, connections reset for 15 of every 20 s",
        lambda: (Fault(Outcome.RESET, window_s=DOWN_S), Fault(delay_s=0.05)),
        kills=True,
    ),
    Trouble(
        "owners killed, 503 for 15 of every 20 s",
        lambda: (Fault(Outcome.REFUSE, window_s=DOWN_S), Fault(delay_s=0.05)),
        kills=True,
    ),
    Trouble(
        "owners killed, blackholed for 15 of every 20 s",
        lambda: (Fault(Outcome.HOLD, window_s=DOWN_S), Fault(delay_s=0.05)),
        kills=True,
    ),
)


async def _undergo(stack: LocalStack, store: FaultyStore, trouble: Trouble, seconds: float) -> None:
    """One trouble. Raises AssertionError where the owners do not serve again in time."""
    faults = trouble.faults()
    store.set(*faults)
    killed = {}
    if trouble.kills:
        killed = {owner: stack.signal(owner, signal.SIGKILL) for owner in OWNERS}
    await asyncio.sleep(seconds)
    for owner, pid in killed.items():
        try:
            await asyncio.to_thread(stack.wait_restarted, owner, pid, RESTART_SECONDS)
        except AssertionError as error:
            raise AssertionError(
                f"{trouble.name}: {owner} does not serve again: {error}"
            ) from error
    store.set()
    happened = sum(fault.happened for fault in faults)
    assert happened, f"{trouble.name}: no request was made"
    ended = time.monotonic()
    deadline = asyncio.get_running_loop().time() + BACK_SECONDS
    for owner in OWNERS:
        try:
            async with asyncio.timeout_at(deadline):
                await _until_back(stack, owner)
        except TimeoutError as error:
            late = f"{owner} does not serve {BACK_SECONDS:g} s later"
            raise AssertionError(f"{trouble.name}: {late}") from error
    back = time.monotonic() - ended
    print(f"{trouble.name}: {happened} requests, all serve {back:.1f} s later", flush=True)


async def _until_back(stack: LocalStack, owner: str) -> None:
    """Wait until it serves, and the launcher has noted the process that the next trouble kills."""
    await until_serving(stack.endpoints[owner])
    while not is_running(stack.pids[owner]):
        await asyncio.sleep(0.05)


async def _trouble_along(
    stack: LocalStack,
    store: FaultyStore,
    work: Work,
    troubles: Sequence[Trouble],
    seconds: float,
) -> None:
    """One trouble after another; clients get on with their work between them."""
    for trouble in troubles:
        try:
            async with asyncio.timeout(BACK_SECONDS):
                await _until_working(work)
        except TimeoutError as error:
            raise AssertionError(f"before {trouble.name}: nothing is done any more") from error
        with work.client.named("store").trouble(trouble.name):
            await _undergo(stack, store, trouble, seconds)


async def _until_working(work: Work) -> None:
    answered, finished = work.answered_count, work.finished_count
    while work.answered_count < answered + BETWEEN or work.finished_count < finished + BETWEEN:
        await asyncio.sleep(0.05)


def run_store(
    folder: Path,
    seconds: float,
    seed: int,
    troubles: Sequence[Trouble] = TROUBLES,
) -> tuple[Work | None, list[str]]:
    """A history on a fresh stack, with each of the troubles for `seconds`.

    Also returns its faults, and those of the store that is left. A wait that runs out ends the run,
    and is its only fault but for those of the store: the work is None then.
    """
    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    file, work = folder / HISTORY, None
    faults: list[str] = []
    with moto() as port, faulty_store(port, seed) as store:
        # Of its own: the servers of one process share what they hold.
        url = root_url(store.port, f"faults/{folder.name}")
        with LocalStack(folder, "--store", url, ready=True) as stack:
            try:
                work = asyncio.run(
                    run_work(
                        file,
                        stack.endpoint,
                        seed,
                        lambda work: _trouble_along(stack, store, work, troubles, seconds),
                    )
                )
            except AssertionError as error:
                faults.append(f"ended early: {error}")
            finally:
                store.set()
                print(stack.said)
        if work is not None:
            faults += judged(file)
        return work, [*faults, *faults_of(url)]
